"""Evaluations of a model that counts its samples."""

from __future__ import annotations

from hetero_kv.evals import RunOptions, run

OPTIONS = RunOptions(lengths=(200,), depths=(0, 50, 100))


class Counting:
    """A model that answers correctly, records its samples and fails after `until` answers."""

    def __init__(self, until=1000):
        self.samples, self.until = [], until

    def __call__(self, sample):
        if len(self.samples) == self.until:
            raise KeyboardInterrupt
        self.samples.append(sample.id)
        return [answers[0] for answers in sample.answers]


def go(out, model, options=OPTIONS, baseline=None):
    return run(["recite"], {"model": model}, out, options, count_tokens=len, baseline=baseline)
