"""InfiniPot keeps in its pot what its paper says, and the catalyst leaves no trace."""

from __future__ import annotations

import re

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hetero_kv import HeteroCache, eject, inject
from hetero_kv.chat.conversation import Conversation
from hetero_kv.evals.config_spec import ConfigSpec
from hetero_kv.evals.configured_model import ConfiguredModel
from hetero_kv.evals.prompt import Prompt
from hetero_kv.families.bounded.eviction.infinipot import InfiniPot
from hetero_kv.families.bounded.eviction.policy_settings import GENERAL, QUESTION_AWARE, InfiniPotSettings
from hetero_kv.models import LoadedModel
from hetero_kv.rules.rule_file import load_rules, parse_rules
from hetero_kv.settings.setting import SettingError
from tests.eviction.bounded_runs import bounded, rotation_of, tokens
from tests.eviction.dense_policies import probabilities, top
from tests.support.slow_variants import with_few
from tests.support.tiny_models import tiny_model

PROMPT, GENERATED, FEW, POT, STAY = 117, 90, 45, 40, 20


def word_tokenizer():
    words = re.findall(r"\w+|[^\w\s]", f"{GENERAL} {QUESTION_AWARE} What is it?")
    vocabulary = {word: 2 + i for i, word in enumerate(sorted({"<unk>", *words}))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


TOKENIZER = word_tokenizer()
CATALYST = len(TOKENIZER.encode(GENERAL))


def pot(model, chunk_size=16, budget=POT, **settings):
    bounded(model, chunk_size, policy="infinipot", budget=budget, **settings)
    return HeteroCache(model, tokenizer=TOKENIZER)


def turns(generated=FEW, batch=1):
    """A prompt and single tokens."""
    return [tokens(PROMPT, batch=batch), *tokens(generated, 1, batch).split(1, dim=1)]


def run(model, cache, parts):
    """(logits, the positions in each layer after each part); the pot is checked after each."""
    logits, kept = [], []
    with torch.no_grad():
        for part in parts:
            logits.append(model(part, past_key_values=cache).logits)
            assert all(
                layer.num_entries <= layer.budget - isinstance(layer.policy, InfiniPot) for layer in cache.layers
            )
            kept.append([layer.entries.positions for layer in cache.layers])
    return torch.cat(logits, dim=1), kept


def novelty_of(logits, sequence):
    surprise = -logits[0, :-1].double().log_softmax(-1).gather(1, sequence[0, 1:, None])[:, 0]
    return torch.cat([torch.tensor([float("inf")]), surprise])


def distilled(take, novelty, lengths, nuc, scale, rotate):
    """Positions [kv_heads, kept] of one layer after turns of these lengths (section 3.2, appendix B).

    `take(n)` gives the next n tokens' q [heads, n, dim] and k [kv_heads, n, dim] before rotation; `rotate` turns
    vectors to the places from a start on.
    """
    keys = positions = None
    length = 0
    for new in lengths:
        while new:
            count = min(new, POT - (0 if keys is None else keys.shape[1]))
            k = take(count)[1]
            at = torch.arange(length, length + count).expand(len(k), -1)
            keys, positions = (k, at) if keys is None else (torch.cat([keys, k], 1), torch.cat([positions, at], 1))
            new, length = new - count, length + count
            if keys.shape[1] == POT:
                q, k = take(CATALYST)
                p = probabilities(rotate(q, POT), rotate(torch.cat([keys, k], 1), 0), scale)
                representative = p.sum(2).mean(1)[:, :POT]
                representative.scatter_(1, top(novelty[positions], nuc), float("inf"))
                index = top(representative, STAY)
                keys = keys.gather(1, index[..., None].expand(-1, -1, keys.shape[2]))
                positions = positions.gather(1, index)
        yield positions


def taking(calls):
    calls = iter(calls)

    def take(count):
        parts = [next(calls)]
        while sum(k.shape[1] for _, k, _ in parts) < count:
            parts.append(next(calls))
        assert sum(k.shape[1] for _, k, _ in parts) == count
        return torch.cat([q for q, _, _ in parts], 1), torch.cat([k for _, k, _ in parts], 1)

    return take


@pytest.mark.parametrize(
    ("architecture", "heads", "nuc_ratio", "chunk_size"),
    with_few(
        [
            ("llama", {}, 0.5, 16),
            ("qwen3", {"num_attention_heads": 6}, 0.25, 4),
            ("phi", {"num_key_value_heads": 4}, 0.0, 16),
        ]
    ),
)
def test_the_entries_in_the_pot_are_those_of_the_dense_reference(
    recorded,
    architecture,
    heads,
    nuc_ratio,
    chunk_size,
):
    model = tiny_model(architecture, **heads, num_hidden_layers=2)
    cache = pot(model, chunk_size, nuc_ratio=nuc_ratio)
    logits, kept = run(model, cache, turns(GENERATED))
    novelty = novelty_of(logits, torch.cat(turns(GENERATED), 1))
    for index, layer in enumerate(cache.layers):
        calls = recorded[index]
        expected = list(
            distilled(
                taking(calls),
                novelty,
                [PROMPT] + [1] * GENERATED,
                round(nuc_ratio * STAY),
                calls[0][2],
                rotation_of(layer),
            )
        )
        mine = [positions[index][0] for positions in kept]
        wrong = [i for i, (one, other) in enumerate(zip(mine, expected, strict=True)) if not one.equal(other)]
        assert not wrong, f"layer {index}: after {wrong[0]} generated tokens"


def test_one_layer_is_the_untouched_model_over_the_pot_at_positions_from_0_far_beyond_its_own():
    # With one layer keys and values depend on their token alone; with one kv head the pot is a text.
    model = tiny_model("llama", num_hidden_layers=1, num_key_value_heads=1, max_position_embeddings=POT)
    cache = pot(model)
    logits, kept = run(model, cache, turns())
    eject(model)
    sequence = torch.cat(turns(), 1)
    for step, before in enumerate(kept[:-1]):
        if step % 7 == 0:
            seen = [*before[0][0, 0].tolist(), PROMPT + step]
            with torch.no_grad():
                expected = model(sequence[:, seen]).logits[0, -1]
            torch.testing.assert_close(logits[0, PROMPT + step], expected, rtol=1e-4, atol=1e-4)


def test_every_head_holds_the_most_novel_tokens_of_all_so_far():
    model = tiny_model("llama")
    cache = pot(model)
    logits, kept = run(model, cache, turns())
    novelty = novelty_of(logits, torch.cat(turns(), 1))
    distillations = 0
    for step, layers in enumerate(kept):
        if layers[0].shape[2] == STAY:
            distillations += 1
            most = novelty[: PROMPT + step].topk(STAY // 2).indices
            assert all(torch.isin(most, head).all() for layer in layers for head in layer[0])
    assert distillations == 3
    heads = kept[-1][1][0]
    assert not heads[0].equal(heads[1])


def test_a_pot_that_covers_is_full_attention_and_asks_no_catalyst(recorded):
    model = tiny_model("llama")
    with torch.no_grad():
        expected = model(torch.cat(turns(batch=2), 1)).logits
    bounded(model, policy="infinipot", budget=PROMPT + FEW + 1)
    # Without a tokenizer a catalyst would be an error.
    logits, _ = run(model, HeteroCache(model), turns(batch=2))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert all(sum(k.shape[1] for _, k, _ in calls) == PROMPT + FEW for calls in recorded.values())


def test_the_catalyst_leaves_no_trace_where_novelty_alone_decides():
    model = tiny_model("llama")
    found = []
    for catalyst in (GENERAL, "What is it?"):
        found.append(run(model, pot(model, nuc_ratio=1.0, catalyst=catalyst), turns()))
        eject(model)
    assert found[0][0].equal(found[1][0])
    assert all(one.equal(other) for one, other in zip(found[0][1][-1], found[1][1][-1], strict=True))


def test_the_catalyst_has_places_behind_the_few_entries_of_other_layers_too():
    model = tiny_model("llama")
    everywhere = {"class": "BoundedAttention", "kwargs": {"policy": "streaming_llm", "budget": 6, "stride": 2}}
    first = {"class": "BoundedAttention", "kwargs": {"policy": "infinipot", "budget": POT}}
    inject(
        model,
        parse_rules(
            [
                {"match": {"name": r"layers\.0\.self_attn$"}, "replace": first},
                {"match": {"name": "self_attn$"}, "replace": everywhere},
            ]
        ),
    )
    cache = HeteroCache(model, tokenizer=TOKENIZER)
    run(model, cache, turns(5))
    assert cache.statistics["cached_entries"] == [STAY + 2, 6, 6]
    assert [layer.get_seq_length() for layer in cache.layers] == [PROMPT + 5] * 3
    assert len(cache.layers[0].rotary) == POT + CATALYST


def test_the_catalyst_decides_where_novelty_does_not():
    model = tiny_model("llama")
    kept = []
    for question in ("", "What is it?"):
        kept.append(run(model, pot(model, question=question), turns())[1][-1])
        eject(model)
    assert not all(one.equal(other) for one, other in zip(*kept, strict=True))


# Every policy in tests/operators/test_every_policy.py.
@pytest.mark.slow
def test_the_same_again_is_the_same():
    model = tiny_model("llama")
    cache = pot(model)
    logits, kept = run(model, cache, turns())
    for again in (cache, HeteroCache(model, tokenizer=TOKENIZER)):
        again.reset()
        repeated, positions = run(model, again, turns())
        assert repeated.equal(logits)
        assert all(one.equal(other) for one, other in zip(kept[-1], positions[-1], strict=True))


# Every policy in tests/operators/test_every_policy.py.
@pytest.mark.slow
def test_rows_of_a_batch_equal_each_row_alone():
    model = tiny_model("llama")
    cache = pot(model)
    together = run(model, cache, turns(batch=3))[1][-1]
    alone = run(model, HeteroCache(model, tokenizer=TOKENIZER), [part[1:2] for part in turns(batch=3)])[1][-1]
    assert all(many[1:2].equal(one) for many, one in zip(together, alone, strict=True))


def test_a_pot_of_a_share_of_the_sequence_is_distilled_too():
    model = tiny_model("llama")
    cache = pot(model, budget=0.3, kept_ratio=0.25)
    run(model, cache, [tokens(100)])
    # 30 entries, then 7 and 23 more three times over, and the last token.
    assert cache.statistics["cached_entries"] == [8, 8, 8]


def test_the_catalyst_asks_the_question_that_is_known():
    assert InfiniPotSettings().catalyst_text == GENERAL
    catalyst = InfiniPotSettings(question="What is {it}?").catalyst_text
    assert catalyst.endswith("highlighted in this section. Question: What is {it}?")
    assert InfiniPotSettings(catalyst="So: {question}!", question="why").catalyst_text == "So: why!"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kept_ratio": 1.0}, "kept_ratio is 1.0; it must be above 0 and below 1"),
        ({"budget": 1}, "needs at least 2 entries"),
        ({"catalyst": " "}, "catalyst is ' '; it must contain text"),
        ({"catalyst": "Look: {question}"}, "question is ''; the catalyst has a place for it"),
        ({"catalyst": "Look!", "question": "why"}, "no place for the question; write {question}"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_the_remedy(settings, message):
    with pytest.raises(SettingError, match=re.escape(message)):
        InfiniPotSettings(**settings)


def test_the_recipe_has_the_papers_settings():
    rules = load_rules("infinipot")
    # Table 2: the catalysts. Section 5.3: half of what stays is the novel tokens'. The needle's pot is 4K.
    assert GENERAL == "Summarize the critical points highlighted in this section."
    assert QUESTION_AWARE == (
        "Considering the following question, summarize the critical points highlighted in this section. "
        "Question: {question}"
    )
    assert (InfiniPotSettings().nuc_ratio, InfiniPotSettings().kept_ratio) == (0.5, 0.5)
    assert InfiniPotSettings(budget=4096) in [rules.operator_settings(rule) for rule in rules.rules]


def test_chats_and_evaluations_give_the_catalyst_the_loaded_tokenizer():
    model = tiny_model("llama")
    everywhere = {"class": "BoundedAttention", "kwargs": {"policy": "infinipot", "budget": POT}}
    rules = parse_rules([{"match": {"name": "self_attn$"}, "replace": everywhere}])
    method = ConfiguredModel(LoadedModel(model, TOKENIZER, "tiny", 512), [ConfigSpec("pot", rules, {})], baseline=False)
    with method.prefilled("pot", Prompt(tokens(PROMPT)[0].tolist(), 400)) as ready:
        assert ready.cache.statistics["cached_entries"] == [STAY + (PROMPT - POT) % (POT - STAY)] * 3
    inject(model, rules)
    assert Conversation(model, TOKENIZER).cache.tokenizer is TOKENIZER
