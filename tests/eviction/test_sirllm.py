"""SirLLM keeps the least expected tokens, by the model's own probabilities."""

from __future__ import annotations

import pytest
import torch

from hetero_kv import eject
from hetero_kv.families.bounded.entries import no_entries
from hetero_kv.families.bounded.eviction.sirllm import SirLLM, SirLLMSettings
from tests.eviction.bounded_runs import bounded, tokens
from tests.support.slow_variants import with_few
from tests.support.tiny_models import tiny_model

STRIDE, BUDGET, SINKS = 23, 40, 4
#: A turn is a prompt and as many generated tokens.
TURNS = ((117, 80), (50, 40))
SMALL = {"policy": "sirllm", "budget": BUDGET, "stride": STRIDE, "sink_tokens": SINKS}


def conversation():
    """Prompts and single tokens."""
    for seed, (prompt, generated) in enumerate(TURNS):
        yield tokens(prompt, 2 * seed)
        yield from tokens(generated, 2 * seed + 1).split(1, dim=1)


def streamed(model, **kwargs):
    """Logits of the whole conversation, and after each part of it the positions kept in each layer."""
    cache = bounded(model, **kwargs)
    logits, kept = [], []
    with torch.no_grad():
        for part in conversation():
            logits.append(model(part, past_key_values=cache).logits[0])
            kept.append([layer.entries.positions[0] for layer in cache.layers])
            assert all(layer.num_entries == min(kwargs["budget"], layer.length) for layer in cache.layers)
    eject(model)
    return torch.cat(logits), kept


def kept_by_entropy(entropy, recent, decay):
    """The tokens that stay after each part, from the entropy of each token: the paper's rule, one stride at a time."""
    kept, weights, seen = [], {}, 0
    for part in conversation():
        if part.shape[1] > 1:
            weights = {token: weight * decay for token, weight in weights.items()}
        for stride in part[0].split(STRIDE):
            new = range(seen, seen + len(stride))
            seen += len(stride)
            kept = [*kept, *new]
            weights |= {token: entropy[token] for token in new}
            always = {*kept[:SINKS], *kept[len(kept) - recent :]}
            others = sorted((t for t in kept if t not in always), key=lambda t: -weights[t])
            kept = sorted([*always, *others[: BUDGET - len(always)]]) if len(kept) > BUDGET else kept
        yield kept


@pytest.mark.parametrize(
    ("architecture", "heads", "recent", "decay"),
    with_few(
        [
            ("llama", {}, 0.25, 1.0),
            ("qwen3", {"num_attention_heads": 6}, 0.5, 0.6),
            ("phi", {"num_key_value_heads": 4}, 0.0, 0.0),
        ]
    ),
)
def test_the_kept_entries_are_those_of_the_highest_entropy_in_all_layers(architecture, heads, recent, decay):
    model = tiny_model(architecture, **heads, num_hidden_layers=2)
    logits, kept = streamed(model, **SMALL, recent_ratio=recent, decay_ratio=decay)
    sequence = torch.cat(list(conversation()), 1)[0]
    surprise = -logits[:-1].log_softmax(-1).gather(1, sequence[1:, None])[:, 0]
    entropy = [float("nan"), *surprise.tolist()]
    expected = list(kept_by_entropy(entropy, round(recent * BUDGET), decay))
    assert len(kept) == len(expected)
    assert decay == 1.0 or expected[-1] != list(kept_by_entropy(entropy, round(recent * BUDGET), 1.0))[-1]
    for step, (layers, tokens_held) in enumerate(zip(kept, expected, strict=True)):
        for positions in layers:
            assert positions.tolist() == [tokens_held] * len(positions), f"after part {step}"


def test_entropy_fades_at_the_beginning_of_a_turn():
    nothing = no_entries(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8))
    entropy = torch.tensor([float("inf"), 4.0, 0.5]).expand(1, 2, 3)

    def faded(decay):
        policy = SirLLM(SirLLMSettings(decay_ratio=decay), 0, 1)
        return policy.begin_turn(nothing.scored(token=entropy)).score("token")[0, 1].tolist()

    assert faded(1.0) == [float("inf"), 4.0, 0.5]
    assert faded(0.5) == [float("inf"), 2.0, 0.25]
    assert faded(0.0) == [0.0, 0.0, 0.0]


def test_a_covering_budget_is_full_attention():
    model = tiny_model("qwen2", num_hidden_layers=2)
    sequence = torch.cat(list(conversation()), 1)
    with torch.no_grad():
        expected = model(sequence).logits[0]
    logits, _ = streamed(model, **{**SMALL, "budget": sequence.shape[1]})
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


# Every policy in tests/operators/test_every_policy.py.
@pytest.mark.slow
def test_the_same_tokens_are_kept_again():
    model = tiny_model("llama", num_hidden_layers=2)
    first, second = streamed(model, **SMALL), streamed(model, **SMALL)
    assert first[0].equal(second[0])
    assert all(a.equal(b) for one, two in zip(first[1], second[1], strict=True) for a, b in zip(one, two, strict=True))


def test_entropy_is_the_negative_logarithm_of_the_probability():
    logits = torch.tensor([[[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]]).log()
    scores = SirLLM(SirLLMSettings(), 0, 1).token_scores(logits + 3, torch.tensor([[1, 2]]))
    torch.testing.assert_close(scores, -torch.tensor([[0.25, 0.8]]).log())
