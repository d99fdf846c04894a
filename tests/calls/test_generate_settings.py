"""Settings of `generate`: an injected model gives the untouched one's tokens, with and without a HeteroCache.

From transformers' documentation of `generate`, of `GenerationConfig`, and of decoding strategies.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TextStreamer,
    WatermarkingConfig,
)

from hetero_kv.adapter.cache_argument import passed_cache
from tests.calls.reference_model import OTHER, PROMPT, SAMPLED, TEXT, TOKENIZER, UNTOUCHED, plain, tokens_of
from tests.support.slow_variants import with_slow

TEXT_IDS = TOKENIZER(TEXT, return_tensors="pt").input_ids


def padded(*lengths: int) -> dict[str, torch.Tensor]:
    """A left-padded batch of rows of these lengths."""
    width = max(lengths)
    ids, mask = torch.full((len(lengths), width), 3), torch.zeros(len(lengths), width, dtype=torch.int64)
    for row, length in enumerate(lengths):
        ids[row, width - length :], mask[row, width - length :] = PROMPT[0, row : row + length], 1
    return {"input_ids": ids, "attention_mask": mask}


def embedded(ids: torch.Tensor) -> torch.Tensor:
    return UNTOUCHED.get_input_embeddings()(ids)


#: What `generate` is told -> the untouched model's tokens.
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "max_length": {"max_new_tokens": None, "max_length": 52},
    "min_new_tokens": {"min_new_tokens": 6, "eos_token_id": list(range(0, 200))},
    "min_length": {"min_length": 50, "eos_token_id": list(range(0, 200))},
    "eos_token_id, several": {"eos_token_id": [5, 77, 99]},
    "max_time": {"max_time": 1000.0},
    "stop_strings": {"stop_strings": ["e", "a"], "tokenizer": TOKENIZER},
    "sampling": SAMPLED,
    "top_k": {**SAMPLED, "top_k": 5},
    "top_p": {**SAMPLED, "top_p": 0.7},
    "min_p": {**SAMPLED, "min_p": 0.1},
    "top_h": {**SAMPLED, "top_h": 0.5},
    "typical_p": {**SAMPLED, "typical_p": 0.8},
    "epsilon_cutoff": {**SAMPLED, "epsilon_cutoff": 1e-3},
    "eta_cutoff": {**SAMPLED, "eta_cutoff": 1e-3},
    "repetition_penalty": {"repetition_penalty": 1.4},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.3},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "bad_words_ids": {"bad_words_ids": [[8], [9, 10]]},
    "sequence_bias": {"sequence_bias": {(11,): 6.0, (12, 13): 6.0}},
    "forced_bos_token_id": {"forced_bos_token_id": 40},
    "forced_eos_token_id": {"forced_eos_token_id": 41},
    "suppress_tokens": {"suppress_tokens": list(range(100))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(100, 250))},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (2, 1.5)},
    "remove_invalid_values": {"remove_invalid_values": True},
    "renormalize_logits": {**SAMPLED, "renormalize_logits": True},
    "num_return_sequences": {**SAMPLED, "num_return_sequences": 3},
    "num_beams": {"num_beams": 3},
    "num_beams, do_sample": {"num_beams": 3, **SAMPLED},
    "num_beams, num_return_sequences": {"num_beams": 3, "num_return_sequences": 2},
    "length_penalty": {"num_beams": 3, "length_penalty": 2.0},
    "early_stopping": {"num_beams": 2, "early_stopping": True},
    "guidance_scale": {"guidance_scale": 1.5},
    "negative_prompt_ids": {"guidance_scale": 1.5, "negative_prompt_ids": OTHER},
    "watermarking_config": {"watermarking_config": WatermarkingConfig(bias=3.0, seeding_scheme="selfhash")},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 3, "max_new_tokens": 20},
    "max_matching_ngram_size": {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 1, "max_new_tokens": 20},
    "generation_config": {"generation_config": GenerationConfig(max_new_tokens=6, repetition_penalty=1.2)},
    "return_dict_in_generate": {"return_dict_in_generate": True, "output_scores": True, "output_logits": True},
    "prefill_chunk_size": {"prefill_chunk_size": 7},
    "logits_processor": {"do_sample": True, "logits_processor": LogitsProcessorList([TemperatureLogitsWarper(0.4)])},
    "stopping_criteria": {"stopping_criteria": StoppingCriteriaList([lambda ids, scores: ids[:, -1] > 150])},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": lambda row, ids: list(range(20, 40))},
    "custom_generate": {"custom_generate": lambda model, input_ids, **kwargs: _last_ones(model, input_ids, **kwargs)},
    "synced_gpus": {"synced_gpus": False},
    "disable_compile": {"disable_compile": True},
    "cache_implementation='dynamic'": {"cache_implementation": "dynamic", "past_key_values": None},
    "attention_mask": {"attention_mask": torch.ones_like(PROMPT)},
    "attention_mask of a padded row": {"attention_mask": (torch.arange(45) > 4)[None].long()},
    "a batch": {"ids": PROMPT.view(3, 15)},
    "a padded batch": {"ids": ..., **padded(20, 31, 26)},
    "a padded batch, num_beams": {"ids": ..., **padded(20, 31), "num_beams": 2},
    "inputs_embeds": {"ids": ..., "inputs_embeds": embedded(PROMPT)},
    "inputs_embeds, use_cache=False": {"ids": ..., "inputs_embeds": embedded(PROMPT), "use_cache": False},
    "inputs_embeds beside input_ids": {"inputs_embeds": embedded(PROMPT)},
    "streamer": {"streamer": TextStreamer(TOKENIZER)},
    "token_healing": {"token_healing": True, "tokenizer": TOKENIZER, "ids": TEXT_IDS},
    "use_cache=False without a cache": {"use_cache": False, "past_key_values": None},
}  # fmt: skip


def _last_ones(model, input_ids, **kwargs):
    """A decoding loop of a user's own: the least likely tokens."""
    cache = passed_cache(kwargs)
    for _ in range(4):
        scores = model(input_ids[:, cache.get_seq_length() :], past_key_values=cache).logits[:, -1]
        input_ids = torch.cat([input_ids, scores.argmin(-1, keepdim=True)], dim=1)
    return input_ids


#: What only changes the logits of a step, as "top_k" and "repetition_penalty" do, or is another of a kind.
ALIKE = (
    "max_length", "min_length", "max_time", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "sequence_bias", "forced_bos_token_id", "forced_eos_token_id",
    "suppress_tokens", "begin_suppress_tokens", "exponential_decay_length_penalty", "remove_invalid_values",
    "renormalize_logits", "length_penalty", "early_stopping", "num_beams, do_sample", "max_matching_ngram_size",
    "synced_gpus", "disable_compile", "generation_config", "inputs_embeds, use_cache=False",
)  # fmt: skip
#: What makes a cache of its own, cuts one, or shares it between rows, where `generate` is given none.
WITHOUT_A_CACHE = (
    "greedy",
    "num_beams",
    "guidance_scale",
    "prompt_lookup_num_tokens",
    "prefill_chunk_size",
    "custom_generate",
    "cache_implementation='dynamic'",
    "a padded batch",
    "inputs_embeds",
    "use_cache=False without a cache",
)


@pytest.mark.parametrize(
    ("call", "name"),
    with_slow(
        list(itertools.product(["a cache", "no cache"], SETTINGS)),
        slow=[
            *(("a cache", name) for name in ALIKE),
            *(("no cache", name) for name in SETTINGS if name not in WITHOUT_A_CACHE),
        ],
    ),
    indirect=["call"],
)
@torch.no_grad()
def test_generate_gives_the_untouched_models_tokens(call, name):
    settings = dict(SETTINGS[name])
    ids = settings.pop("ids", PROMPT)
    positional = [None] if ids is ... else [ids]
    expected = tokens_of(plain().generate(*positional, **settings))
    assert tokens_of(call.generate(*positional, **settings)) == expected
