"""The memory of a loaded model's weights, and the types that store them."""

from __future__ import annotations

from typing import Any, NamedTuple

from hetero_kv.adapter.quantized_module import QuantizedModule


class LoadedWeights(NamedTuple):
    """The weights of a loaded model.

    Attributes:
        size: bytes of parameters and buffers; tied ones count once.
        types: storage types of the matrices, by size in descending order: GGML's names ("Q4_K"), or torch's
            ("bfloat16").
    """

    size: int
    types: tuple[str, ...]

    @classmethod
    def of(cls, model: Any) -> LoadedWeights:
        """The weights of a transformers model, with or without operators."""
        tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        packed = {
            id(weights.data): weights.name
            for module in model.modules()
            if isinstance(module, QuantizedModule)
            for weights in module.packed_weights()
        }
        matrices = {id(parameter) for parameter in model.parameters() if parameter.dim() > 1}
        sizes: dict[str, int] = {}
        for key, tensor in tensors.items():
            if key in packed or key in matrices:
                name = packed.get(key) or str(tensor.dtype).removeprefix("torch.")
                sizes[name] = sizes.get(name, 0) + tensor.nbytes
        largest_first = sorted(sizes, key=lambda name: -sizes[name])
        return cls(sum(tensor.nbytes for tensor in tensors.values()), tuple(largest_first))

    @property
    def in_short(self) -> str:
        """The types as one line: "Q5_0, Q8_0"."""
        return ", ".join(self.types)
