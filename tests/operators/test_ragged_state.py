"""State of a batch's rows besides tokens: selections, positions along several axes, statistics."""

from __future__ import annotations

import pytest
import torch

from hetero_kv import eject
from hetero_kv.errors import HeteroKVError
from hetero_kv.rules.rule_file import parse_rules
from tests.support.ragged_rows import Batch, alone, assert_same_but_for_rounding, padded, prompt
from tests.support.slow_variants import combined
from tests.support.small_recipes import ENGINE, injected, new_cache, small_recipe, with_settings
from tests.support.tiny_models import tiny_model, tiny_multi_axis_model

#: Blocks are chosen at every eighth token, by every second layer.
REUSING = with_settings(
    parse_rules(
        {
            "rules": [
                {
                    "match": {"name": r"self_attn$"},
                    "replace": {
                        "class": "RetrievalAttention",
                        "kwargs": {"representative_type": "MEAN", "layer_step": 2, "token_step": 8},
                    },
                },
                {"match": {"name": r"layers\.\d+$"}, "replace": {"class": "ChunkedDecoderLayer"}},
            ]
        }
    ),
    {**ENGINE, "block_size": 4, "sink_tokens": 4, "local_windows_len": 8, "top_k_blocks": 3},
)
EQUAL = [prompt(200, seed) for seed in range(3)]
#: Tokens decoded when something befalls the batch, and behind that; the next ones that choose are the 8th and the 16th.
BEFORE, AFTER = 3, 4


@pytest.fixture(scope="module")
def llama():
    return tiny_model("llama", max_position_embeddings=1024)


@pytest.fixture(autouse=True)
def without_rules_afterwards(llama):
    yield
    if getattr(llama, "hetero_kv_injection", None) is not None:
        eject(llama)


@pytest.fixture
def batch(llama):
    """Three rows of one length that reuse what they have chosen."""
    rows = Batch(llama, injected(llama, REUSING), EQUAL)
    rows.answer(BEFORE)
    return rows


def assert_is_alone(batch, row, script):
    expected = alone(batch.model, new_cache(batch.model), script)
    assert_same_but_for_rounding(batch.logits[row], expected, f"row {row}")


def test_selected_rows_reuse_their_choices(batch):
    batch.select([2, 0, 2])
    batch.answer(AFTER)
    for row, start in enumerate((2, 0, 2)):
        assert_is_alone(batch, row, (EQUAL[start], BEFORE + AFTER))


def test_diverging_rows_reuse_their_choices(batch):
    parts = [prompt(1, 10), prompt(2, 11), prompt(1, 12)]
    batch.say(parts)
    assert len(batch.cache.groups) == 3
    batch.answer(AFTER)
    for row, part in enumerate(parts):
        assert_is_alone(batch, row, (EQUAL[row], BEFORE, part, AFTER))


def test_choices_come_back_after_a_failed_prompt(batch):
    def fail(layers_done, layers, *_):
        if layers_done == layers:
            raise HeteroKVError("enough")

    batch.cache.on_progress = fail
    with pytest.raises(HeteroKVError, match="enough"):
        batch.say([prompt(5, 20)] * 3)
    batch.answer(AFTER)
    for row, start in enumerate(EQUAL):
        assert_is_alone(batch, row, (start, BEFORE + AFTER))


def test_after_a_crop_rows_choose_together_again(batch):
    batch.cache.crop(-1)
    (group,) = batch.cache.groups
    assert not group.shared
    batch.cache.crop(0)
    batch.answer(1)
    assert group.shared
    batch.cache.crop(0)
    assert group.shared


# As many rows as axes, one less and one more: which dimension has the rows is not to be guessed from its size.
@pytest.mark.parametrize(("recipe", "rows"), combined(["ktransformers", "shadowkv", "tova"], [2, 3, 4]))
def test_positions_along_several_axes_are_cut_by_rows(recipe, rows):
    model = tiny_multi_axis_model()
    cache = injected(model, small_recipe(recipe))
    prompts = [prompt(length, length) for length in (9, 40, 70, 33)[:rows]]
    token_ids, mask = padded(prompts)
    columns = (mask.cumsum(dim=1) - 1).clamp(min=0)
    positions = torch.stack([columns, columns // 2, columns % 7])
    more = torch.stack([prompt(2, 50 + row) for row in range(rows)])
    with torch.no_grad():
        first = model(token_ids, attention_mask=mask, position_ids=positions, past_key_values=cache).logits
        # Decoded tokens pass together.
        later = [
            model(more[:, i : i + 1], position_ids=positions[..., -1:] + 1 + i, past_key_values=cache).logits
            for i in range(2)
        ]
        for row, tokens in enumerate(prompts):
            own, expected = new_cache(model), []
            at = positions[:, row : row + 1, -len(tokens) :]
            expected.append(model(tokens[None], position_ids=at, past_key_values=own).logits[0])
            for i in range(2):
                token = more[row : row + 1, i : i + 1]
                expected.append(model(token, position_ids=at[..., -1:] + 1 + i, past_key_values=own).logits[0])
            found = torch.cat([first[row, -len(tokens) :], *(logits[row] for logits in later)])
            assert_same_but_for_rounding(found, torch.cat(expected), f"row {row}")


@pytest.mark.parametrize("recipe", ["ktransformers", "shadowkv_plus"])
def test_statistics_are_means_over_the_rows_of_all_cohorts(recipe, llama):
    groups = [[prompt(60, 1), prompt(60, 2)], [prompt(120, 3)], [prompt(3, 4)]]
    rules = small_recipe(recipe, measure_recall=True)
    together = Batch(llama, injected(llama, rules), [each for group in groups for each in group])
    together.answer(3)
    apart = [Batch(llama, new_cache(llama), group) for group in groups]
    for group in apart:
        group.answer(3)
    found = together.cache.statistics
    assert "block_recall" in found
    for name, layers in found.items():
        for layer, value in enumerate(layers):
            said = [(len(group.cache.lengths), group.cache.statistics[name][layer]) for group in apart]
            said = [(rows, each) for rows, each in said if each is not None]
            if said:
                expected = sum(rows * each for rows, each in said) / sum(rows for rows, _ in said)
                assert value == pytest.approx(expected, abs=1e-4), (name, layer)
            else:
                assert value is None, (name, layer)


def test_entries_of_all_cohorts_are_spoken_of(llama):
    prompts = [prompt(10, 1), prompt(30, 2), prompt(30, 3)]
    batch = Batch(llama, injected(llama, small_recipe("h2o")), prompts)
    assert batch.cache.statistics["cached_entries"] == pytest.approx([70 / 3] * 3)
    entries = [layer.num_entries for layer in batch.cache.strided_layers]
    assert entries == [10] * 3 + [30] * 3
