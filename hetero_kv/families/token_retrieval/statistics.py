"""The statistics of token retrieval."""

from hetero_kv.engine.statistics import Statistic, register

ATTENDED_TOKENS = register(
    Statistic(
        "attended_tokens",
        "Context tokens attended to",
        "tokens of the Context that a kv head attends to, the mean over steps",
    )
)
