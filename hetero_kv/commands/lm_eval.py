"""The command `lm_eval`: lm-evaluation-harness's own command, with the model `hetero_kv` added."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hetero_kv.settings.flags import FlagParser

_EPILOG = (
    "Example: hetero-kv lm_eval --model hetero_kv --model_args pretrained=qwen2.5-coder-0.5b-instruct,config=adaptive,"
    "max_seq_len=8192,batch=8 --tasks arc_easy. `hetero-kv lm_eval run --help` lists lm_eval's flags. Names in "
    "--model_args: pretrained (or model), gguf_path, config, dtype, device, trust_remote_code, trust_rules, batch, "
    "truncation, max_gen_toks, decoded_context, prefix_token_id, add_bos_token, enable_thinking, and every setting of "
    "the rules (max_seq_len, block_size, …). docs/evaluation.md explains them. Without lm_eval: pip install lm-eval."
)


def add_flags(parser: FlagParser) -> None:
    """Add what the help shows to `parser`; lm_eval parses the words."""
    parser.usage = f"{parser.prog} ARG…"
    parser.epilog = _EPILOG
    parser.add_argument("words", nargs="*", metavar="ARG", help="arguments of lm_eval's own command, unchanged")


def run(words: Sequence[str]) -> int:
    """Run lm_eval's command with these arguments; returns the exit status.

    Raises:
        ConfigError: lm_eval is not installed, or a mistake in `--model_args`.
        HeteroKVError: a request that does not fit, or that the model cannot compute.
    """
    from hetero_kv.evals.lm_eval_adapter import register

    register()
    from lm_eval.__main__ import cli_evaluate

    given, sys.argv = sys.argv, ["lm_eval", *words]
    try:
        cli_evaluate()
    finally:
        sys.argv = given
    return 0
