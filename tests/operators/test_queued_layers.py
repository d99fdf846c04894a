"""The kernels of a decoded token wait for the last layer; who looks at a layer's output before sees its numbers."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from hetero_kv import HeteroCache, inject
from hetero_kv.adapter.queued_tensor import QueuedTensor
from hetero_kv.cpu_ops.kernel_queue import KernelQueue
from tests.support.ragged_rows import prompt
from tests.support.tiny_models import tiny_model

SETTINGS = {
    "block_size": 4, "sink_tokens": 4, "local_windows_len": 8, "max_seq_len": 256, "kv_type": "FP32", "weights": "q8_0",
    "representative_storage": "FP32",
}  # fmt: skip
TOKENS = 6


def injected(recipe="dense", name="qwen2"):
    model = tiny_model(name)
    inject(model, recipe, command_line=SETTINGS)
    return model


@torch.no_grad()
def decoded(model):
    """The outputs of TOKENS forwards behind a prompt, the first of which binds the layers' native calls."""
    cache = HeteroCache(model, 256)
    model(prompt(40, 1)[None], past_key_values=cache)
    model(torch.tensor([[3]]), past_key_values=cache)
    return [model(torch.tensor([[token]]), past_key_values=cache) for token in range(5, 5 + TOKENS)]


def at_once(monkeypatch):
    """Make every kernel run when it is added."""
    add = KernelQueue.add

    def added(self, *arguments, **more):
        add(self, *arguments, **more)
        self.run()

    monkeypatch.setattr(KernelQueue, "add", added)


def kernels_per_run(monkeypatch):
    found, run = [], KernelQueue.run

    def counted(self):
        if self._arguments:
            found.append(len(self._arguments))
        run(self)

    monkeypatch.setattr(KernelQueue, "run", counted)
    return found


@pytest.mark.parametrize("recipe", ["dense", "quest"])
def test_a_token_is_one_run_with_the_logits_of_kernels_that_run_at_once(recipe, monkeypatch):
    model = injected(recipe)
    with monkeypatch.context() as patch:
        at_once(patch)
        expected = decoded(model)
    counts = kernels_per_run(monkeypatch)
    found = decoded(model)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine.logits, theirs.logits)
    assert counts[-TOKENS:] == [3 * model.config.num_hidden_layers] * TOKENS


@pytest.mark.parametrize("changes", [False, True])
def test_a_hook_behind_a_layer_sees_and_changes_its_output(changes, monkeypatch):
    model = injected()
    seen = []

    def hook(module, arguments, output):
        seen.append(output.clone())
        return output * 1.5 if changes else None

    for layer in model.model.layers[:2]:
        layer.register_forward_hook(hook)
    with monkeypatch.context() as patch:
        at_once(patch)
        expected = decoded(model), seen.copy()
    seen.clear()
    found = decoded(model), seen
    for mine, theirs in zip(found[0], expected[0], strict=True):
        assert torch.equal(mine.logits, theirs.logits)
    for mine, theirs in zip(found[1], expected[1], strict=True):
        assert torch.equal(mine, theirs)


def test_an_error_between_layers_leaves_the_cache_as_it_was(monkeypatch):
    model = injected()
    expected = decoded(model)[0].logits
    cache = HeteroCache(model, 256)
    with torch.no_grad():
        model(prompt(40, 1)[None], past_key_values=cache)
        model(torch.tensor([[3]]), past_key_values=cache)

        def interrupt(module, arguments):
            raise KeyboardInterrupt

        handle = model.model.layers[-1].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(torch.tensor([[9]]), past_key_values=cache)
        handle.remove()
        assert cache.get_seq_length() == 41
        assert torch.equal(model(torch.tensor([[5]]), past_key_values=cache).logits, expected)


def test_every_use_of_a_queued_tensor_computes_it():
    class Queue:
        runs = 0

        def run(self):
            self.runs += 1

    def queued():
        return QueuedTensor.empty(np.ones((2, 3), np.uint16), Queue())

    uses = (
        lambda x: x + 1, lambda x: torch.cat([x, x]), lambda x: x.float(), lambda x: x.shape, lambda x: x[0], len, str,
        lambda x: x.detach(), lambda x: x.data_ptr(), lambda x: x.view(torch.uint16).numpy(), lambda x: x.tolist(),
        lambda x: torch.nn.functional.linear(x, torch.ones(4, 3, dtype=torch.bfloat16)), pickle.dumps,
    )  # fmt: skip
    for use in uses:
        tensor = queued()
        assert not tensor.queue.runs
        use(tensor)
        assert tensor.queue.runs
