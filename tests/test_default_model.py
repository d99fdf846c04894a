"""The default model on long prompts, minutes each: `make test-slow`."""

from __future__ import annotations

import random

import pytest

from hetero_kv import eject, inject, load_model
from hetero_kv.chat.conversation import Conversation

pytestmark = pytest.mark.slow

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
DEPTHS = (10, 30, 50, 70, 90)
SPARSE = {
    "representative_type": "MEAN",
    "top_k_blocks": 8,
    "block_size": 128,
    "local_windows_len": 512,
    "sink_tokens": 128,
    "chunk_size": 1024,
}


@pytest.fixture(scope="module")
def default_model():
    return load_model(dtype="float32")


def passkey_prompt(tokenizer, depth, key, tokens=4000):
    """A passkey hidden at `depth` per cent of noise, in a prompt of about `tokens` tokens."""
    noise = tokenizer(NOISE * (tokens // 10))["input_ids"][: tokens - 80]
    cut = depth * len(noise) // 100
    before, after = tokenizer.decode(noise[:cut]), tokenizer.decode(noise[cut:])
    return (
        "There is an important piece of information hidden in a lot of irrelevant text. Find it and memorize it.\n"
        f"{before}\nThe pass key is {key}. Remember it. {key} is the pass key.\n{after}\n"
        "What is the pass key? Answer with the number only."
    )


def answers(loaded, prompts, **settings):
    if settings:
        inject(loaded.model, "ktransformers", command_line=settings)
    try:
        return [Conversation(loaded.model, loaded.tokenizer).ask(prompt, max_new_tokens=12).text for prompt in prompts]
    finally:
        if settings:
            eject(loaded.model)


def test_the_passkey_is_found_wherever_the_untouched_model_finds_it(default_model):
    rng = random.Random(0)
    keys = [str(rng.randint(10_000, 99_999)) for _ in DEPTHS]
    prompts = [passkey_prompt(default_model.tokenizer, d, k) for d, k in zip(DEPTHS, keys, strict=True)]
    untouched = answers(default_model, prompts)
    covering = answers(default_model, prompts, chunk_size=1024, top_k_blocks="all")
    sparse = answers(default_model, prompts, **SPARSE)
    found = [key in text for key, text in zip(keys, untouched, strict=True)]
    assert all(found)
    assert covering == untouched
    assert all(key in text for key, text, was in zip(keys, sparse, found, strict=True) if was)


def test_questions_of_later_turns_find_other_parts_of_the_first_turns_text(default_model):
    facts = {
        "name of the captain's parrot": ("The captain's parrot is called Bartholomew.", "Bartholomew"),
        "colour of the lighthouse door": ("The door of the lighthouse is painted turquoise.", "turquoise"),
        "price of the brass telescope": ("The brass telescope was sold for 417 crowns.", "417"),
    }
    noise = NOISE * 45
    text = "".join(noise + fact + " " for fact, _ in facts.values()) + noise
    inject(default_model.model, "ktransformers", command_line=SPARSE)
    try:
        talk = Conversation(default_model.model, default_model.tokenizer)
        for turn, (what, (_, expected)) in enumerate(facts.items()):
            question = f"What is the {what} in the text? Answer in a few words."
            answer = talk.ask(f"{text}\n\n{question}" if turn == 0 else question, max_new_tokens=24)
            assert expected in answer.text
            assert turn == 0 or answer.statistics.prompt_tokens < 60
    finally:
        eject(default_model.model)
