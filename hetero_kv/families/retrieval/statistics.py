"""Statistics of retrieval layers, besides the measured recall."""

from hetero_kv.engine.statistics import Statistic, register

ESTIMATED_SHARE = register(
    Statistic(
        "estimated_share",
        "attention mass covered, by estimate",
        "share of the attention mass that the attended blocks are estimated to cover, the mean over steps and heads",
    )
)
ATTENDED_BLOCKS = register(
    Statistic(
        "attended_blocks",
        "Context blocks attended to",
        "blocks of the Context that a kv head attends to, or as many tokens, the mean over steps, where a number of "
        "its own is chosen",
    )
)
DRAM_BYTES = register(
    Statistic(
        "dram_bytes_read",
        "bytes from DRAM per token and layer",
        "bytes of keys and values that a GPU read over the bus for a decoded token in a layer, because it had them not "
        "from tokens before, the mean over steps (`attend_on: gpu`, `split`)",
    )
)
CPU_BYTES = register(
    Statistic(
        "cpu_bytes_read",
        "bytes the CPU attends to per token and layer",
        "bytes of keys and values that the CPU read for a decoded token in a layer, because the GPU had them not from "
        "tokens before, the mean over steps (`attend_on: split`)",
    )
)
