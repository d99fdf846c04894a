"""Ways of calling a model and its cache: an injected model equals the untouched one.

From transformers' documentation of caches, pipelines and assistants, and accelerate's.
"""

from __future__ import annotations

import copy
from threading import Thread

import pytest
import torch
from transformers import DynamicCache, TextIteratorStreamer, pipeline

from hetero_kv import HeteroCache, inject
from tests.calls.reference_model import (
    ASSISTANT,
    EVERYTHING,
    MODEL,
    OTHER,
    PROMPT,
    SAMPLED,
    SIZES,
    TEXT,
    TOKENIZER,
    UNTOUCHED_ASSISTANT,
    Call,
    plain,
    tokens_of,
)
from tests.support.tiny_models import tiny_model


def two_turns(call):
    cache = call.cache() or (HeteroCache(call.model) if call.model is MODEL else DynamicCache(config=call.model.config))
    first = call.generate(past_key_values=cache)
    return call.generate(torch.cat([first, OTHER], dim=1), past_key_values=cache)


def the_returned_cache_goes_on(call):
    first = call.generate(return_dict_in_generate=True)
    return call.generate(torch.cat([first.sequences, OTHER], dim=1), past_key_values=first.past_key_values)


def copies_of_a_prompts_cache(call, copied=copy.deepcopy):
    prompt = call.model(PROMPT[:, :30]).past_key_values
    return [
        tokens_of(call.generate(torch.cat([PROMPT[:, :30], end], dim=1), past_key_values=copied(prompt)))
        for end in (OTHER, PROMPT[:, 30:])
    ]


def a_cropped_cache(call):
    cache = call.model(PROMPT).past_key_values
    cache.crop(-9)
    return call.generate(torch.cat([PROMPT[:, :36], OTHER], dim=1), past_key_values=cache)


def selected_rows(call):
    cache = call.model(PROMPT.view(3, 15)).past_key_values
    cache.batch_select_indices(torch.tensor([2, 0]))
    cache.reorder_cache(torch.tensor([1, 0]))
    ids = torch.cat([PROMPT.view(3, 15)[[0, 2]], OTHER.repeat(2, 1)], dim=1)
    return call.generate(ids, past_key_values=cache)


def a_loop_by_hand(call):
    cache, ids, new = None, PROMPT, PROMPT
    for _ in range(6):
        output = call.model(new, past_key_values=cache, use_cache=True)
        cache, new = output.past_key_values, output.logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, new], dim=1)
    return ids


def a_loop_without_caches(call):
    ids = PROMPT
    for _ in range(3):
        ids = torch.cat([ids, call.model(ids, use_cache=False, return_dict=False)[0][:, -1:].argmax(-1)], dim=1)
    return ids


def the_loss_of_labels(call):
    return round(float(call.model(PROMPT, labels=PROMPT).loss), 3)


def last_logits_alone(call):
    return call.model(PROMPT, logits_to_keep=3).logits.argmax(-1)


def the_module_behind_the_head(call):
    return call.model.lm_head(call.model.model(PROMPT).last_hidden_state).argmax(-1)


def inference_mode(call):
    with torch.inference_mode():
        return call.generate().clone()


def an_iterated_streamer(call):
    streamer = TextIteratorStreamer(TOKENIZER, timeout=60)
    thread = Thread(target=call.generate, kwargs={"streamer": streamer})
    thread.start()
    text = "".join(streamer)
    thread.join()
    return text


def a_pipeline(call):
    torch.manual_seed(7)
    answer = pipeline("text-generation", call.model, tokenizer=TOKENIZER)
    return [each["generated_text"] for each in answer(TEXT, max_new_tokens=7, do_sample=False)]


def a_pipeline_of_batches(call):
    answer = pipeline("text-generation", call.model, tokenizer=TOKENIZER, batch_size=2)
    found = answer([TEXT, "user", "hello user"], max_new_tokens=5, do_sample=False)
    return [each["generated_text"] for one in found for each in one]


def a_pipeline_of_messages(call):
    answer = pipeline("text-generation", call.model, tokenizer=TOKENIZER)
    messages = [{"role": "user", "content": "hello"}]
    return [each["generated_text"][-1]["content"] for each in answer(messages, max_new_tokens=5, do_sample=False)]


def an_assistant(call):
    return call.generate(assistant_model=call.assistant, max_new_tokens=15)


def an_assistant_without_rules(call):
    return call.generate(assistant_model=UNTOUCHED_ASSISTANT, max_new_tokens=15)


def an_assistant_that_samples(call):
    return call.generate(assistant_model=UNTOUCHED_ASSISTANT, **SAMPLED)


def an_assistant_with_a_tokenizer_of_its_own(call):
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.add_tokens(["unlike"])
    assistant = tiny_model("llama", 2, **{**SIZES, "vocab_size": len(tokenizer), "num_hidden_layers": 1})
    if call.assistant is ASSISTANT:
        inject(assistant, "quest", command_line=EVERYTHING)
    models = {"tokenizer": TOKENIZER, "assistant_tokenizer": tokenizer, "assistant_model": assistant}
    return call.generate(max_new_tokens=12, **models)


def assistant_early_exit(call):
    return call.generate(assistant_early_exit=1, max_new_tokens=15)


def gradient_checkpointing_in_eval(call):
    call.model.gradient_checkpointing_enable()
    try:
        return call.generate()
    finally:
        call.model.gradient_checkpointing_disable()


def config_use_cache_off(call):
    call.model.config.use_cache = False
    try:
        return [tokens_of(call.generate()), call.model(PROMPT).past_key_values is None]
    finally:
        call.model.config.use_cache = True


def accelerators_model(call):
    from accelerate import Accelerator

    model = Accelerator(cpu=True).prepare_model(call.model, evaluation_mode=True)
    return Call(model, None, call.cache).generate()


WAYS = [
    two_turns, the_returned_cache_goes_on, copies_of_a_prompts_cache, a_cropped_cache, selected_rows, a_loop_by_hand,
    a_loop_without_caches, the_loss_of_labels, last_logits_alone, the_module_behind_the_head, inference_mode,
    an_iterated_streamer, a_pipeline, a_pipeline_of_batches, a_pipeline_of_messages, an_assistant,
    an_assistant_without_rules, an_assistant_that_samples, an_assistant_with_a_tokenizer_of_its_own,
    assistant_early_exit, gradient_checkpointing_in_eval, config_use_cache_off, accelerators_model,
]  # fmt: skip


#: Ways whose cache the model makes, where they bring none: `generate`'s and a plain call's.
WITHOUT_A_CACHE = (
    two_turns, the_returned_cache_goes_on, copies_of_a_prompts_cache, a_cropped_cache, selected_rows, a_loop_by_hand,
    a_pipeline,
)  # fmt: skip
#: What other ways with a cache have in parts: an assistant, its tokens, and rows.
ALIKE = an_assistant_without_rules, an_assistant_with_a_tokenizer_of_its_own, a_pipeline_of_batches


@pytest.mark.parametrize(
    ("call", "way"),
    [
        *(
            pytest.param("a cache", way, id=f"a cache-{way.__name__}", marks=pytest.mark.slow if way in ALIKE else ())
            for way in WAYS
        ),
        *(
            pytest.param(
                "no cache", way, id=f"no cache-{way.__name__}", marks=() if way in WITHOUT_A_CACHE else pytest.mark.slow
            )
            for way in WAYS
        ),
    ],
    indirect=["call"],
)
@torch.no_grad()
def test_a_call_equals_the_untouched_models(call, way):
    expected = way(plain())
    assert tokens_of(way(call)) == tokens_of(expected)
