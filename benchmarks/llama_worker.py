"""Runs llama.cpp in a separate process for `benchmarks.peers`: it reads commands and writes seconds, as JSON lines.

It runs under any Python with `llama_cpp` (`pip install llama-cpp-python`), and imports nothing of this project.

    {"model": path, "context": tokens, "threads": n}    loads the model
    {"prefill": [ids]}                                  empties the cache and evaluates the tokens
    {"decode": [ids]}                                   evaluates them one by one
    {"eval": [ids]}                                     evaluates them together, after the cached ones
    {"save": path, "tokens": [ids]}                     writes the state file of the evaluated tokens
    {"load": path}                                      loads a state file
"""

import ctypes
import json
import sys
import time


def main() -> None:
    """Answer commands until the input ends."""
    import llama_cpp
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
        elif "eval" in command:
            llama.eval(command["eval"])
        elif "save" in command:
            tokens = command["tokens"]
            array = (llama_cpp.llama_token * len(tokens))(*tokens)
            if not llama_cpp.llama_state_save_file(llama.ctx, command["save"].encode(), array, len(tokens)):
                raise RuntimeError("llama.cpp did not save its state")
        elif "load" in command:
            array, count = (llama_cpp.llama_token * llama.n_ctx())(), ctypes.c_size_t()
            there = llama.n_ctx(), ctypes.byref(count)
            if not llama_cpp.llama_state_load_file(llama.ctx, command["load"].encode(), array, *there):
                raise RuntimeError("llama.cpp did not load its state")
            llama.n_tokens = count.value
        else:
            for token in command["decode"]:
                llama.eval([token])
        took = time.perf_counter() - start
        print(json.dumps({"seconds": took, "version": __version__}), flush=True)


if __name__ == "__main__":
    main()
