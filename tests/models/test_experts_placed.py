"""Where a mixture's experts are placed: by the setting, by what fits, as planned; refusals of what has no effect."""

from __future__ import annotations

import gc

import pytest
import torch
from transformers import AutoConfig

from hetero_kv import HeteroCache, eject, inject, load_model
from hetero_kv.adapter import experts_in_dram
from hetero_kv.adapter.quantized_experts import QuantizedExperts
from hetero_kv.errors import ConfigError, UnsupportedModelError
from hetero_kv.loading import with_rules
from hetero_kv.models.errors import ModelError
from hetero_kv.models.placing import experts_offload_to_dram, placed, weight_bytes
from hetero_kv.models.weightless import weightless_model
from hetero_kv.planning import plan
from hetero_kv.planning.experts_place import experts_place
from hetero_kv.planning.footprint import Footprint
from hetero_kv.planning.plan import Plan
from hetero_kv.rules.injecting import eject_around_packed_weights
from hetero_kv.rules.rule_file import parse_rules
from hetero_kv.weights.experts_form import experts_in
from tests.support.devices import simulated_cuda
from tests.support.planned_models import without_weights
from tests.support.slow_variants import with_few
from tests.support.tiny_models import tiny_model
from tests.support.tiny_qwen2 import END_OF_TEXT, TOKENS, tiny_tokenizer

SMALL = {
    "block_size": 8,
    "local_windows_len": 16,
    "max_seq_len": 256,
    "kv_type": "FP32",
    "chunk_size": 64,
    "threads_num": 1,
}
PROMPT = torch.randint(2, 90, (1, 100), generator=torch.Generator().manual_seed(0))
#: Qwen3-30B-A3B.
QWEN3_30B = {
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}


def devices_of(modules):
    return {each.device.type for module in modules for each in (*module.parameters(), *module.buffers())}


def bytes_of(modules):
    return weight_bytes(each for module in modules for each in (*module.parameters(), *module.buffers()))


@torch.no_grad()
def answers(model):
    cache = HeteroCache(model)
    parts = [PROMPT, *PROMPT[:, :3].split(1, dim=1)]
    return torch.cat([model(part.to("cuda"), past_key_values=cache).logits.cpu() for part in parts], dim=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folders of tiny mixtures, by type and settings."""
    made = {}

    def write(model_type, **settings):
        key = model_type, *settings
        if key not in made:
            made[key] = tmp_path_factory.mktemp(model_type)
            settings = {"vocab_size": len(TOKENS), "eos_token_id": END_OF_TEXT, "bos_token_id": None, **settings}
            tiny_model(model_type, **settings).save_pretrained(made[key])
            tiny_tokenizer().save_pretrained(made[key])
        return made[key]

    return write


@pytest.mark.cuda
# Transformers loads the first; the other's tensors are read into a model with rules.
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("weights", with_few(["auto", "q8_0"], ["auto"]))
def test_a_loaded_model_has_its_experts_where_the_setting_says(folder, model_type, weights):
    found = {}
    with simulated_cuda():
        for where in ("gpu", "dram"):
            settings = {**SMALL, "experts_device": where, "weights": weights}
            model = load_model(folder(model_type), config="dense", device="cuda", dtype="float32", **settings).model
            assert devices_of(experts_in(model)) == {"cuda" if where == "gpu" else "cpu"}
            assert {each.device.type for each in model.model.embed_tokens.parameters()} == {"cuda"}
            found[where] = answers(model)
        tolerance = 1e-4 if weights == "auto" else 0.1
        assert (found["gpu"] - found["dram"]).norm() <= tolerance * found["gpu"].norm()


@pytest.mark.cuda
def test_experts_go_to_dram_if_the_rest_alone_fits(folder, monkeypatch):
    # A piece has one expert of these.
    monkeypatch.setattr(experts_in_dram, "_PIECE_BYTES", 1)
    many = {"num_experts": 32, "num_local_experts": 32}
    whole = tiny_model("qwen3_moe", vocab_size=len(TOKENS), **many)
    weights, experts = bytes_of([whole]), bytes_of(experts_in(whole))
    assert weights > 5 * (weights - experts)
    # Some memory is for the context.
    for total, where in ((2 * weights, {"cuda"}), (weights, {"cpu"})):
        with simulated_cuda(total=total) as gpu:
            model = load_model(
                folder("qwen3_moe", **many), config="dense", device="cuda", dtype="float32", **SMALL
            ).model
            assert devices_of(experts_in(model)) == where
            assert answers(model).isfinite().all()
            assert gpu.memory.peak[0] <= total
            del model
            gc.collect()


def test_the_place_of_experts_is_that_of_the_setting_or_the_first_that_fits():
    # Of 100 bytes 80 are experts'.
    sizes = 100, 80
    assert not experts_offload_to_dram("gpu", "auto", *sizes, 10)
    assert experts_offload_to_dram("dram", "auto", *sizes, 1000)
    assert not experts_offload_to_dram("auto", "auto", *sizes, 112)
    assert experts_offload_to_dram("auto", "auto", *sizes, 110)
    assert experts_offload_to_dram("auto", "auto", *sizes, 23)
    # Layers are streamed then.
    assert not experts_offload_to_dram("auto", "auto", *sizes, 22)
    assert not experts_offload_to_dram("auto", "dram", *sizes, 110)
    assert not experts_offload_to_dram("auto", "gpu", *sizes, 110)
    assert not experts_offload_to_dram("auto", "auto", *sizes, None)
    assert not experts_offload_to_dram("auto", "auto", 100, 0, 110)


@pytest.mark.cuda
@pytest.mark.parametrize(("weights", "tokens"), with_few([("auto", 20), ("auto", 100), ("q8_0", 100)], [("q8_0", 100)]))
def test_a_gpu_holds_no_more_than_was_planned(folder, weights, tokens):
    settings = {**SMALL, "experts_device": "dram", "weights": weights}
    weightless = weightless_model(folder("gpt_oss"))
    injection = inject(weightless.model, "dense", command_line=settings)
    planned = Footprint.of(injection, dtype=torch.float32, on_gpu=True, stored=weightless.stored).memory(tokens + 1)
    with simulated_cuda() as gpu:
        loaded = load_model(folder("gpt_oss"), config="dense", device="cuda", dtype="float32", **settings)
        model = loaded.model
        assert planned.weights_in_dram == bytes_of(experts_in(model)) > 0
        assert planned.weights == bytes_of([model]) - planned.weights_in_dram
        now = Footprint.of(model.hetero_kv_injection).memory(tokens + 1)
        assert (now.weights, now.weights_in_dram) == (0, 0)
        assert now.experts == planned.experts > 0
        cache = HeteroCache(model)
        gpu.memory.peak[0] = gpu.memory.live[0]
        with torch.no_grad():
            for part in (PROMPT[:, :tokens], PROMPT[:, :1]):
                model(part.to("cuda"), past_key_values=cache, logits_to_keep=1)
        assert gpu.memory.peak[0] <= planned.compute


def test_a_30b_mixture_fits_8_gb_of_gpu_memory_without_its_experts():
    gigabyte = 10**9
    for where, fits in (("gpu", False), ("dram", True), ("auto", True)):
        # Else layers that do not fit are streamed.
        devices = {"experts_device": where, "weights_device": "auto" if fits else "gpu"}
        model = without_weights(AutoConfig.for_model("qwen3_moe", **QWEN3_30B))
        injection = inject(model, "dense", command_line={**devices, "weights": "q4_0"})
        footprint = Footprint.of(injection, dtype=torch.bfloat16, on_gpu=True, gpu=8 * gigabyte)
        length = injection.context_length
        assert Plan(footprint, 32 * gigabyte, 8 * gigabyte, length).fits(4096) == fits
        assert (footprint.weights_in_dram > 16 * gigabyte) == fits
        assert (footprint.weights < gigabyte) == fits
        # DRAM is planned too.
        assert not Plan(footprint, 16 * gigabyte, 8 * gigabyte, length).fits(4096)


def test_auto_puts_experts_where_a_context_fits():
    gigabyte = 10**9

    def place(gigabytes, tokens, dram=1000, **settings):
        model = without_weights(AutoConfig.for_model("qwen3_moe", **QWEN3_30B))
        line = {"weights": "q4_0", "max_seq_len": tokens, **settings}
        injection = inject(model, "ktransformers", command_line=line)
        return experts_place(injection, torch.bfloat16, None, dram * gigabyte, int(gigabytes * gigabyte))

    # The weights take 17.2 GB.
    assert place(24, 32768) == place(19.3, 32768) == "gpu"
    # One layer's keys and values take 2.1 GB.
    assert place(19.3, 1 << 20) == place(18, 32768) == place(8, "auto") == "dram"
    assert place(24, "auto") == "gpu"
    # Nothing fits: the weights decide, as they do without a plan.
    assert place(8, 32768, dram=10) == "auto"
    assert place(8, 32768, experts_device="gpu") == "gpu"
    assert place(8, 32768, weights_device="gpu") == "auto"


def test_a_setting_without_effect_is_refused_by_name():
    dram = {**SMALL, "experts_device": "dram"}
    with pytest.raises(ConfigError, match=r"experts_device is dram, but MixtralForCausalLM is on the CPU.*set exp"):
        inject(tiny_model("mixtral"), "dense", command_line=dram)
    rules = parse_rules({"rules": [{"match": {"class": "torch.nn.Linear"}, "replace": {"class": LINEAR}}]})
    for model_type, why, chosen, others in (
        ("llama", "LlamaForCausalLM has no mixture of experts", "dense", {}),
        ("mixtral", "weights_device is dram too", "dense", {"weights_device": "dram"}),
        ("mixtral", "injects no QuantizedExperts, which alone reads it", rules, {}),
    ):
        model = without_weights(tiny_model(model_type).config)
        line = {"experts_device": "dram", **others}
        with pytest.raises(ConfigError, match=f"experts_device is dram, but .*{why}.*set experts_device to auto"):
            inject(model, chosen, command_line=line)


LINEAR = "hetero_kv.operators.QuantizedLinear"


def test_a_model_that_computes_on_a_cpu_is_refused_before_it_is_loaded(folder):
    with pytest.raises(ModelError, match="experts_device is dram, but the model computes on the CPU"):
        load_model(folder("gpt_oss"), config="dense", device="cpu", **SMALL, experts_device="dram")


@pytest.mark.cuda
def test_experts_that_cannot_be_computed_in_dram_are_refused_by_name():
    with simulated_cuda():
        model = tiny_model("mixtral").to("cuda")
        model.model.layers[1].mlp.experts.register_forward_hook(lambda *_: None)
        with pytest.raises(
            UnsupportedModelError, match=r"layers\.1\.mlp\.experts \(MixtralExperts\) has a forward hook"
        ):
            inject(model, "dense", command_line={**SMALL, "experts_device": "dram"})
        model = tiny_model("mixtral").to("cuda")
        model.model.layers[2].mlp.experts = torch.nn.ModuleList([torch.nn.Linear(64, 64)]).to("cuda")
        with pytest.raises(UnsupportedModelError, match=r"experts \(ModuleList\) keeps its experts in a form that is"):
            inject(model, "dense", command_line={**SMALL, "experts_device": "dram"})
        assert not any(isinstance(module, QuantizedExperts) for module in model.modules())


@pytest.mark.cuda
def test_two_models_share_experts_in_dram(folder):
    settings = {**SMALL, "experts_device": "dram"}
    with simulated_cuda():
        loaded = load_model(folder("qwen3_moe"), config="dense", device="cuda", dtype="float32", **settings)
        expected = answers(loaded.model)
        with pytest.raises(ConfigError, match="experts_device is gpu under these rules, and dram under"):
            with_rules(loaded, "quest", **{**settings, "experts_device": "gpu"})
        other = with_rules(loaded, "dense", **settings).model
        torch.testing.assert_close(answers(other), expected, rtol=1e-5, atol=1e-5)
        mine, theirs = (next(experts_in(model)).down_proj for model in (loaded.model, other))
        assert mine.data_ptr() == theirs.data_ptr()
        eject(other)
        assert torch.equal(answers(loaded.model), expected)


@pytest.mark.cuda
def test_a_context_is_loaded_wherever_the_experts_are(tmp_path):
    found = []
    with simulated_cuda():
        for where in ("dram", "gpu"):
            model = placed(tiny_model("deepseek_v3"), torch.device("cuda"), "gpu", where)
            inject(model, "dense", command_line=SMALL)
            if where == "dram":
                cache = HeteroCache(model)
                with torch.no_grad():
                    # With a token, behind which the shared expert's forward is replaced.
                    for part in PROMPT[:, :4].split(1, dim=1):
                        model(part.to("cuda"), past_key_values=cache)
                cache.save(tmp_path / "context")
            again = HeteroCache.load(tmp_path / "context", model)
            with torch.no_grad():
                found.append(model(PROMPT[:, :1].to("cuda"), past_key_values=again).logits)
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.cuda
def test_experts_that_are_mapped_from_the_disk_are_memory_in_use(monkeypatch):
    monkeypatch.setattr(plan, "free_dram", lambda: 10**9)
    with simulated_cuda():
        for where, used in (("dram", True), ("gpu", False)):
            model = placed(tiny_model("mixtral"), torch.device("cuda"), "gpu", where)
            model.hetero_kv_mapped_weights = 10**8
            injection = inject(model, "dense", command_line=SMALL)
            assert 10**9 - Plan.of(injection).dram == (bytes_of(experts_in(model)) if used else 0)


@pytest.mark.cuda
def test_packed_experts_stay_where_they_are_under_later_rules():
    with simulated_cuda():
        model = tiny_model("mixtral").to("cuda")
        inject(model, "dense", command_line={**SMALL, "experts_device": "dram", "weights": "q8_0"})
        expected = answers(model)
        eject_around_packed_weights(model)
        with pytest.raises(ConfigError, match=r"experts_device is gpu, but .*experts has its weights in DRAM since"):
            inject(model, "dense", command_line={**SMALL, "experts_device": "gpu"})
        placed_there = placed(tiny_model("mixtral"), torch.device("cuda"), "auto", "dram")
        with pytest.raises(ConfigError, match=r"experts_device is gpu, but .*experts has its weights in DRAM since"):
            inject(placed_there, "dense", command_line={**SMALL, "experts_device": "gpu"})
        for where in ("auto", "dram"):
            inject(model, "dense", command_line={**SMALL, "experts_device": where})
            assert torch.equal(answers(model), expected)
            eject(model)
