"""The example family of docs/adding_a_method.md, named in YAML by its dotted path."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetero_kv import HeteroCache, eject, inject
from hetero_kv.adapter.operator import AttentionOperator
from hetero_kv.cli import main
from hetero_kv.engine.sequence import Layout
from hetero_kv.errors import HeteroKVError
from hetero_kv.evals.budget import attended_tokens
from hetero_kv.evals.shared_prefill import record_prefill
from hetero_kv.families.token_retrieval.choosers.chooser import Chooser
from hetero_kv.rules.rule_file import load_rules
from tests.support.ragged_rows import Batch, alone, assert_same_but_for_rounding, prompt
from tests.support.slow_variants import with_few
from tests.support.tiny_models import tiny_config, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
RULES = EXAMPLES / "dilated.yaml"
SMALL = {"sink_tokens": 4, "local_windows_len": 8, "dilation": 4}
ENGINE = {"chunk_size": 16, "threads_num": 1}
LENGTHS = (3, 21, 60)
PROMPTS = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]


@pytest.fixture(autouse=True)
def examples_on_the_path(monkeypatch):
    """As PYTHONPATH=docs/examples would have them."""
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.fixture
def injected():
    """A tiny model with the page's rules in it; they are out again after the test."""
    models = []

    def made(architecture="llama", **settings):
        models.append(tiny_model(architecture))
        inject(
            models[-1],
            load_rules(RULES, trust_rules=["dilated_attention"]),
            command_line={**SMALL, **ENGINE, **settings},
        )
        return models[-1]

    yield made
    for model in models:
        eject(model)


def operators_of(model):
    return [type(operator).__name__ for operator in model.hetero_kv_injection.attention_operators()]


@given(
    length=st.integers(0, 60),
    sink_tokens=st.integers(0, 9),
    local_windows_len=st.integers(1, 20),
    dilation=st.integers(1, 9),
)
def test_as_many_tokens_stay_as_the_footprint_counts(length, **values):
    from dilated_attention import DilatedSettings

    settings = DilatedSettings(**values)
    assert settings.tokens_kept(length) == int(settings.is_kept(torch.arange(length), length).sum())


@pytest.mark.parametrize("covering", [{"dilation": 1}, {"local_windows_len": 100}, {"sink_tokens": 100}])
@pytest.mark.parametrize("architecture", with_few(["llama", "gemma2", "gpt_oss"]))
def test_a_pattern_that_covers_everything_is_full_attention(architecture, covering, injected):
    tokens = torch.stack([prompt(70, 1), prompt(70, 2)])
    with torch.no_grad():
        expected = tiny_model(architecture)(tokens).logits
    model = injected(architecture, **covering)
    cache = HeteroCache(model)
    with torch.no_grad():
        parts = [tokens[:, :50], *tokens[:, 50:60].split(1, dim=1), tokens[:, 60:]]
        found = torch.cat([model(part, past_key_values=cache).logits for part in parts], dim=1)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    sliding = [] if architecture == "llama" else ["SlidingWindowAttention"]
    assert operators_of(model) == [*sliding, *["DilatedAttention"] * (3 - 2 * len(sliding)), *sliding]


def test_a_decoded_token_attends_to_the_pattern_and_to_nothing_else(injected):
    model, untouched = injected(), tiny_model("llama")
    past, token = prompt(40, 3), prompt(1, 4)
    kept = [p for p in range(40) if p < 4 or p >= 40 - 8 or p % 4 == 0]
    hidden = torch.full((1, 1, 41, 41), float("-inf")).triu(1)
    left_out = [p for p in range(40) if p not in kept]
    hidden[..., 40, left_out] = float("-inf")
    with torch.no_grad():
        expected = untouched(torch.cat([past, token])[None], attention_mask=hidden).logits[0, -1:]
    found = alone(model, HeteroCache(model), (past, token))[-1:]
    assert_same_but_for_rounding(found, expected)


def test_rows_of_a_left_padded_batch_equal_each_row_alone(injected):
    model = injected()
    batch = Batch(model, HeteroCache(model), PROMPTS)
    batch.answer(12)
    batch.select([2, 0])
    batch.extend(Batch(model, HeteroCache(model), [prompt(33, 9)]))
    batch.answer(5)
    for row, logits in zip((2, 0), batch.logits, strict=False):
        assert_same_but_for_rounding(logits, alone(model, HeteroCache(model), (PROMPTS[row], 12, 5)), row)
    assert_same_but_for_rounding(batch.logits[2], alone(model, HeteroCache(model), (prompt(33, 9), 5)))


def test_a_forward_that_fails_half_way_leaves_no_trace(injected, monkeypatch):
    model = injected()
    cache, other = HeteroCache(model), HeteroCache(model)
    alone(model, cache, (PROMPTS[2],))
    alone(model, other, (PROMPTS[2],))
    last = list(model.hetero_kv_injection.attention_operators())[-1]
    for part in (prompt(1, 5), prompt(30, 6)):
        with monkeypatch.context() as patched:
            patched.setattr(last, "attend", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                alone(model, cache, (part,))
        assert cache.lengths == [60]
    assert cache.statistics == other.statistics
    script = prompt(7, 7), 4
    assert torch.equal(alone(model, cache, script), alone(model, other, script))


def test_forks_go_on_by_themselves(injected):
    model = injected()
    cache = HeteroCache(model)
    alone(model, cache, (PROMPTS[1],))
    fork = cache.fork()
    alone(model, cache, (prompt(9, 5), 3))
    assert_same_but_for_rounding(
        alone(model, fork, (prompt(5, 6), 3)), alone(model, HeteroCache(model), (PROMPTS[1], prompt(5, 6), 3))[21:]
    )


def test_beams_are_searched(injected):
    model = injected(dilation=1)
    options = {"num_beams": 3, "do_sample": False, "max_new_tokens": 6, "pad_token_id": 0}
    expected = tiny_model("llama").generate(PROMPTS[1][None], **options)
    found = model.generate(PROMPTS[1][None], past_key_values=HeteroCache(model), **options)
    assert torch.equal(found, expected)


def test_a_step_back_is_refused_by_name(injected):
    model = injected()
    cache = HeteroCache(model)
    alone(model, cache, (PROMPTS[2],))
    with pytest.raises(HeteroKVError, match="DilatedLayer"):
        cache.crop(-3)


def test_a_recorded_prefill_is_gone_on_from(injected):
    model = injected()
    eject(model)
    recorded = record_prefill(model, PROMPTS[2][None], chunk_size=16)
    inject(model, load_rules(RULES, trust_rules=["dilated_attention"]), command_line={**SMALL, **ENGINE})
    script = prompt(1, 8), 4
    expected = alone(model, HeteroCache(model), (PROMPTS[2], *script))[60:]
    assert torch.equal(alone(model, recorded.cache_for(model), script), expected)


def test_it_counts_what_it_keeps_and_attends_to(injected):
    model = injected()
    cache = HeteroCache(model)
    alone(model, cache, (PROMPTS[2],))
    # 4 first, 8 newest, and every fourth of 4 to 51.
    assert cache.statistics == {"tokens_kept": [24] * 3}
    assert attended_tokens(model.hetero_kv_injection, 60) == 24
    assert cache.device_bytes == 3 * 24 * 2 * 2 * 16 * 4


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Run a command on a small model; returns what it printed."""
    monkeypatch.setenv("HETERO_KV_CONFIG", str(tmp_path / "settings.yaml"))
    tiny_config("llama").save_pretrained(tmp_path / "model")

    def run(*words):
        status = main([*map(str, words), "--model", str(tmp_path / "model"), "--trust_rules", "dilated_attention"])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


def planned(command, config):
    status, out, _ = command("plan", "--config", config, "--device", "cpu", "--dtype", "float32", "--json")
    assert status == 0
    return json.loads(out)["lengths"]["4096"]["cpu"]


def test_the_plan_has_its_term_and_settings_stand_behind_the_files_name(command):
    of_token = 3 * 2 * (16 + 16) * 4
    assert planned(command, RULES)["pattern"] == (64 + 1024 + (4096 - 1088) // 8) * of_token
    assert planned(command, f"{RULES}:dilation=4")["pattern"] == (64 + 1024 + (4096 - 1088) // 4) * of_token


def test_rules_show_it_layer_by_layer(command):
    status, out, _ = command("rules", RULES, "--dilation", "4", "--json")
    assert status == 0
    row = next(row for row in json.loads(out)["modules"] if row["operator"] == "DilatedAttention")
    assert row["settings"] == {"sink_tokens": 64, "local_windows_len": 1024, "dilation": 4}


def test_mistakes_in_its_settings_are_named(command):
    status, _, error = command("plan", "--config", f"{RULES}:dilaton=4")
    assert status == 2
    assert "did you mean dilation?" in error
    status, _, error = command("plan", "--config", f"{RULES}:dilation=0")
    assert status == 2
    assert "a whole number of at least 1" in error


@pytest.mark.parametrize(
    ("base", "former", "today"),
    [
        (Layout, "closed", "finalized"),
        (Layout, "closes_alone", "finalizes_per_sequence"),
        (AttentionOperator, "is_wanted", "applies"),
        (Chooser, "close", "finalize"),
        (Chooser, "reads_beside", "reads_outside_lse"),
    ],
)
def test_a_method_under_a_former_name_is_refused(base, former, today):
    """It would never be called."""
    with pytest.raises(TypeError, match=f"Mine.{former} is called {today} now"):
        type("Mine", (base,), {former: True})


@pytest.mark.parametrize("package", ["cpu_ops", "gpu_ops"])
def test_the_kernels_are_imported_by_one_name(package):
    """A second copy of a module would have separate registries and kernels."""
    with pytest.raises(ImportError, match=f"import hetero_kv.{package}"):
        importlib.import_module(package)
