"""A conversation in a process whose address space is almost full; a script that prints what it saw as JSON."""

from __future__ import annotations

import json
import resource
from contextlib import contextmanager

import psutil
import torch

from hetero_kv.errors import OutOfMemoryError
from tests.support.small_recipes import injected, new_cache, small_recipe
from tests.support.tiny_models import tiny_model

#: Bytes that are left to what needs no array: Python's own objects and small tensors.
LEFT = 24 << 20


@contextmanager
def address_space(left):
    """Within this context the process may take `left` bytes more."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + left, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def tokens(count, seed):
    return torch.randint(2, 97, (1, count), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def main():
    torch.set_num_threads(1)
    model = tiny_model("llama", max_position_embeddings=1 << 20)
    rules = small_recipe("quest", max_seq_len=400_000, chunk_size=4096)
    whole, cache = injected(model, rules), new_cache(model)
    first, question, long = tokens(40, 0), tokens(30, 1), tokens(60_000, 2)
    expected = [model(part, past_key_values=whole).logits for part in (first, question)]
    said, answers = [], []
    for part in (first, question):
        for attempt in (part, long) if answers else (part,):
            try:
                with address_space(LEFT):
                    model(attempt, past_key_values=cache)
            except OutOfMemoryError as error:
                said.append(str(error))
            else:
                # What fits into the little that is left is no failure: it is taken back.
                cache.crop(-attempt.shape[1])
        answers.append(model(part, past_key_values=cache).logits)
    same = [answer.equal(other) for answer, other in zip(answers, expected, strict=True)]
    print(json.dumps({"said": said, "same": same, "length": cache.get_seq_length(), "room": cache.room}))


if __name__ == "__main__":
    main()
