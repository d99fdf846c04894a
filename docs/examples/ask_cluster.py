"""Starts two replicas on this machine, and asks them about two documents: `make cluster`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor

FLAGS = ["--model", "smollm2-135m-instruct", "--replicas", "2", "--max_seq_len", "2048", "--port", "0"]
DOCUMENTS = ["The harbour opens at six. " * 30, "The library closes at nine. " * 30]
QUESTIONS = ["When?", "What opens or closes?", "Is it open at noon?"]


def main() -> int:
    command = [sys.executable, "-m", "hetero_kv", "serve", "--cluster", *FLAGS, *sys.argv[1:]]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    # To its end, because a server whose lines nobody reads waits.
    for line in server.stderr:
        print(line, end="", file=sys.stderr)
        if found := re.search(r"API: (http://\S+)/v1", line):
            threading.Thread(target=ask, args=(found[1], server)).start()
    return server.wait()


def ask(address: str, server: subprocess.Popen) -> None:
    """Ask every question about every document, both documents at a time; then stop the server."""
    try:
        for question in QUESTIONS:
            with ThreadPoolExecutor() as pool:
                prompts = [f"{document}\n{question}" for document in DOCUMENTS]
                answers = list(pool.map(answer, [address] * len(prompts), prompts))
            for found in answers:
                usage = found["usage"]
                known = usage["prompt_tokens_details"]["cached_tokens"]
                text = found["choices"][0]["message"]["content"]
                print(f"{question}  {known} of {usage['prompt_tokens']} tokens were known  {text!r}")
    finally:
        server.terminate()


def answer(address: str, text: str) -> dict:
    body = json.dumps({"messages": [{"role": "user", "content": text}], "max_tokens": 20}).encode()
    headers = {"content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{address}/v1/chat/completions", body, headers)) as response:
        return json.load(response)


if __name__ == "__main__":
    sys.exit(main())
