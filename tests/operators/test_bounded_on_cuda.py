"""The GPU's launches and copies for a decoded token in bounded layers, on the simulated device."""

from __future__ import annotations

import pytest
import torch

from hetero_kv.families.bounded import eviction
from hetero_kv.families.bounded.eviction.ranking import others
from hetero_kv.gpu_ops import cached_entries, draws, merged_entries, rotary
from tests.operators.bounded_models import bounded, tokens
from tests.support.devices import model_on, simulated_cuda
from tests.support.launch_counts import counts_of
from tests.support.slow_variants import with_slow
from tests.support.small_recipes import RECIPES
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.cuda

#: Upper bounds of launches per layer and decoded token beyond the model's, whose own cache launches copies.
LAUNCHES = {
    "streaming_llm": 3,
    "h2o": 5,
    "tova": 4,
    "snapkv_evict": 8,
    "pyramidkv": 8,
    "bigbird": 4,
    "cam": 21,
    "cascade": 17,
    "d2o": 16,
    "infinipot": 12,
    "random": 3,
    "roco": 20,
    "sirllm": 9,
}
BOUNDED = tuple(LAUNCHES)
# A policy with scores that merges, and one without scores.
AT_EVERY_TOKEN, IN_STRIDES = ("cam",), ("streaming_llm",)


def test_every_policy_is_counted_below():
    named = {name.removesuffix("_evict") for name in BOUNDED}
    assert named == {name.removesuffix("_evict") for name in eviction.names()}
    assert set(BOUNDED) <= set(RECIPES)


@pytest.mark.parametrize(
    ("recipes", "tokens"),
    [
        (AT_EVERY_TOKEN, 8),
        # One stride.
        pytest.param(IN_STRIDES, 16, marks=pytest.mark.slow),
        pytest.param(tuple(sorted({*BOUNDED} - {*AT_EVERY_TOKEN, *IN_STRIDES})), 16, marks=pytest.mark.slow),
    ],
    ids=["at every token", "in strides", "the others"],
)
def test_no_bounded_layer_waits_or_copies_and_all_launch_little(recipes, tokens):
    found = counts_of(recipes, tokens=tokens)
    del found["untouched"]
    for recipe, counts in found.items():
        assert (counts.waits, counts.pageable) == (0, 0), recipe
        # Of infinipot the text that it runs when entries are to be dropped.
        assert counts.pinned == 0 or recipe == "infinipot"
        assert counts.launches <= LAUNCHES[recipe] + 1e-9, recipe


@pytest.mark.parametrize("dropped", [1, 2, 5])
@torch.no_grad()
def test_evicted_entries_are_found_on_a_gpu_without_a_wait(dropped):
    with simulated_cuda() as gpu:
        order = torch.randperm(12, generator=torch.Generator().manual_seed(dropped))
        order = torch.stack([order, order.flip(0)])
        kept = order[None, :, dropped:].sort(dim=-1).values
        index = kept.to("cuda")
        gpu.record.clear()
        found = others(index, 12)
        assert not gpu.record.waits
        assert torch.equal(found.cpu(), order[None, :, :dropped].sort(dim=-1).values)


# Of bfloat16 the interpreter multiplies no matrices.
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "policy",
    with_slow(
        ["bigbird", "cam", "cascade", "d2o", "random", "roco", "streaming_llm"],
        slow=("bigbird", "cascade", "d2o", "random", "roco", "streaming_llm"),
    ),
)
@torch.no_grad()
def test_kernels_decode_as_torch_does(policy, dtype, monkeypatch):
    """Entries are the same ones, and attention to them is, however many launches that takes."""
    prompt, later = tokens(30), tokens(4, seed=3)
    answers, kept = [], []
    for is_interpreted in (True, False):
        with simulated_cuda(interpret=is_interpreted), monkeypatch.context() as patch:
            if not is_interpreted:
                for each in (cached_entries, draws, merged_entries, rotary):
                    patch.setattr(each, "runs_triton", lambda tensor: False)
            model = model_on(torch.device("cuda", 0), tiny_model("llama", num_hidden_layers=1).to(dtype))
            cache = bounded(model, policy=policy, budget=20)
            model(prompt.to("cuda"), past_key_values=cache)
            steps = [model(token.to("cuda"), past_key_values=cache).logits for token in later.split(1, dim=1)]
            answers.append(torch.cat(steps, dim=1).cpu().float())
            kept.append(cache.layers[0].entries.positions.cpu())
            del model, cache, steps
    assert torch.equal(*kept)
    assert (answers[1] - answers[0]).norm() < (1e-5 if dtype == torch.float32 else 0.02) * answers[0].norm()


# The kernels that merge decode above; forks on a CPU: test_bounded_cache.py.
@pytest.mark.slow
@pytest.mark.parametrize("policy", with_slow(["cam", "d2o"], slow=["d2o"]))
@torch.no_grad()
def test_evicted_values_are_merged_on_a_gpu_as_on_a_cpu_and_no_fork_sees_it(policy):
    """Kept entries are updated in place: an earlier fork has its own copy."""
    prompt, later = tokens(50), tokens(8, seed=3)
    answers = []
    with simulated_cuda():
        for device in ("cpu", "cuda"):
            model = model_on(torch.device(device), tiny_model("llama", num_hidden_layers=2))
            cache = bounded(model, policy=policy, budget=24)
            model(prompt.to(device), past_key_values=cache)
            fork = cache.fork()
            for each in (cache, fork):
                steps = [model(token.to(device), past_key_values=each).logits.cpu() for token in later.split(1, dim=1)]
                answers.append(torch.cat(steps, dim=1))
            del model, cache, fork, each
    for answer in answers[1:]:
        assert (answer - answers[0]).norm() < 1e-5 * answers[0].norm()
