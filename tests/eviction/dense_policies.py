"""Eviction policies by their papers, in plain torch over the dense attention matrix, one sequence at a time.

A pass is what lies between two evictions: a whole prompt, a stride of one, or a generated token.
"""

from __future__ import annotations

import torch


def probabilities(q, keys, scale, softcap=None, sinks=None):
    """[kv_heads, group, n, length] of queries [heads, n, dim], the last n of keys [kv_heads, length, dim].

    `sinks` [heads] is what a model has learned to attend to instead of any key.
    """
    group, (n, length) = len(q) // len(keys), (q.shape[1], keys.shape[1])
    scores = q.double() @ keys.double().repeat_interleave(group, 0).transpose(1, 2) * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    unseen = torch.arange(length)[None, :] > torch.arange(length - n, length)[:, None]
    scores = scores.masked_fill(unseen, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, n, 1)], -1)
    return scores.softmax(-1)[..., :length].unflatten(0, (len(keys), group))


def top(scores, count):
    return torch.tensor([sorted(sorted(range(len(row)), key=lambda i: -row[i])[:count]) for row in scores.tolist()])


def _protect_last(scores, count):
    scores = scores.clone()
    scores[:, scores.shape[1] - count :] = float("inf")
    return scores


class StreamingLLM:
    def __init__(self, sinks):
        self.sinks = sinks

    def keep(self, p, marks, budget):
        length = p.shape[3]
        return torch.tensor([[*range(self.sinks), *range(length - budget + self.sinks, length)]] * len(p)), marks


class Tova:
    def keep(self, p, marks, budget):
        return top(p[:, :, -1].mean((0, 1))[None].expand(len(p), -1), budget), marks


class H2O:
    def keep(self, p, marks, budget):
        marks["sum"] = marks["sum"] + p.sum((1, 2))
        return top(_protect_last(marks["sum"], budget // 2), budget), marks


class SnapKV:
    def __init__(self, window, kernel):
        self.window, self.kernel = window, kernel

    def keep(self, p, marks, budget):
        if p.shape[2] > 1:
            n = min(self.window, p.shape[2])
            votes = p[:, :, -n:].sum(2).mean(1)
            old, half = votes.shape[1] - n, self.kernel // 2
            padded = torch.nn.functional.pad(votes[:, :old], (half, half))
            votes[:, :old] = torch.stack([padded[:, i : i + self.kernel].mean(1) for i in range(old)], 1)
            marks["sum"] = votes
        else:
            marks["sum"][:, -self.window :] += p[:, :, 0].mean(1)[:, -self.window :]
        return top(_protect_last(marks["sum"], self.window), budget), marks


class RoCo:
    def __init__(self, recent, ratio):
        self.recent, self.ratio = recent, ratio

    def keep(self, p, marks, budget):
        _, group, n, length = p.shape
        marks["sum"], marks["square"] = marks["sum"] + p.sum((1, 2)), marks["square"] + p.square().sum((1, 2))
        marks["count"] = marks["count"] + torch.tensor([group * min(n, length - i) for i in range(length)])
        mean = marks["sum"] / marks["count"]
        deviation = (marks["square"] / marks["count"] - mean**2).clamp(min=0).sqrt()
        for head in range(len(p)):
            uneven = top(_protect_last(deviation, self.recent)[head : head + 1], round(self.ratio * budget))[0]
            mean[head, uneven] = float("inf")
        return top(mean, budget), marks


def kept_positions(policy, passes, budget, scale, rotate=None, **of_model):
    """The positions [kv_heads, kept] that remain after every pass (q [heads, n, dim], k [kv_heads, n, dim]).

    `rotate` turns vectors [heads, n, dim] to the places from a start on, where keys come before rotation. `of_model` is
    the softcap and the sinks of `probabilities`.
    """
    keys, positions, marks, length = None, None, {}, 0
    for q, k in passes:
        heads, n, _ = k.shape
        new = torch.arange(length, length + n).expand(heads, n)
        kept = 0 if keys is None else keys.shape[1]
        keys = k if keys is None else torch.cat([keys, k], 1)
        positions = new if positions is None else torch.cat([positions, new], 1)
        marks = {
            name: torch.cat([marks.get(name, torch.zeros(heads, 0)), torch.zeros(heads, n)], 1).double()
            for name in ("sum", "square", "count")
        }
        turned = (rotate(q, kept), rotate(keys, 0)) if rotate else (q, keys)
        p = probabilities(*turned, scale, **of_model)
        index, marks = policy.keep(p, marks, min(budget, keys.shape[1]))
        if keys.shape[1] > budget:
            keys = keys.gather(1, index[..., None].expand(-1, -1, keys.shape[2]))
            positions, marks = positions.gather(1, index), {name: m.gather(1, index) for name, m in marks.items()}
        length += n
        yield positions
