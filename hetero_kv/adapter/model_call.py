"""A call of a transformers model by argument names: split along tokens and rows, and its outputs joined."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from transformers.utils import ModelOutput

from hetero_kv.engine.batch_slice import BatchSlice
from hetero_kv.errors import HeteroKVError, UnsupportedModelError

#: The token dimension of arguments that have one.
_TOKEN_DIM = {"input_ids": 1, "inputs_embeds": 1, "position_ids": -1, "cache_position": -1}
#: Outputs with a token dimension: [batch, tokens, width].
_OUTPUTS = ("logits", "last_hidden_state")
# Arguments that belong to particular tokens or rows: a call for others replaces them.
_OF_TOKENS = ("inputs_embeds", "position_ids", "cache_position", "attention_mask")


class Signature:
    """A model's forward and the names of its arguments."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward
        self.names = tuple(inspect.signature(forward).parameters)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModelCall:
        """A call with these arguments."""
        return ModelCall(self, {**dict(zip(self.names, args, strict=False)), **kwargs} if args else kwargs)


@dataclass(frozen=True)
class ModelCall:
    """A model's forward and its arguments by name."""

    signature: Signature
    arguments: dict[str, Any]

    @property
    def token_ids(self) -> torch.Tensor | None:
        """[rows, tokens]; None where the model is called with embeddings."""
        return self.arguments.get("input_ids")

    @property
    def inputs(self) -> torch.Tensor | None:
        """The token ids, or the embeddings if there are none."""
        return self.arguments.get("inputs_embeds") if self.token_ids is None else self.token_ids

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, tokens). Raises HeteroKVError when there are none."""
        tokens = self.inputs
        if not isinstance(tokens, torch.Tensor):
            raise HeteroKVError(
                "the model was called with a HeteroCache but without input_ids and inputs_embeds; pass one of them"
            )
        if tokens.dim() < 2 or not tokens.shape[1]:
            raise HeteroKVError(
                f"the model was called with token ids or embeddings of shape {list(tokens.shape)}; pass [rows, "
                "tokens] with at least one token"
            )
        return tokens.shape[0], tokens.shape[1]

    def run(self) -> Any:
        """The forward's output."""
        return self.signature.forward(**self.arguments)

    def part(self, chunk: slice) -> ModelCall:
        """The call for a part of the tokens, with the logits of this part that the whole call requests."""
        total = self.shape[1]
        cut = dict(self.arguments)
        for name, value in self.arguments.items():
            if name in _TOKEN_DIM and isinstance(value, torch.Tensor):
                dim = _TOKEN_DIM[name] % value.dim()
                cut[name] = (
                    value if value.shape[dim] != total else value.narrow(dim, chunk.start, chunk.stop - chunk.start)
                )
            elif name == "attention_mask" and isinstance(value, torch.Tensor):
                cut[name] = value[..., : value.shape[-1] - (total - chunk.stop)]
            elif name == "logits_to_keep":
                cut[name] = _logits_of_part(value, chunk, total)
            elif isinstance(value, torch.Tensor):
                raise UnsupportedModelError(
                    f"the model receives {name}, a tensor of shape {list(value.shape)}, and tokens that pass in parts "
                    f"(strides, or rows of several lengths); only {', '.join(_TOKEN_DIM)} and attention_mask can be "
                    "split"
                )
        return replace(self, arguments=cut)

    def of_slice(self, batch_slice: BatchSlice) -> ModelCall:
        """The call for the rows of a slice, without their padding."""
        rows = self.shape[0]
        part = self.part(batch_slice.columns).arguments
        cut = {
            name: _of_rows(name, value, batch_slice.rows, rows)
            for name, value in part.items()
            # Columns of the batch are not positions of a row.
            if name not in ("attention_mask", "cache_position")
        }
        return replace(self, arguments=cut)

    def without_mask(self) -> ModelCall:
        """The call without an attention mask."""
        arguments = {name: value for name, value in self.arguments.items() if name != "attention_mask"}
        return replace(self, arguments=arguments)

    def with_positions(self, positions: torch.Tensor) -> ModelCall:
        """The call with `position_ids` [rows, tokens], unless it has its own, and without a mask."""
        return self.without_mask().placed(positions)

    def placed(self, positions: torch.Tensor) -> ModelCall:
        """The call with `position_ids` [rows or 1, tokens], unless it has its own or takes none."""
        if self.arguments.get("position_ids") is not None or "position_ids" not in self.signature.names:
            return self
        return replace(self, arguments={**self.arguments, "position_ids": positions})

    def for_tokens(self, token_ids: torch.Tensor, all_logits: bool) -> ModelCall:
        """A call for other tokens, which follow the cached ones."""
        kept = {name: value for name, value in self.arguments.items() if name not in _OF_TOKENS}
        kept["input_ids"] = token_ids
        kept["return_dict"] = True
        if "logits_to_keep" in self.signature.names:
            kept["logits_to_keep"] = 0 if all_logits else 1
        return replace(self, arguments=kept)


def _of_rows(name: str, value: Any, chosen: slice, rows: int) -> Any:
    """The part of an argument that belongs to some of a call's rows; an argument without rows is returned whole."""
    if name not in _TOKEN_DIM or not isinstance(value, torch.Tensor) or value.dim() < 2:
        return value
    # Positions along several axes are [axes, rows, tokens].
    dim = value.dim() - 2 if name == "position_ids" else 0
    return value if value.shape[dim] != rows else value.narrow(dim, chosen.start, chosen.stop - chosen.start)


def _logits_of_part(to_keep: Any, chunk: slice, total: int) -> Any:
    """`logits_to_keep` for a part of the tokens.

    Args:
        to_keep: of the whole call: a number of last tokens (0: all), or indices.
    """
    if isinstance(to_keep, torch.Tensor):
        indices = torch.where(to_keep < 0, to_keep + total, to_keep)
        if (indices.diff() <= 0).any():
            raise UnsupportedModelError(
                f"logits_to_keep is {to_keep.tolist()}, but the tokens pass in parts; pass rising indices, or a "
                "number of last tokens"
            )
        return indices[(indices >= chunk.start) & (indices < chunk.stop)] - chunk.start
    if not to_keep:
        return to_keep
    first = max(chunk.start, total - to_keep)
    return torch.arange(first - chunk.start, max(first, chunk.stop) - chunk.start)


def _named(output: Any) -> ModelOutput:
    if not isinstance(output, ModelOutput):
        raise HeteroKVError(
            "return_dict=False is not supported for tokens that pass in parts (strides, or rows of several lengths); "
            "read the output by its names"
        )
    return output


def joined_tokens(outputs: Sequence[Any]) -> Any:
    """The outputs of a prompt's parts joined: the last one, with the tokens of all."""
    last = _named(outputs[-1])
    joined = {
        name: torch.cat([output[name] for output in outputs], dim=1)
        for name in _OUTPUTS
        if isinstance(last.get(name), torch.Tensor)
    }
    return replace(last, **joined)


def joined_rows(outputs: Sequence[Any], slices: Sequence[BatchSlice], call: ModelCall) -> Any:
    """The outputs of a call's slices joined: the last one, with the tokens of all in their columns.

    Padding gets zeros.
    """
    last = _named(outputs[-1])
    rows, width = call.shape
    to_keep = call.arguments.get("logits_to_keep")
    kept = {"last_hidden_state": width, "logits": width}
    if isinstance(to_keep, torch.Tensor):
        kept["logits"] = len(to_keep)
    elif to_keep:
        kept["logits"] = min(width, to_keep)
    joined = {}
    for name, tokens in kept.items():
        if not isinstance(last.get(name), torch.Tensor):
            continue
        if last[name].dim() != 3:
            raise UnsupportedModelError(
                f"the model returns {name} {list(last[name].shape)} for rows of different lengths, but one entry per "
                "token is needed; pass rows of equal length together, or each row by itself"
            )
        # Logits of few tokens may be of a wider type.
        dtype = reduce(torch.promote_types, [output[name].dtype for output in outputs])
        joined[name] = whole = last[name].new_zeros(rows, tokens, last[name].shape[2], dtype=dtype)
        for output, batch_slice in zip(outputs, slices, strict=True):
            whole[batch_slice.rows, tokens - output[name].shape[1] :] = output[name]
    return replace(last, **joined)
