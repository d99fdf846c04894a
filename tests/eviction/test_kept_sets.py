"""Every policy keeps what its paper says in whole models: a whole prompt, then generated tokens."""

from __future__ import annotations

import pytest
import torch

from hetero_kv import eject
from tests.eviction import dense_policies as dense
from tests.eviction.bounded_runs import BUDGET, GENERATED, MODELS, PROMPT, bounded, passes, rotation_of, tokens
from tests.support.slow_variants import with_few
from tests.support.tiny_models import tiny_model

STRIDE = 23
POLICIES = {
    "streaming_llm": ({"stride": STRIDE, "sink_tokens": 4}, dense.StreamingLLM(4)),
    "tova": ({"stride": STRIDE}, dense.Tova()),
    "h2o": ({}, dense.H2O()),
    "snapkv": ({"recent_tokens": 12, "kernel_size": 5}, dense.SnapKV(12, 5)),
    "roco": ({"recent_tokens": 5, "protected_ratio": 0.3}, dense.RoCo(5, 0.3)),
}


# Groups of two and three query heads for every policy, and ungrouped, partly rotated heads.
CASES = [(policy, model) for policy in POLICIES for model in ("llama", "qwen3")] + [
    ("streaming_llm", "phi"),
    ("h2o", "phi"),
    *((policy, model) for policy in ("tova", "h2o", "snapkv") for model in ("gemma2", "gpt_oss")),
]
# Every policy in one model, and every model under a policy.
FEW = [("streaming_llm", "phi"), ("tova", "gpt_oss"), ("h2o", "qwen3"), ("snapkv", "llama"), ("roco", "qwen3")]


@pytest.mark.parametrize(("policy", "architecture"), with_few(CASES, FEW))
def test_the_kept_entries_are_those_of_the_dense_reference(recorded, policy, architecture):
    model = tiny_model(architecture, **MODELS[architecture])
    settings, reference = POLICIES[policy]
    cache = bounded(model, policy=policy, budget=BUDGET, **settings)
    kept = {index: [] for index in range(3)}
    with torch.no_grad():
        for part in (tokens(PROMPT), *tokens(GENERATED, 1).split(1, dim=1)):
            model(part, past_key_values=cache)
            for index, layer in enumerate(cache.layers):
                assert layer.num_entries == min(BUDGET, layer.length)
                kept[index].append(layer.entries.positions[0])
    strides = [STRIDE] * (PROMPT // STRIDE) + [PROMPT % STRIDE] if "stride" in settings else [PROMPT]
    for index, layer in enumerate(cache.layers):
        attention = model.model.layers[index].self_attn
        of_model = {"softcap": model.config.to_dict().get("attn_logit_softcapping")}
        of_model["sinks"] = getattr(attention, "sinks", None)
        assert (of_model["softcap"] is not None) == (architecture == "gemma2")
        assert (of_model["sinks"] is not None) == (architecture == "gpt_oss")
        sizes = [*strides, *[1] * GENERATED]
        sets = list(
            dense.kept_positions(
                reference, passes(recorded[index], sizes), BUDGET, recorded[index][0][2], rotation_of(layer), **of_model
            )
        )
        expected = sets[len(strides) - 1 :]
        assert len(expected) == len(kept[index]) == GENERATED + 1
        wrong = [
            i for i, (mine, theirs) in enumerate(zip(kept[index], expected, strict=True)) if not mine.equal(theirs)
        ]
        assert not wrong, f"layer {index}: after {wrong[0]} generated tokens"


def test_random_keeps_the_same_entries_with_the_same_seed_and_others_with_another():
    model = tiny_model("llama")
    kept = []
    for seed in (3, 3, 4):
        cache = bounded(model, policy="random", budget=30, seed=seed)
        with torch.no_grad():
            model(tokens(PROMPT), past_key_values=cache)
        kept.append(cache.layers[1].entries.positions)
        eject(model)
    assert kept[0].equal(kept[1])
    assert not kept[0].equal(kept[2])
    assert not kept[0][0, 0].equal(kept[0][0, 1])


def test_random_draws_every_part_of_the_prompt_alike():
    from hetero_kv.families.bounded.eviction.ranking import best
    from hetero_kv.gpu_ops.draws import drawn

    positions = torch.arange(20000).expand(1, 4, -1)
    kept = best(drawn(positions, seed=0, layer_idx=2), 2000)
    counts = torch.histc(kept.float(), bins=10, min=0, max=20000)
    assert float((counts / 800 - 1).abs().max()) < 0.15
