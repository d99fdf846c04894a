"""Weights that other packages offload, shard or replace count under rules, or are refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hetero_kv import HeteroCache, eject
from hetero_kv.errors import HeteroKVError, UnsupportedModelError
from tests.foreign.llamas import PROMPT, ROUNDING, computed, difference, injected, llama, untouched
from tests.support.slow_variants import with_few


@pytest.mark.parametrize("weights", ["as_stored", "q8_0"])
@pytest.mark.parametrize("offloaded", with_few(["cpu", "disk", "parts"], quick=["cpu", "disk"]))
def test_offloaded_weights_count(offloaded, weights, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model, cpu = llama(), torch.device("cpu")
    expected = untouched(model)
    if offloaded == "cpu":
        accelerate.cpu_offload(model, execution_device=cpu)
    elif offloaded == "disk":
        accelerate.disk_offload(model, tmp_path, execution_device=cpu)
    else:
        places = dict.fromkeys(["model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb"], "cpu")
        places |= {"model.layers.1": "disk", "lm_head": "disk"}
        accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=tmp_path, force_hooks=True)
    injected(model, weights=weights)
    assert difference(computed(model), expected) < (1e-4 if weights == "as_stored" else ROUNDING)
    if offloaded == "parts":
        cache = HeteroCache(model)
        assert model.generate(PROMPT, past_key_values=cache, max_new_tokens=2, do_sample=False).shape == (1, 42)
    eject(model)
    assert torch.equal(untouched(model), expected)


def test_weights_that_are_offloaded_after_inject_count(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model = llama()
    expected = untouched(model)
    injected(model)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert difference(computed(model), expected) < 1e-4
    with pytest.raises(HeteroKVError, match="forward of LlamaForCausalLM was replaced after inject"):
        eject(model)
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    assert difference(computed(model), expected) < 1e-4
    packed = injected(llama(), weights="q8_0")
    with pytest.raises(UnsupportedModelError, match="are packed"):
        accelerate.cpu_offload(packed, execution_device=torch.device("cpu"))


def test_changes_to_unpacked_weights_are_refused():
    linear = injected(llama(), weights="q8_0").get_submodule("model.layers.0.self_attn.q_proj")
    numbers = linear.weight
    for change in (
        lambda: numbers.data.add_(1), lambda: numbers.T.mul_(2), lambda: numbers[0].zero_(),
        lambda: torch.add(numbers, 1, out=numbers), lambda: numbers.__setitem__(0, 1.0),
        lambda: setattr(numbers, "data", torch.zeros(64, 64)),
    ):  # fmt: skip
        with pytest.raises(UnsupportedModelError, match="q_proj are packed"):
            change()
    assert type(numbers @ torch.ones(64)) is type(numbers.clone()) is torch.Tensor


def test_weights_that_are_shared_out_among_processes_are_refused():
    from torch.distributed import HashStore, destroy_process_group, init_process_group
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    try:
        model = llama()
        weight = model.model.layers[0].mlp.up_proj.weight
        shared = distribute_tensor(weight.detach(), DeviceMesh("cpu", [0]), [Replicate()])
        model.model.layers[0].mlp.up_proj.weight = nn.Parameter(shared)
        with pytest.raises(
            UnsupportedModelError, match=r"layers\.0\.mlp\.up_proj\.weight is a .*sharded across processes"
        ):
            injected(model)
    finally:
        destroy_process_group()


def test_a_functional_call_with_other_tensors_is_right_or_refused():
    other = {name: tensor * 1.5 for name, tensor in llama().state_dict().items()}
    model = injected(llama())
    with pytest.raises(HeteroKVError, match="functional_call"), torch.no_grad():
        torch.func.functional_call(model, other, (PROMPT,), {"past_key_values": HeteroCache(model)})
