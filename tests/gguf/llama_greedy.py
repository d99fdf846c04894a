"""llama.cpp writes greedy tokens: `PYTHON llama_greedy.py FILE COUNT ID ...` prints them as JSON.

It runs under any Python with `llama_cpp` (`pip install llama-cpp-python`), and imports nothing of this project. The
answer has `tokens`, and `margins`: how far the best logit is above the second, in deviations of the token's logits.
"""

import json
import sys


def main() -> None:
    """Read the prompt's tokens, write the answer."""
    import llama_cpp
    import numpy as np

    path, count, *prompt = sys.argv[1:]
    # Keys and values in float32 (type 0 of ggml), and attention without fused kernels, which round.
    llama = llama_cpp.Llama(path, n_ctx=512, n_threads=2, type_k=0, type_v=0, flash_attn=False, verbose=True)
    vocabulary = llama.n_vocab()
    tokens, margins, given = [], [], [int(id) for id in prompt]
    for _ in range(int(count)):
        llama.eval(given)
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(llama.ctx, -1), (vocabulary,)).astype(np.float64)
        second, best = np.sort(logits)[-2:]
        given = [int(logits.argmax())]
        tokens += given
        margins.append(float((best - second) / logits.std()))
    print(json.dumps({"tokens": tokens, "margins": margins}))


if __name__ == "__main__":
    main()
