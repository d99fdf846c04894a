"""Dilated attention: the first tokens, the newest, and of those between every n-th.

A fixed pattern, after the fixed attention of Sparse Transformers (arXiv:1904.10509, section 4.3) and the dilated
windows of Longformer (arXiv:2004.05150, section 3.1). Prompts are prefilled exactly; then what the pattern leaves out
is dropped, so that memory and the time of a step are about an n-th of full attention's.

A family in one file, outside the package; docs/adding_a_method.md walks through it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hetero_kv.adapter import attention_module, bridge
from hetero_kv.adapter.footprint import FootprintTerm, LayerFootprint, MemoryDemand, MemoryShare, register
from hetero_kv.adapter.kv_shape import KVShape
from hetero_kv.engine import statistics
from hetero_kv.engine.layer import FamilyLayer
from hetero_kv.engine.recorded_prompt import RecordedPrompt
from hetero_kv.engine.statistics import Statistic
from hetero_kv.engine.step import Step
from hetero_kv.errors import UnsupportedModelError
from hetero_kv.gpu_ops.attention import chunk_attention
from hetero_kv.gpu_ops.merge import apply_sink
from hetero_kv.operators import AttentionOperator, Operator, SlidingWindowAttention
from hetero_kv.settings.setting import Settings, setting

PATTERN = register(FootprintTerm("pattern", "tokens that the pattern of DilatedAttention keeps"))
TOKENS_KEPT = statistics.register(Statistic("tokens_kept", "tokens kept", "tokens that the pattern has kept"))


@dataclass(frozen=True)
class DilatedSettings(Settings):
    """The pattern. Where all families mean the same by a setting they call it the same."""

    sink_tokens: int = setting(64, "attention sink: the first tokens, always attended", unit="tokens", minimum=0)
    local_windows_len: int = setting(1024, "window of the newest tokens, always attended", unit="tokens", minimum=1)
    dilation: int = setting(8, "every n-th of the tokens between stays; 1: full attention", unit="tokens", minimum=1)

    def is_kept(self, positions: torch.Tensor, length: int) -> torch.Tensor:
        """Which of these positions of a sequence of `length` tokens stay: bool, as many."""
        ends = (positions < self.sink_tokens) | (positions >= length - self.local_windows_len)
        return ends | (positions % self.dilation == 0)

    def tokens_kept(self, length: int) -> int:
        """How many positions of a sequence of `length` tokens stay."""
        first, end = min(self.sink_tokens, length), length - self.local_windows_len
        between = max(0, -(-end // self.dilation) - -(-first // self.dilation))
        return length - max(0, end - first) + between


@dataclass(frozen=True)
class Kept:
    """Tokens that a layer holds; replaced, and never changed.

    Attributes:
        keys: [batch, kv_heads, stored, k_dim].
        values: [batch, kv_heads, stored, v_dim].
        positions: [stored] int64 on the CPU, the same for all rows: those of a group have one length.
    """

    keys: torch.Tensor
    values: torch.Tensor
    positions: torch.Tensor

    @classmethod
    def nothing(cls, keys: torch.Tensor, values: torch.Tensor) -> Kept:
        """No tokens, of the shape of these."""
        return cls(keys[:, :, :0], values[:, :, :0], torch.arange(0))

    def grown(self, keys: torch.Tensor, values: torch.Tensor) -> Kept:
        """Append new tokens: keys [batch, kv_heads, tokens, k_dim], values likewise."""
        # The newest token always stays, so the next tokens follow it.
        start = int(self.positions[-1]) + 1 if len(self.positions) else 0
        positions = torch.arange(start, start + keys.shape[2])
        parts = ((self.keys, keys, 2), (self.values, values, 2), (self.positions, positions, 0))
        return Kept(*(torch.cat([old, new], dim=dim) for old, new, dim in parts))

    def thinned(self, settings: DilatedSettings, length: int) -> Kept:
        """Without what the pattern leaves out of a sequence of `length` tokens."""
        keep = settings.is_kept(self.positions, length)
        if bool(keep.all()):
            return self
        return Kept(self.keys[:, :, keep], self.values[:, :, keep], self.positions[keep])

    def selected(self, rows: Sequence[int]) -> Kept:
        """With row i what row `rows[i]` was."""
        return Kept(self.keys[list(rows)], self.values[list(rows)], self.positions)


class DilatedLayer(FamilyLayer):
    """One layer's cache: everything while a prompt passes through it, then what the pattern keeps."""

    # A window that moved on cannot move back.
    can_crop = False
    state: Kept | None

    def __init__(self, settings: DilatedSettings) -> None:
        super().__init__()
        self.settings = settings
        self._prefilling = False

    @property
    def is_prefilling(self) -> bool:
        """See FamilyLayer."""
        return self._prefilling

    def begin_prefill(self, step: Step) -> None:
        """See FamilyLayer."""
        self._prefilling = True

    def end_prefill(self, step: Step) -> None:
        """See FamilyLayer; a prompt that passes in parts is thinned when all of it is there."""
        if step.part.is_last:
            self.thin(step.length)

    def leave_prefill(self) -> None:
        """See FamilyLayer."""
        self._prefilling = False

    def thin(self, length: int) -> None:
        """Drop what the pattern leaves out of a sequence of `length` tokens."""
        assert self.state is not None
        self.state = self.state.thinned(self.settings, length)

    def select(self, rows: Sequence[int]) -> None:
        """See FamilyLayer."""
        self.state = None if self.state is None else self.state.selected(rows)

    @property
    def device_bytes(self) -> int:
        """See FamilyLayer."""
        return 0 if self.state is None else self.state.keys.nbytes + self.state.values.nbytes

    @property
    def statistics(self) -> dict[str, float | int | None]:
        """See FamilyLayer."""
        return {TOKENS_KEPT.name: None if self.state is None else len(self.state.positions)}


@dataclass(frozen=True, kw_only=True)
class DilatedFootprint(LayerFootprint):
    """What a layer takes: the tokens that the pattern keeps, where the model computes."""

    settings: DilatedSettings

    @property
    def place(self) -> str:
        """See LayerFootprint."""
        return f"with one token in {self.settings.dilation}"

    @property
    def prefills_whole(self) -> bool:
        """See LayerFootprint."""
        return True

    def shares(self, demand: MemoryDemand) -> Iterator[MemoryShare]:
        """See LayerFootprint."""
        kept = self.settings.tokens_kept(demand.tokens)
        yield MemoryShare(PATTERN, demand.sequences * self.kv_bytes(kept, demand))


class DilatedAttention(AttentionOperator):
    """Prefills exactly; decodes over the first tokens, the newest, and every `dilation`-th between."""

    meaning = "keeps the first tokens, the newest, and every n-th between"
    settings_class = DilatedSettings
    statistics = (TOKENS_KEPT,)
    prefills_exactly = True

    settings: DilatedSettings

    @classmethod
    def operator_for(cls, module: nn.Module) -> type[Operator]:
        """A layer with a sliding window of the model's own keeps that."""
        is_attention = attention_module.is_attention(module)
        return SlidingWindowAttention if is_attention and attention_module.layer_window(module) is not None else cls

    def new_cache_layer(self) -> DilatedLayer:
        """See AttentionOperator."""
        return DilatedLayer(self.settings)

    def prefill_chunk(self, layer: DilatedLayer, step: Step, call: bridge.AttentionCall) -> torch.Tensor:
        """See AttentionOperator: attention to the stored tokens and, causally, to the chunk itself."""
        if call.sliding_window is not None:
            raise UnsupportedModelError(f"{self.path}: the model asks for a sliding window of {call.sliding_window}")
        stored = layer.state or Kept.nothing(call.k, call.v)
        out, lse = chunk_attention(call.q, stored.keys, stored.values, call.k, call.v, call.scale, call.softcap)
        layer.state = stored.grown(call.k, call.v)
        return out if call.sink is None else apply_sink(out, lse, call.sink)[0]

    def decode_step(self, layer: DilatedLayer, step: Step, call: bridge.AttentionCall) -> torch.Tensor:
        """See AttentionOperator."""
        out = self.prefill_chunk(layer, step, call)
        layer.thin(step.length)
        return out

    def load_prefill(self, layer: DilatedLayer, step: Step, recorded: RecordedPrompt) -> None:
        """See AttentionOperator."""
        layer.state = Kept.nothing(recorded.keys, recorded.values).grown(recorded.keys, recorded.values)
        layer.thin(step.length)

    def footprint(self, shape: KVShape) -> DilatedFootprint:
        """See AttentionOperator."""
        return DilatedFootprint(shape, settings=self.settings)

    def attended_tokens(self, length: int) -> float:
        """See AttentionOperator."""
        return self.settings.tokens_kept(length)
