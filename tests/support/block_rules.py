"""Rules of short blocks for tiny models, and a prompt of several blocks."""

from __future__ import annotations

import torch

from hetero_kv.rules.rule_file import parse_rules

PROMPT = torch.arange(2, 42)[None, :]


def rules(*own, **long_context):
    settings = {"block_size": 4, "local_windows_len": 8, "max_seq_len": 64, **long_context}
    return parse_rules({"extends": "ktransformers.yaml", "rules": list(own), "long_context": settings})


def rule(name, operator, **kwargs):
    return {"match": {"name": name}, "replace": {"class": operator, **({"kwargs": kwargs} if kwargs else {})}}
