"""llama.cpp in a process of its own, for `benchmarks.peers`: commands come as JSON lines, seconds go back likewise.

Runs under whatever Python has `llama_cpp` (`pip install llama-cpp-python`), and imports nothing of this project.

    {"model": path, "context": tokens, "threads": n}    loads the model anew
    {"prefill": [ids]}                                  forgets everything and evaluates the tokens
    {"decode": [ids]}                                   evaluates them one by one
"""

import json
import sys
import time


def main() -> None:
    """Answer commands until the input ends."""
    from llama_cpp import Llama, __version__

    llama = None
    for line in sys.stdin:
        command = json.loads(line)
        start = time.perf_counter()
        if "model" in command:
            llama = None
            llama = Llama(
                command["model"],
                n_ctx=command["context"],
                n_threads=command["threads"],
                n_threads_batch=command["threads"],
                flash_attn=True,
                verbose=False,
            )
        elif "prefill" in command:
            llama.reset()
            llama.eval(command["prefill"])
        else:
            for token in command["decode"]:
                llama.eval([token])
        took = time.perf_counter() - start
        print(json.dumps({"seconds": took, "version": __version__}), flush=True)


if __name__ == "__main__":
    main()
