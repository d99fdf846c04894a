"""Chat templates render as in transformers, and are stopped at their limits."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from hetero_kv.models import ModelError, load_model, templates
from hetero_kv.models.templates import TemplateError, TemplateLimitError, rendered_chat
from tests.campaigns.gguf_files import SLOW_TEMPLATES, TEMPLATES
from tests.support.gguf_models.container import STRING, Layout, scalar
from tests.support.slow_variants import with_few
from tests.support.tiny_qwen2 import CHAT_TEMPLATE, tiny_tokenizer

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Grüße, 世界 😀 <b>&</b> \ud800 {{ 1 }}"},
    {"role": "assistant", "content": "line one\nline two"},
    {"role": "user", "content": ""},
]
ORDINARY = (
    CHAT_TEMPLATE,
    "{%- for m in messages %}\n  {%- if loop.first and m.role == 'system' %}\n    {{- bos_token }}S\n  {%- endif %}\n"
    "  {{- m['content'] | trim ~ eos_token }}\n{%- endfor %}{% if add_generation_prompt %}A:{% endif %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.n = ns.n + 1 %}{% else %}"
    "{% continue %}{% endif %}{{ ns.n }} {{ m | tojson }} {{ m | tojson(indent=2) }}{% endfor %}",
    "{% for m in messages %}{% generation %}{{ m.content.split('\\n')[-1] | upper }}{% endgeneration %}{% endfor %}"
    "{{ tools is none }}{{ documents is none }}{{ dict(a=1).items() | list }}{{ undefined_name }}",
    "{% macro turn(m) %}[{{ m.role }}]{% endmacro %}{% for m in messages[::-1] %}{{ turn(m) }}{% endfor %}"
    "{{ strftime_now('%Y') | length }}",
)


def tokenizer_with(template):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("template", ORDINARY)
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_a_template_renders_as_in_transformers(template, add_generation_prompt):
    tokenizer = tokenizer_with(template)
    expected = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=add_generation_prompt)
    assert rendered_chat(tokenizer, MESSAGES, add_generation_prompt=add_generation_prompt) == expected


@pytest.mark.parametrize("template", with_few([*TEMPLATES, SLOW_TEMPLATES[0]], quick=TEMPLATES))
def test_a_hostile_template_ends_in_an_error_of_ours_or_in_a_short_text(template, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(templates, "SECONDS", 0.1)
        try:
            text = rendered_chat(tokenizer_with(template), MESSAGES)
        except TemplateError as error:
            text = str(error)
    assert len(text) < 1000
    # The next one is not touched by what became of it.
    assert rendered_chat(tokenizer_with("{{ messages | length }}"), MESSAGES) == "4"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ 'a' * 10**9 }}", "stopped: it takes more than [0-9]+ MB"),
        (
            "{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}",
            "stopped: its text is longer than [0-9,]+",
        ),
        (SLOW_TEMPLATES[1], "stopped: it takes more than 0.5 s"),
    ],
)
def test_a_template_that_takes_too_much_is_named_with_the_limit_on_every_thread(template, message, monkeypatch):
    monkeypatch.setattr(templates, "SECONDS", 0.5)
    failed = []

    def render():
        try:
            rendered_chat(tokenizer_with(template), MESSAGES)
        except TemplateLimitError as error:
            failed.append(error)

    thread = threading.Thread(target=render)
    thread.start()
    thread.join()
    with pytest.raises(TemplateLimitError, match=message):
        raise failed[0]


def test_a_template_that_refuses_a_conversation_is_quoted():
    refusing = "{{ raise_exception('Conversation roles must alternate') }}"
    with pytest.raises(ModelError, match="cannot render this conversation: TemplateError: Conversation roles must"):
        rendered_chat(tokenizer_with(refusing), MESSAGES)


def test_a_long_conversation_is_within_the_limits():
    messages = [{"role": "user", "content": "😀 and so on " * 400_000}]
    text = rendered_chat(tokenizer_with(CHAT_TEMPLATE), messages)
    assert messages[0]["content"] in text


def test_conversations_of_many_threads_are_not_confused():
    def render(number):
        return rendered_chat(tokenizer_with("{{ messages[0].content }}"), [{"role": "user", "content": str(number)}])

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(render, range(200))) == [str(number) for number in range(200)]


def test_a_model_whose_template_takes_too_much_is_refused_when_it_is_loaded(tiny_gguf, tmp_path):
    layout = Layout.of(tiny_gguf)
    layout.entries = [entry for entry in layout.entries if entry[0] != "tokenizer.chat_template"]
    layout.entries.append(("tokenizer.chat_template", scalar(STRING, "{{ 'a' * 10**9 }}")))
    layout.write(tmp_path / "bomb.gguf")
    with pytest.raises(ModelError, match="the model's chat template was stopped: it takes more than"):
        load_model(tmp_path / "bomb.gguf", device="cpu")


# Killed in between, and forked.
WITHOUT_WARNINGS = """
import gc, os, signal
from types import SimpleNamespace
from hetero_kv.models.templates import _RENDERER, rendered_chat
model = SimpleNamespace(get_chat_template=lambda: "{{ messages | length }}", special_tokens_map={})
print(rendered_chat(model, [{}]))
os.kill(_RENDERER.process.pid, signal.SIGKILL)
_RENDERER.process.wait()
print(rendered_chat(model, [{}, {}]), flush=True)
if os.fork() == 0:
    print(rendered_chat(model, [{}, {}, {}]), flush=True)
    gc.collect()
    _RENDERER.end()
    os._exit(0)
os.wait()
"""


def test_pipes_are_closed_whatever_becomes_of_the_process_that_renders():
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", WITHOUT_WARNINGS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (done.stdout.split(), done.stderr) == (["1", "2", "3"], "")
