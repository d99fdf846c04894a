"""The command `plan`: the memory of a context, the free memory, and the longest context that fits."""

from __future__ import annotations

import argparse

from hetero_kv.commands.injected import add_model_flags
from hetero_kv.models import DEFAULT_MODEL
from hetero_kv.rules.setting_flags import add_rules_flag, add_setting_flags
from hetero_kv.settings.flags import FlagParser


def add_flags(parser: FlagParser) -> None:
    """Add the command's flags to `parser`."""
    parser.epilog = (
        "GB are 10^9 bytes, 4K tokens are 4,096. The exit status is 2 if max_seq_len does not fit. Sources of "
        "settings, the first wins: --config's own (quest:block_size=32), these flags, the rules file, "
        "~/.hetero_kv/config.yaml, the defaults shown."
    )
    model = add_model_flags(parser, default=DEFAULT_MODEL)
    model.add_argument("--device", default="auto", metavar="DEVICE", help="auto, cpu, cuda or cuda:N (default auto)")
    model.add_argument(
        "--dtype", default="auto", metavar="TYPE", help="auto, float32, bfloat16 or float16 (default auto)"
    )
    model.add_argument(
        "--speculation",
        default="auto",
        metavar="WAY",
        help="how tokens are guessed: sparse keeps mean keys of blocks; off, lookup and auto keep nothing (default "
        "auto)",
    )
    add_rules_flag(parser)
    machine = parser.add_argument_group("machine (instead of this one's free memory)")
    machine.add_argument("--dram", metavar="GB", help="plan for this much free DRAM, GB")
    machine.add_argument("--gpu_memory", metavar="GB", help="plan for a GPU with this much free memory, GB")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_setting_flags(parser, lambda flags: [flags.rules])


def run(flags: argparse.Namespace) -> int:
    """Print the plan; returns the exit status.

    Raises:
        OutOfMemoryError: the `max_seq_len` in force does not fit; the plan is printed nevertheless.
        HeteroKVError: a mistake in the flags or files, or a model that cannot be found.
    """
    # Imported here, because it imports torch, which reading flags does not need.
    from hetero_kv.commands.memory_plan import print_plan

    return print_plan(flags)
