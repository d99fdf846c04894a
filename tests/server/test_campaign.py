"""Many clients at a time: each gets its own answer, whatever others do, and nothing is left behind."""

from __future__ import annotations

import itertools
import json
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx2 as httpx
import pytest

from hetero_kv import SamplingParams
from hetero_kv.server.limits import Gate
from hetero_kv.server.token_texts import completion_logprobs
from tests.server.running import host_of, running, tiny_served

pytestmark = pytest.mark.usefixtures("one_thread")

#: Sums of float32 have another order in a forward with others: log-probabilities that differ less may change places.
ROUNDING = 1e-5


def prompt_of(number):
    """Token ids; every fourth prompt begins alike."""
    drawn = random.Random(number)
    head = [7] * 40 if number % 4 == 0 else []
    return [*head, *(drawn.randrange(5, 200) for _ in range(drawn.randrange(3, 150)))]


def answered(address, number, leaves_after):
    """Ask; returns each token's log-probability and those of the likeliest, or None where the client leaves early."""
    body = {"prompt": prompt_of(number), "max_tokens": 12, "ignore_eos": True, "stream": True, "logprobs": 2}
    answer = []
    with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=120) as stream:
        assert stream.status_code == 200
        for count, line in enumerate(line for line in stream.iter_lines() if line):
            if leaves_after is not None and count >= leaves_after:
                return None
            if line.startswith("data: {"):
                answer += likeliest(json.loads(line[6:])["choices"][0]["logprobs"])
    return answer


def likeliest(logprobs):
    """For each token its name and, by name, the log-probabilities of the likeliest tokens at its place."""
    return [] if logprobs is None else list(zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True))


def has_tie(answer, expected):
    """Whether two answers part where the two likeliest tokens are equally likely, within rounding.

    Fails where they part elsewhere. What follows two tokens has nothing to do with each other.
    """
    assert len(answer) == len(expected) == 12
    for (token, found), (other, alone) in zip(answer, expected, strict=True):
        gap = max(abs(each[token] - each[other]) if {token, other} <= set(each) else 1 for each in (found, alone))
        assert gap < ROUNDING, (answer, expected)
        if token != other:
            return True
    return False


def campaign(folder, clients, requests, seed, minutes=0.0):
    """Clients that ask and leave at random, at least so often, and so long.

    Returns all answers by number, and the numbers of those that part from the engine's at a tie.
    """
    served = replace(tiny_served("adaptive", kept_prefixes=4), gate=Gate(4, clients, 120.0))
    found, ties = {}, []
    with served.engine, running(host_of(served, folder=folder)) as address:
        end = time.monotonic() + 60 * minutes

        def run(client):
            drawn = random.Random(f"{seed}-{client}")
            for turn in itertools.count():
                if turn >= requests and time.monotonic() >= end:
                    break
                number = turn * clients + client
                found[number] = answered(address, number, drawn.choice([None, None, 0, 1, 3, 6]))

        with ThreadPoolExecutor(clients) as pool:
            # A client that fails raises its error here.
            list(pool.map(run, range(clients)))
        params = SamplingParams(max_new_tokens=12, ignore_eos=True, logprobs=2)
        for number, answer in found.items():
            if answer is not None:
                pieces = served.engine.generate(prompt_of(number), params, reuses=False).result().pieces
                if has_tie(answer, likeliest(completion_logprobs(served.tokenizer, pieces, 0))):
                    ties.append(number)
        assert served.engine.status().requests == ()
        assert served.gate.waiting == 0
    # Closing gives up the sequences that were kept.
    assert served.engine.status().free == served.engine.status().capacity
    return found, ties


def test_clients_that_leave_at_random_change_no_others_answer(tmp_path):
    found, ties = campaign(tmp_path, clients=5, requests=3, seed=1)
    assert not ties
    assert len(found) == 15, "a client had no answer"
    assert None in found.values()
    assert any(found.values())


@pytest.mark.slow
def test_five_hundred_requests_of_32_clients_that_leave_at_random(tmp_path):
    """MINUTES=60 makes them ask for an hour."""
    found, ties = campaign(tmp_path, clients=32, requests=16, seed=2, minutes=float(os.environ.get("MINUTES", "0")))
    assert len(found) >= 32 * 16
    read = sum(answer is not None for answer in found.values())
    assert read > 100
    assert len(ties) <= read / 1000
    print(f"{len(found)} requests, {read} read to their end, of which {len(ties)} part at a tie: {ties}")
