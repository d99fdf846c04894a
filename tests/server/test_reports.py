"""What users of other servers meet: each a situation that must end well here, or be told."""

from __future__ import annotations

import httpx2 as httpx
import pytest

from tests.server.running import host_of, running, tiny_served
from tests.support import tool_templates
from tests.support.free_rows import FreeRows

pytestmark = pytest.mark.usefixtures("one_thread")

THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
QUESTION = {"role": "user", "content": "What stands in the minutes of the meeting? " * 6}


def serving(template, folder):
    """A tiny model with a chat template, and a server of it."""
    found = tiny_served()
    found.tokenizer.chat_template = template
    return found, running(host_of(found, folder=folder))


def answered(address, messages, **fields):
    """The usage and the timings of an answer."""
    body = {"messages": messages, "max_tokens": 12, "ignore_eos": True, **fields}
    found = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=60).json()
    return found["usage"]["prompt_tokens_details"]["cached_tokens"], found["timings"], found["choices"][0]["message"]


def test_a_template_that_drops_thoughts_reuses_all_before_them_and_says_so(tmp_path):
    served, server = serving(THINKING, tmp_path)
    with served.engine, server as address:
        answered(address, [QUESTION])
        answer = {"role": "assistant", "content": "It says", "reasoning_content": "Let me think"}
        cached, timings, _ = answered(address, [QUESTION, answer, {"role": "user", "content": "More?"}])
        prompt = len(served.engine.encode([QUESTION]))
        assert cached >= prompt - 1
        assert timings["cache_reason"] == "differs"
        assert f"from token {cached} on" in timings["cache_text"]


def test_a_date_at_the_head_of_the_system_message_is_told(tmp_path):
    served, server = serving(tool_templates.HERMES, tmp_path)
    with served.engine, server as address:
        for day in ("1st", "2nd"):
            cached, timings, _ = answered(
                address, [{"role": "system", "content": f"{day} of May. Be brief."}, QUESTION]
            )
        assert cached < 30
        assert timings["cache_reason"] == "differs"
        assert f"from token {cached} on" in timings["cache_text"]


def test_a_tool_call_comes_back_as_it_was_written(tmp_path):
    tool = {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {"type": "object", "properties": {"page": {"enum": [1, 2]}}, "required": ["page"]},
        },
    }
    served, server = serving(tool_templates.HERMES, tmp_path)
    with served.engine, server as address:
        fields = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 300}
        _, _, message = answered(address, [QUESTION], **fields, ignore_eos=False, temperature=1.0, seed=4)
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "page text"}
        cached, _, _ = answered(address, [QUESTION, message, result], tools=[tool])
        prompt = len(served.engine.encode([QUESTION], tools=[tool]))
        # The call was written by the grammar with its own spaces; all before it is reused in any case.
        assert cached >= prompt


def test_tools_that_only_others_run_are_named_and_left_out(http):
    tools = [{"type": "web_search"}, {"type": "local_shell"}]
    found = http.post("/v1/responses", json={"input": "x", "tools": tools, "max_output_tokens": 1})
    assert found.status_code == 200
    assert found.headers["x-hetero-kv-ignored"] == "tools[0] (web_search),tools[1] (local_shell)"


def test_a_short_prompt_is_reused_too(http):
    body = {"prompt": [9, 8, 7, 6, 5], "max_tokens": 1}
    http.post("/v1/completions", json=body)
    found = http.post("/v1/completions", json=body).json()
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == 4


def test_reuse_can_be_turned_off(http):
    body = {"messages": [QUESTION], "max_tokens": 1}
    http.post("/v1/chat/completions", json=body)
    found = http.post("/v1/chat/completions", json={**body, "cache_prompt": False}).json()
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert found["timings"]["cache_reason"] == "off"


def test_thoughts_that_the_template_opens_are_apart(tmp_path):
    served, server = serving(THINKING + "<think>\n", tmp_path)
    with served.engine, server as address:
        _, _, message = answered(address, [QUESTION])
        assert message["content"] == ""
        assert message["reasoning_content"]


@pytest.mark.parametrize("route", ["completions", "chat/completions", "responses", "messages"])
def test_guesses_change_no_answer_and_are_counted(route, tmp_path):
    served = tiny_served()
    served.engine._speculation.costs = FreeRows()
    prompts = {
        "completions": {"prompt": [9, 8, 7, 6, 5] * 20, "max_tokens": 40, "ignore_eos": True},
        "chat/completions": {"messages": [QUESTION], "max_tokens": 40, "ignore_eos": True},
        "responses": {"input": QUESTION["content"], "max_output_tokens": 40, "ignore_eos": True},
        "messages": {"messages": [QUESTION], "max_tokens": 40, "grammar": f'start: "{"in the minutes " * 4}"'},
    }
    body = {"logit_bias": {"9": 100, "8": 99}, "frequency_penalty": 2.0, **prompts[route]}
    host = host_of(served, folder=tmp_path)
    with served.engine, running(host) as address:
        without, found = (
            httpx.post(f"{address}/v1/{route}", json={**body, "speculation": way}, timeout=60).json()
            for way in ("off", "lookup")
        )
        refused = [
            httpx.post(f"{address}/v1/{route}", json={**body, "speculation": "guess", "stream": stream})
            for stream in (False, True)
        ]
        lines = httpx.get(f"{address}/metrics").text.splitlines()
    if route == "messages":
        assert found["content"] == without["content"]
    elif route == "responses":
        assert found["output"][0]["content"] == without["output"][0]["content"]
    else:
        text = "text" if route == "completions" else "message"
        assert found["choices"][0][text] == without["choices"][0][text]
        assert "draft_n" not in without["timings"]
        timings = found["timings"]
        assert timings["draft_n"] >= timings["draft_n_accepted"] > 0
        assert f'hetero_kv_drafted_tokens_total{{model="tiny:dense"}} {timings["draft_n"]}.0' in lines
    drafted = [line for line in lines if line.startswith('hetero_kv_drafted_tokens_total{model="tiny:dense"}')]
    assert float(drafted[0].split()[-1]) > 0
    assert [(each.status_code, "speculation" in each.text) for each in refused] == [(400, True)] * 2
