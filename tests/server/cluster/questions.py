"""Questions to a running cluster."""

from __future__ import annotations

import json
import random

import httpx2 as httpx


def document(number):
    """A text of some hundred tokens, which no other begins with."""
    drawn = random.Random(number)
    return f"{number:04d} " + " ".join(drawn.choice(["alpha", "beta", "gamma", "delta", "epsilon"]) for _ in range(60))


def body(prompt, **fields):
    return {"prompt": prompt, "max_tokens": 4, "ignore_eos": True, **fields}


def ask(cluster, prompt, **fields):
    found = httpx.post(f"{cluster.address}/v1/completions", json=body(prompt, **fields), timeout=120)
    assert found.status_code == 200, found.text
    return found.json()


def text_of(answer):
    return answer["choices"][0]["text"]


def cached(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


async def streamed(client, prompt, **fields):
    """The text of a streamed answer, and its error, or None."""
    text = ""
    async with client.stream("POST", "/v1/completions", json=body(prompt, stream=True, **fields)) as response:
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            data = json.loads(line.removeprefix("data: "))
            if "error" in data:
                return text, data["error"]
            text += data["choices"][0]["text"] if data["choices"] else ""
    return text, None
