"""ShadowKV's landmarks, outliers and chosen chunks against a plain reference in double precision."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.gpu_checks.setting import HALF, CheckResult, Setting
from hetero_kv.adapter.rotary_table import RotaryTable
from hetero_kv.adapter.rotation import Rotation
from hetero_kv.engine.equal_length_group import EqualLengthGroup
from hetero_kv.engine.step import PromptPart
from hetero_kv.engine.store import Store
from hetero_kv.families.shadowkv.landmarks import chosen_chunks
from hetero_kv.families.shadowkv.layer import LowRankLayer
from hetero_kv.families.shadowkv.settings import ShadowKVSettings
from hetero_kv.gpu_ops.rotary import RotaryLayout


def reference(
    keys: torch.Tensor, q: torch.Tensor, size: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Landmarks, lowest cosines and landmark scores for keys [heads, tokens, dim] and queries [heads, group, dim].

    Returns [heads, chunks, dim], [heads, chunks] and [heads, group, chunks], all float64 on the CPU.
    """
    chunks = keys.double().cpu().unflatten(1, (-1, size))
    means = chunks.mean(dim=2)
    norms = chunks.norm(dim=3) * means.norm(dim=2)[..., None]
    cosines = ((chunks * means[:, :, None]).sum(dim=3) / norms).amin(dim=2)
    return means, cosines, q.double().cpu() @ means.transpose(1, 2) * scale


def swapped(found: torch.Tensor, values: torch.Tensor, largest: bool) -> tuple[int, float]:
    """The number of ids in `found` [n] that are not among the n best of `values`, and their distance to the n-th."""
    best = values.topk(len(found), largest=largest)
    wrong = [int(i) for i in found.cpu() if int(i) not in set(best.indices.tolist())]
    if not wrong:
        return 0, 0.0
    return len(wrong), float((values[wrong] - best.values[-1]).abs().max())


def check(setting: Setting) -> Iterator[CheckResult]:
    """Sets of a layer that was prefilled in chunks, on the device, in single and half precision."""
    heads, group, dim, size = 2, 4, 64, 8
    tokens, outliers, count = (400, 5, 6) if setting.tiny else (20_000, 48, 64)
    settings = ShadowKVSettings(rank=32, landmark_chunk_size=size, outlier_chunks=outliers)
    for dtype in (torch.float32, *HALF):
        generator = torch.Generator().manual_seed(1)
        # Without a common direction every chunk would be an outlier.
        keys = (torch.randn(1, heads, tokens, dim, generator=generator) + 1).to(setting.device, dtype)
        q = torch.randn(heads, group, dim, generator=generator).to(setting.device, dtype)
        layer, store = LowRankLayer(settings), Store(tokens)
        sequences = EqualLengthGroup([layer], store)
        store.provide(sequences.layouts, 1)
        sequences.open(1)
        layer.factors.rotary = RotaryTable(Rotation(RotaryLayout(dim // 2)))
        angles = torch.arange(tokens)[:, None] / 100.0 ** (torch.arange(dim // 2) / (dim // 2))
        layer.factors.rotary.record(*(part[None].to(setting.device, dtype) for part in (angles.cos(), angles.sin())), 0)
        step = sequences.begin(tokens, slice(0, 1), is_decode=False, part=PromptPart(), stores=True)
        layer.begin_prefill(step)
        for chunk in keys.split(tokens // 3, dim=2):
            layer.extend(chunk, chunk)
        layer.end_prefill(step)
        layer.leave_prefill()
        sequences.end(step)
        assert layer.context.outliers is not None
        ids, scale = layer.context.outliers.ids[0], dim**-0.5
        means, cosines, scores = reference(keys[0, :, : layer.context.length], q, size, scale)
        chosen = chosen_chunks(q.flatten(0, 1)[None, :, None], layer.landmarks.entries, ids[None], count, scale)[0]
        precision = torch.finfo(dtype).eps
        landmark_error = float((layer.landmarks.entries[0].double().cpu() - means).abs().max() / means.abs().max())
        swaps = distance = 0.0
        for head in range(heads):
            wrong, apart = swapped(ids[head], cosines[head], largest=False)
            # Cosines and shares that differ by less than rounding may be in either order.
            is_tie = apart <= 1e-5
            rest = scores[head].index_fill(1, ids[head].cpu(), float("-inf"))
            shares = rest.softmax(dim=1).amax(dim=0).log()
            more, away = swapped(chosen[head], shares, largest=True)
            is_tie = is_tie and away <= 4 * precision * float(scores.abs().max())
            swaps, distance = swaps + wrong + more, distance if is_tie else float("inf")
        name = f"ShadowKV's landmarks, outliers and choice, {str(dtype).removeprefix('torch.')}"
        yield CheckResult(
            name,
            landmark_error <= precision and distance == 0.0,
            f"{layer.chunks} chunks, landmarks within {landmark_error:.1e}; of {heads * (outliers + count)} members "
            f"of sets {swaps:.0f} are another's tie" + ("" if distance == 0.0 else ", and some no tie at all"),
            {"landmark_error": landmark_error, "swapped": int(swaps)},
        )
