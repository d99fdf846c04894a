"""A probe of how an attention module rotates its keys: one token under chosen rotations."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hetero_kv.adapter import bridge, chunking
from hetero_kv.adapter.rotation import Rotation, found_rotation
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.errors import UnsupportedModelError
from hetero_kv.gpu_ops.host_copies import on_device


class _KeyProbe:
    """Records the keys of a call of the attention function, and returns zeros."""

    keys: torch.Tensor | None = None

    def attend(self, cache: Any, call: bridge.AttentionCall) -> torch.Tensor:
        self.keys = call.k
        return call.v.new_zeros(*call.q.shape[:3], call.v.shape[-1])


def require_constant_rotation(
    path: str, module: nn.Module, operator: str, remedy: str = "use one that keeps positions (tova, h2o)"
) -> None:
    """Raise UnsupportedModelError for a rotary embedding whose frequencies change with the sequence's length."""
    config: Any = module.config
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {str(part.get("rope_type")) for part in (rope, *rope.values()) if isinstance(part, dict)}
    changing = sorted(kinds & {"dynamic", "longrope"})
    if changing:
        raise UnsupportedModelError(
            f"{path}: the model's rotary embedding is of rope_type {changing[0]!r}, whose frequencies change as a "
            f"sequence grows; {operator} cannot re-index positions under it, {remedy}"
        )


def position_embeddings(path: str, module: nn.Module, kwargs: dict[str, Any], use: str) -> tuple[Any, Any]:
    """The (cos, sin) arguments of an attention module.

    Raises UnsupportedModelError when there are none; the message includes `use`, which names their purpose and the
    remedy.
    """
    embeddings = kwargs.get("position_embeddings")
    if not isinstance(embeddings, tuple | list) or len(embeddings) != 2:
        raise UnsupportedModelError(
            f"{path} ({type(module).__name__}) receives no position_embeddings (cos, sin), by which {use}"
        )
    return embeddings[0], embeddings[1]


def of_rows(embedding: torch.Tensor, rows: slice) -> torch.Tensor:
    """cos or sin [batch or 1, tokens, width] for some rows of the batch."""
    return embedding if embedding.shape[0] == 1 else embedding[rows]


@torch.no_grad()
def rotation_of(path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], use: str) -> Rotation:
    """How an attention module rotates its keys, determined with one token and the arguments of its own forward.

    Raises UnsupportedModelError, naming `path`, for an unknown rotation; `use` as in `position_embeddings`.
    """
    cos = kwargs["position_embeddings"][0]
    first, total = slice(0, 1), cos.shape[1]

    def first_token(name: str, value: Any) -> Any:
        if isinstance(value, HeteroCache):
            return None
        value = chunking.sliced(name, value, first, total)
        if isinstance(value, torch.Tensor) and value.dim() == 3 and value.is_floating_point():
            # Random, because a real token's hidden states may be degenerate, even zero.
            state = torch.randn(1, 1, value.shape[2], generator=torch.Generator().manual_seed(0))
            return on_device(state.to(value.dtype), value.device)
        return value

    probe_args = [first_token("", value) for value in args]
    probe_kwargs = {name: first_token(name, value) for name, value in kwargs.items()}

    def keys_under(cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        probe = _KeyProbe()
        with bridge.handled_by(probe):
            module(*probe_args, **{**probe_kwargs, "position_embeddings": (cos, sin)})
        assert probe.keys is not None
        return probe.keys

    rotation = found_rotation(keys_under, cos[:1, :1])
    if rotation is None:
        raise UnsupportedModelError(
            f"{path} ({type(module).__name__}) rotates its keys in an unknown way (known: pairs of channels, in "
            f"halves or adjacent, at one end of a head), by which {use}"
        )
    return rotation
