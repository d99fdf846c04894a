"""A family in one file outside the package appears wherever methods are shown."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig

import hetero_kv
from hetero_kv import operators
from hetero_kv.adapter.footprint import BytesPerToken, FootprintTerm, LayerFootprint, MemoryShare, register
from hetero_kv.adapter.loaded_weights import LoadedWeights
from hetero_kv.adapter.operator import AttentionOperator
from hetero_kv.chat.answer import ChatAnswer, Statistics
from hetero_kv.chat.display import statistics_table
from hetero_kv.chat.json_report import json_report
from hetero_kv.cli import main
from hetero_kv.commands.layer_report import grouped
from hetero_kv.engine import statistics
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.layer import FamilyLayer
from hetero_kv.engine.statistics import Statistic
from hetero_kv.errors import HeteroKVError
from hetero_kv.evals.budget import attended_tokens
from hetero_kv.evals.generation import counted
from hetero_kv.evals.outcome import Cost
from hetero_kv.gpu_ops.attention import chunk_attention
from hetero_kv.planning.plan import Footprint
from hetero_kv.rules.injecting import eject, inject
from hetero_kv.rules.rule_file import parse_rules
from hetero_kv.settings.setting import Settings, setting
from tests.support.tiny_models import tiny_model

NOTES = register(FootprintTerm("notes", "notes beside the blocks", in_dram=True))
PAIRS = register(FootprintTerm("pairs", "pairs of a key and a value"))
PAIRS_KEPT = statistics.register(Statistic("pairs_kept", "pairs", "pairs of a key and a value that are kept"))
NOTE_BYTES = 5


@dataclass(frozen=True)
class PairSettings(Settings):
    """Pairs of a key and a value."""

    spare: int = setting(3, "room for more pairs, of the first layer", unit="tokens", minimum=0)


@dataclass(frozen=True, kw_only=True)
class PairFootprint(LayerFootprint):
    spare: int

    @property
    def place(self) -> str:
        return f"in pairs, with room for {self.spare} more"

    def shares(self, demand) -> Iterator[MemoryShare]:
        yield MemoryShare(NOTES, demand.sequences * demand.tokens * NOTE_BYTES)
        yield MemoryShare(PAIRS, demand.sequences * self.kv_bytes(demand.tokens + self.spare, demand))


class PairLayer(FamilyLayer):
    """Keys and values as they came: (keys, values), or None before the first."""

    prefilling = False

    def begin_prefill(self, step) -> None:
        self.prefilling = True

    def leave_prefill(self) -> None:
        self.prefilling = False

    @property
    def is_prefilling(self) -> bool:
        return self.prefilling

    def select(self, rows) -> None:
        self.state = self.state and tuple(part[list(rows)] for part in self.state)

    @property
    def statistics(self) -> dict[str, float | int | None]:
        return {PAIRS_KEPT.name: self.state[0].shape[2] if self.state else 0}


class PairAttention(AttentionOperator):
    meaning = "keeps pairs of a key and a value"
    settings_class = PairSettings
    statistics = (PAIRS_KEPT,)
    configured: tuple[AttentionOperator, ...] = ()
    compiled: tuple[float, ...] = ()

    def new_cache_layer(self) -> PairLayer:
        return PairLayer()

    def prefill_chunk(self, layer, step, call) -> torch.Tensor:
        keys, values = layer.state or (call.k[:, :, :0], call.v[:, :, :0])
        out, _ = chunk_attention(call.q, keys, values, call.k, call.v, call.scale, call.softcap)
        layer.state = torch.cat([keys, call.k], dim=2), torch.cat([values, call.v], dim=2)
        return out

    def decode_step(self, layer, step, call) -> torch.Tensor:
        return self.prefill_chunk(layer, step, call)

    def settings_in_layer(self) -> dict[str, object]:
        return super().settings_in_layer() | {"spare": self.spare}

    @property
    def spare(self) -> int:
        return self.settings.spare if self.layer_idx == 0 else 0

    def footprint(self, shape) -> PairFootprint:
        return PairFootprint(shape, stored=BytesPerToken(representatives=NOTE_BYTES), block_size=1, spare=self.spare)

    def attended_tokens(self, length: int) -> float:
        return length / 2

    def compile_kernels(self, kv_heads, group, k_dim, v_dim, softcap) -> None:
        self.compiled = kv_heads, group, k_dim, v_dim, softcap

    @classmethod
    def configure_together(cls, operators) -> None:
        if len(operators) == 1:
            raise HeteroKVError("pairs come in twos")
        cls.configured = tuple(operators)


class SilentAttention(PairAttention):
    """A family that says nothing of itself."""

    footprint = AttentionOperator.footprint
    attended_tokens = AttentionOperator.attended_tokens
    settings_in_layer = AttentionOperator.settings_in_layer


def pairs(name, layers=r"\d+"):
    return parse_rules(rules_of(name, layers), trust_rules=[__name__])


def rules_of(name, layers=r"\d+"):
    dotted = f"{__name__}.{name}"
    others = [] if layers == r"\d+" else [{"match": {"name": r"self_attn$"}, "replace": {"class": "default"}}]
    return {
        "rules": [
            {"match": {"name": rf"layers\.{layers}\.self_attn$"}, "replace": {"class": dotted, "kwargs": {"spare": 7}}},
            {"match": {"name": r"layers\.\d+$"}, "replace": {"class": "ChunkedDecoderLayer"}},
            *others,
        ]
    }


@pytest.fixture(scope="module")
def llama():
    return tiny_model("llama")


@pytest.fixture
def paired(llama):
    """A tiny Llama whose layers 1 and 2 keep pairs; the first is untouched."""
    yield inject(llama, pairs("PairAttention", "[12]"))
    eject(llama)


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Run a command on rules of pairs in all of two layers; returns what it printed."""
    monkeypatch.setenv("HETERO_KV_CONFIG", str(tmp_path / "settings.yaml"))
    monkeypatch.setenv("COLUMNS", "120")
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
    AutoConfig.for_model("llama", **shape).save_pretrained(tmp_path / "model")
    path = tmp_path / "pairs.yaml"
    path.write_text(json.dumps(rules_of("PairAttention")))

    def run(name, *words):
        words = (path, *words) if name == "rules" else ("--config", path, "--device", "cpu", *words)
        assert main([name, *map(str, words), "--model", str(tmp_path / "model"), "--trust_rules", __name__]) == 0
        return capsys.readouterr().out

    return run


def test_the_family_computes_what_the_untouched_model_does(llama):
    prompt = torch.randint(2, 90, (2, 21))
    with torch.no_grad():
        expected = llama(prompt).logits
    inject(llama, pairs("PairAttention"), command_line={"chunk_size": 8})
    try:
        cache = HeteroCache(llama)
        with torch.no_grad():
            found = [llama(part, past_key_values=cache).logits for part in prompt.split((20, 1), dim=1)]
        assert cache.statistics == {"pairs_kept": [21] * 3}
    finally:
        eject(llama)
    torch.testing.assert_close(torch.cat(found, dim=1), expected, rtol=1e-4, atol=1e-4)


def test_statistics_have_a_value_per_layer_and_none_where_a_layer_is_silent(llama, paired):
    cache = HeteroCache(llama)
    assert cache.statistics == {"pairs_kept": [None, 0, 0]}
    with torch.no_grad():
        llama(torch.randint(2, 90, (1, 9)), past_key_values=cache)
    assert cache.statistics == {"pairs_kept": [None, 9, 9]}
    assert counted(cache) == {"pairs_kept": 9}


def test_statistics_stand_in_the_json_of_an_answer_and_in_the_line_of_a_sample():
    of_layers = {"pairs_kept": [None, 9, 12]}
    taken = Statistics(1, 2, 3, 0.1, 0.1, 0.2, 1, None, 1, 0, of_layers=of_layers)
    answer = ChatAnswer("pairs", "end", taken)
    session = SimpleNamespace(
        loaded=SimpleNamespace(name="tiny"),
        options=SimpleNamespace(mode="long_context"),
        rules_name="pairs.yaml",
        settings_in_force=dict,
        conversation=SimpleNamespace(context_tokens=5),
        capacity=9,
        operators=list,
        weights=LoadedWeights(1000, ("float32",)),
        injection=None,
    )
    report = json_report(session, answer)
    assert report["pairs_kept"] == [None, 9, 12]
    assert report["cached_entries"] is None
    shown = statistics_table(session, answer)
    assert list(shown.columns[0].cells).count("pairs") == 1
    assert "10.500 on average, 9 to 12 by layer" in list(shown.columns[1].cells)
    line = Cost(counted={"pairs_kept": 10.5}).to_plain()
    assert line["pairs_kept"] == 10.5
    assert line["cached_entries"] is None
    assert Cost.from_plain(line) == Cost(counted={"pairs_kept": 10.5})


def test_the_plan_has_the_familys_terms(command):
    report = json.loads(command("plan", "--json", "--dtype", "float32"))
    at_4k = report["lengths"]["4096"]["cpu"]
    assert at_4k["notes"] == 2 * 4096 * NOTE_BYTES
    assert at_4k["pairs"] == (2 * 4096 + 7) * 2 * 2 * 16 * 4
    assert at_4k["untouched"] == at_4k["keys_values"] == 0
    assert report["bytes_per_token"]["total"] == 2 * NOTE_BYTES
    gpu = report["lengths"]["4096"]["gpu"]
    assert gpu["dram"] == gpu["notes"]
    shown = command("plan")
    assert "1 layers in pairs, with room for 7 more: 2 kv heads, keys 16, values 16" in shown
    assert "pairs of a key and a value" in shown


def test_a_term_has_one_meaning():
    assert register(PAIRS) is PAIRS
    with pytest.raises(HeteroKVError, match="'pairs' of a footprint is registered already"):
        register(FootprintTerm("pairs", "something else"))
    with pytest.raises(HeteroKVError, match="'pairs_kept' is registered already"):
        statistics.register(Statistic("pairs_kept", "pairs", "something else"))


def test_a_family_that_says_nothing_keeps_everything_where_the_model_computes(llama):
    injection = inject(llama, pairs("SilentAttention"))
    try:
        memory = Footprint.of(injection).memory(100)
        assert (memory.store, memory.untouched) == (0, 3 * 100 * 2 * 2 * 16 * 4)
        assert attended_tokens(injection, 40) == 40
        assert next(injection.attention_operators()).settings_in_layer() == {"spare": 7}
    finally:
        eject(llama)


def test_rules_show_the_settings_as_they_apply_in_a_layer(llama, command):
    modules = {row["module"]: row for row in json.loads(command("rules", "--json"))["modules"] if row["first"] == 0}
    row = modules["model.layers.*.self_attn"]
    assert (row["operator"], row["settings"], row["changed"]) == ("PairAttention", {"spare": 7}, ["spare"])
    injection = inject(llama, pairs("PairAttention"))
    try:
        rows = [row for row in grouped(injection) if row.operator == "PairAttention"]
    finally:
        eject(llama)
    assert [(row.first, row.last, row.settings["spare"]) for row in rows] == [(0, 0, 7), (1, 2, 0)]


def test_a_step_attends_to_what_the_family_says_and_elsewhere_to_everything(paired):
    assert attended_tokens(paired, 30) == (30 + 15 + 15) / 3


def test_kernels_are_compiled_and_operators_settled(llama, paired):
    paired.compile_kernels()
    assert [operator.compiled for operator in paired.attention_operators()] == [(2, 2, 16, 16, 0.0)] * 2
    assert PairAttention.configured == tuple(paired.attention_operators())


def test_operators_that_cannot_work_together_leave_the_model_as_it_was(llama):
    with pytest.raises(HeteroKVError, match="pairs come in twos"):
        inject(llama, pairs("PairAttention", "1"))
    assert not any(isinstance(module, AttentionOperator) for module in llama.modules())


GENERIC_ROOMS = ("adapter", "chat", "commands", "engine", "evals", "planning", "rules")
KNOW_A_FAMILY = {"evals/recorded_layer.py", "evals/recording_attention.py", "evals/shared_prefill.py"}


def families_named_in(path):
    """What the source at `path` imports of a family, be it by way of `hetero_kv.operators`."""
    home = {name: getattr(operators, name).__module__ for name in operators.__all__}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            package, _, last = name.rpartition(".")
            where = home.get(last, "") if package == "hetero_kv.operators" else name
            if where.startswith("hetero_kv.families"):
                yield name


def test_no_generic_room_names_a_family():
    root = Path(hetero_kv.__file__).parent
    files = [path for room in GENERIC_ROOMS for path in (root / room).rglob("*.py")]
    named = {path.relative_to(root).as_posix(): list(families_named_in(path)) for path in files}
    assert {path: names for path, names in named.items() if names and path not in KNOW_A_FAMILY} == {}
    assert list(families_named_in(root / "evals" / "shared_prefill.py"))
