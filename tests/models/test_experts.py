"""Experts stay packed, quantized from numbers or as in a GGUF file; a token reads only its own experts."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from hetero_kv import HeteroCache, HeteroKVError, eject, inject, load_model, models, open_model
from hetero_kv.adapter.loaded_weights import LoadedWeights
from hetero_kv.adapter.quantized_experts import QuantizedExperts
from hetero_kv.models import packed_cache
from hetero_kv.models.gguf import packed_tensors
from hetero_kv.models.packed_cache import PackedCache
from hetero_kv.models.weightless import weightless_model
from hetero_kv.planning.plan import Footprint
from hetero_kv.weights import quantized_weight
from tests.support.devices import simulated_cuda
from tests.support.slow_variants import with_few
from tests.support.tiny_models import tiny_model
from tests.support.tiny_qwen2 import END_OF_TEXT, TOKENS, tiny_tokenizer

SMALL = {"block_size": 4, "max_seq_len": 256, "kv_type": "FP32"}
SHORT = torch.tensor([[5, 9, 77, 31, 20, 8]])
LONG = torch.randint(1, 97, (1, 250), generator=torch.Generator().manual_seed(0))
GGUF_NAMES = {"mixtral": "llama", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss"}


def experts_of(model):
    return [module for module in model.modules() if isinstance(module, QuantizedExperts)]


def logits_of(model, ids):
    return model(ids, past_key_values=HeteroCache(model, 256)).logits


def states(rows):
    """Hidden states, experts and their shares: each of four experts has half of the rows."""
    generator = torch.Generator().manual_seed(1)
    first = torch.arange(rows) % 4
    chosen = torch.stack([first, (first + torch.arange(rows) // 4 % 3 + 1) % 4], dim=1)
    return torch.randn(rows, 64, generator=generator), chosen, torch.rand(rows, 2, generator=generator)


@pytest.fixture
def prompts_by_numbers(monkeypatch):
    """With activations of 8 bits more tokens of a long prompt choose other experts."""
    monkeypatch.setattr(quantized_weight, "dot_instruction", lambda: "generic")


def results_of(modules):
    """What experts give for few rows, and for more than are multiplied with codes where numbers are faster."""
    return [(module(*states(12)), module(*states(240))) for module in modules]


def require_results(mine, plain):
    """That packed experts give what numbers do: few rows up to activations of 8 bits, many to rounding."""
    for (few, many), (plain_few, plain_many) in zip(mine, plain, strict=True):
        assert 0 < (few - plain_few).norm() / plain_few.norm() < 0.02
        torch.testing.assert_close(many, plain_many, rtol=1e-4, atol=1e-4)


def require_like(mine, plain):
    """That logits are those of the same weights; with activations of 8 bits a token may choose another expert."""
    for ids, logits in mine.items():
        assert (logits - plain[ids]).norm() / plain[ids].norm() < 0.1


@pytest.mark.parametrize("model_type", GGUF_NAMES)
def test_experts_are_quantized_and_restored(model_type, prompts_by_numbers):
    model = tiny_model(model_type)
    names = {name: numbers.shape for name, numbers in model.state_dict().items()}
    numbers = LoadedWeights.of(model).size
    inject(model, "dense", command_line={**SMALL, "weights": "q8_0"})
    packed = experts_of(model)
    assert len(packed) == 3
    assert LoadedWeights.of(model).types == ("Q8_0", "float32")  # the router's numbers
    assert LoadedWeights.of(model).size < 0.4 * numbers
    mine = {LONG: logits_of(model, LONG), SHORT: logits_of(model, SHORT)}
    results = results_of(packed)
    eject(model)
    assert {name: numbers.shape for name, numbers in model.state_dict().items()} == names
    rounded = tiny_model(model_type).state_dict()
    for name, numbers in model.state_dict().items():
        assert (numbers - rounded[name]).norm() < 0.02 * rounded[name].norm()
    require_like(mine, {ids: model(ids).logits for ids in mine})
    require_results(results, results_of(layer.mlp.experts for layer in model.model.layers))


def test_a_token_reads_the_bytes_of_its_experts_alone():
    model = tiny_model("qwen3_moe")
    inject(model, "dense", command_line={**SMALL, "weights": "q8_0"})
    experts = experts_of(model)[0]
    x, shares = torch.randn(1, 64), torch.tensor([[0.7, 0.3]])
    expected = experts(x, torch.tensor([[2, 0]]), shares)
    for weights in experts.packed_weights():
        weights.data[[1, 3]] = 0xFF  # scales that are no numbers
    assert torch.equal(experts(x, torch.tensor([[2, 0]]), shares), expected)
    assert not experts(x, torch.tensor([[2, 1]]), shares).isfinite().all()


def test_a_row_does_not_depend_on_the_other_rows():
    model = tiny_model("gpt_oss")
    inject(model, "dense", command_line={**SMALL, "weights": "q4_0"})
    experts = experts_of(model)[0]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 64, generator=generator)
    chosen = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(9)])
    shares = torch.rand(9, 2, generator=generator)
    together = experts(x, chosen, shares)
    for row in range(9):
        part = slice(row, row + 1)
        assert torch.equal(experts(x[part], chosen[part], shares[part])[0], together[row])


def test_experts_of_odd_widths_stay_numbers_and_it_is_said(caplog):
    model = tiny_model("mixtral", intermediate_size=40)
    expected = tiny_model("mixtral", intermediate_size=40).state_dict()
    inject(model, "dense", command_line={**SMALL, "weights": "q8_0"})
    assert "rows of 40 weights do not divide into blocks of Q8_0" in caplog.text
    assert not any(any(module.parts.values()) for module in experts_of(model))
    assert logits_of(model, SHORT).isfinite().all()
    eject(model)
    for name, numbers in model.state_dict().items():
        if "experts" in name:
            assert torch.equal(numbers, expected[name])


def stored(numbers, kind):
    """Numbers as GGML's type has them, and the numbers that these stand for."""
    blocks = gguf.quantize(np.ascontiguousarray(numbers), kind)
    return blocks, torch.from_numpy(gguf.dequantize(blocks, kind))


def expert_tensors(module, kind):
    """(name, numbers) of a file's tensors of experts; the module gets the numbers that they stand for."""
    transposed, tensors = module.is_transposed, {}
    for leaf in ("gate_up_proj", "down_proj"):
        weight, bias = getattr(module, leaf).data, getattr(module, f"{leaf}_bias", None)
        by_output = weight.transpose(1, 2) if transposed else weight
        width = by_output.shape[1] // 2
        halves = {"gate": slice(0, width), "up": slice(width, None)}
        if not module.is_concatenated:
            halves = {"gate": slice(0, None, 2), "up": slice(1, None, 2)}
        for part, outputs in halves.items() if leaf == "gate_up_proj" else [("down", slice(None))]:
            blocks, numbers = stored(by_output[:, outputs].numpy(), kind)
            by_output[:, outputs] = numbers
            tensors[f"ffn_{part}_exps.weight"] = (blocks, kind)
            if bias is not None:
                tensors[f"ffn_{part}_exps.bias"] = (np.ascontiguousarray(bias[:, outputs].numpy()), None)
    return tensors


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """(directory with configuration and tokenizer, GGUF file, logits by token ids) of a tiny model of a type."""

    def write(model_type, kind):
        model = tiny_model(model_type, vocab_size=len(TOKENS), eos_token_id=END_OF_TEXT, bos_token_id=None)
        folder = tmp_path_factory.mktemp(model_type)
        architecture = GGUF_NAMES[model_type]
        writer = gguf.GGUFWriter(folder / "model.gguf", architecture)
        (number,) = [key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture]
        names = gguf.get_tensor_name_map(number, 3)
        for layer, module in enumerate(model.model.layers):
            for name, (numbers, type_) in expert_tensors(module.mlp.experts, kind).items():
                writer.add_tensor(f"blk.{layer}.{name}", numbers, raw_dtype=type_)
        for path, tensor in model.state_dict().items():
            if ".experts." in path:
                continue
            module, _, leaf = path.rpartition(".")
            name = (
                f"{names.get_name(module)}.{leaf}" if leaf in ("weight", "bias") else f"{names.get_name(path)}.weight"
            )
            numbers = tensor.numpy()
            if architecture == "llama" and (".q_proj." in path or ".k_proj." in path):
                # llama.cpp rotates neighbours.
                numbers = numbers.reshape(-1, 2, 8, 64).swapaxes(1, 2).reshape(numbers.shape)
            writer.add_tensor(name, np.ascontiguousarray(numbers))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        model.config.save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        return folder, folder / "model.gguf", {LONG: model(LONG).logits, SHORT: model(SHORT).logits}, model.state_dict()

    return write


@pytest.mark.parametrize(
    ("model_type", "kind"),
    with_few(
        [("mixtral", "Q8_0"), ("qwen3_moe", "Q4_0"), ("gpt_oss", "MXFP4")],
        quick=[("mixtral", "Q8_0"), ("gpt_oss", "MXFP4")],
    ),
)
def test_a_files_experts_stay_as_they_are_stored(mixture, model_type, kind, prompts_by_numbers):
    folder, file, plain, numbers = mixture(model_type, GGMLQuantizationType[kind])
    opened = open_model(folder, gguf_path=file, dtype="float32")
    assert all(parameter.is_meta for parameter in opened.model.parameters())
    inject(opened.model, "dense", command_line=SMALL)
    model = opened.load().model
    packed = experts_of(model)
    assert {weights.name for module in packed for weights in module.packed_weights()} == {kind}
    require_like({ids: logits_of(model, ids) for ids in plain}, plain)
    assert sum(all(module.parts.values()) for module in packed) == 3
    weightless = weightless_model(folder, gguf_path=file)
    injection = inject(weightless.model, "dense", command_line=SMALL)
    size = Footprint.of(injection, dtype=torch.float32, stored=weightless.stored).weights
    assert size == LoadedWeights.of(model).size
    results = results_of(packed)
    eject(model)
    require_results(results, results_of(layer.mlp.experts for layer in model.model.layers))
    for name, expected in numbers.items():
        assert torch.equal(model.state_dict()[name], expected), name
    # Without operators the same file is put together as numbers.
    bare = open_model(folder, gguf_path=file, dtype="float32").load().model
    for name, expected in numbers.items():
        assert torch.equal(bare.state_dict()[name], expected), name


@pytest.mark.cuda
def test_a_files_experts_are_computed_in_dram_beside_a_gpu(mixture):
    folder, file, plain, _ = mixture("gpt_oss", GGMLQuantizationType.MXFP4)
    with simulated_cuda():
        opened = open_model(folder, gguf_path=file, dtype="float32", device="cuda", experts_device="dram")
        inject(opened.model, "dense", command_line=SMALL)
        model = opened.load().model
        packed = [weights for module in experts_of(model) for weights in module.packed_weights()]
        assert {(weights.name, weights.data.device.type) for weights in packed} == {("MXFP4", "cpu")}
        require_like({ids: logits_of(model, ids.to("cuda")).cpu() for ids in plain}, plain)
        for settings, place in (({}, "cuda"), ({"experts_device": "dram"}, "cpu")):
            settings = {**SMALL, "threads_num": 1, **settings}
            model = load_model(folder, gguf_path=file, dtype="float32", device="cuda", config="dense", **settings).model
            packed = [weights for module in experts_of(model) for weights in module.packed_weights()]
            assert {weights.data.device.type for weights in packed} == {place}


def test_a_files_experts_have_the_requested_type(mixture):
    folder, file, plain, _ = mixture("qwen3_moe", GGMLQuantizationType.Q4_0)
    for weights_type, kinds in (("q8_0", {"Q8_0"}), ("bf16", set())):
        opened = open_model(folder, gguf_path=file, dtype="float32")
        inject(opened.model, "dense", command_line={**SMALL, "weights": weights_type})
        model = opened.load().model
        assert {weights.name for module in experts_of(model) for weights in module.packed_weights()} == kinds
        if not kinds:
            assert experts_of(model)[0].wrapped.down_proj.dtype is torch.bfloat16
        require_like({SHORT: logits_of(model, SHORT)}, plain)


def test_experts_that_do_not_fit_the_configuration_are_named(mixture):
    folder, file, _, _ = mixture("qwen3_moe", GGMLQuantizationType.Q4_0)
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"moe_intermediate_size": 32', '"moe_intermediate_size": 64'))
    opened = open_model(folder, gguf_path=file, dtype="float32")
    inject(opened.model, "dense", command_line=SMALL)
    with pytest.raises(HeteroKVError, match=r"blk\.0\.ffn_gate_exps\.weight"):
        opened.load()


@pytest.mark.parametrize("room", [1 << 40, 0], ids=["copied", "mapped"])
def test_experts_come_from_the_cache_of_packed_weights(mixture, tmp_path, monkeypatch, room):
    folder, path, *_ = mixture("gpt_oss", GGMLQuantizationType.MXFP4)
    monkeypatch.setenv("HETERO_KV_HOME", str(tmp_path))
    monkeypatch.setattr(packed_cache, "WORTH_KEEPING", 1)
    monkeypatch.setattr(packed_cache, "SETTLED_NS", 0)

    def bytes_of_experts(cache):
        opened = models.open_model(folder, gguf_path=path, dtype="float32", packed_cache=cache)
        inject(opened.model, "dense", command_line=SMALL)
        modules = experts_of(opened.load().model)
        return [(weights.name, weights.data.tolist()) for module in modules for weights in module.packed_weights()]

    expected = bytes_of_experts(None)
    cache = PackedCache(limit=1 << 40, room=room)
    assert bytes_of_experts(cache) == expected
    monkeypatch.setattr(packed_tensors, "pack", lambda *_: pytest.fail("packed again"))
    assert bytes_of_experts(cache) == expected
