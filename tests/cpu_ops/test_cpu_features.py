"""Kernels use the CPU's best instruction set, or the one that is set."""

import llvmlite.binding as llvm
import pytest

from hetero_kv.cpu_ops import cpu_features
from hetero_kv.cpu_ops.cpu_features import ISAS, available, forced_isa, has, isa, use_isa, vector_bits


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    monkeypatch.delenv(cpu_features.VARIABLE, raising=False)
    with forced_isa(None):
        yield


@pytest.fixture
def a_zen_5(monkeypatch):
    """Answers as on a CPU with AVX-512, its dot products and nothing of Arm's."""
    names = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni", "avxvnni")
    caches = (cpu_features.available, cpu_features._require)
    for each in caches:
        each.cache_clear()
    monkeypatch.setattr(cpu_features, "_features", lambda: frozenset(names))
    yield
    for each in caches:
        each.cache_clear()


def test_without_a_setting_the_best_available_is_used():
    assert isa() == available()[0]
    assert available()[-1] == "generic"
    assert vector_bits() == ISAS[isa()].bits


def test_the_features_are_the_cpus_own():
    with forced_isa(None):
        host = llvm.get_host_cpu_features()
    used = [name for name in ("fma", "avx2", "avx512vnni", "dotprod") if host.get(name)]
    assert all(has(name) for name in used) or isa() == "generic"
    assert not has("no such feature")


@pytest.mark.parametrize("name", ISAS)
def test_the_environment_sets_it_where_the_cpu_can(name, monkeypatch):
    monkeypatch.setenv(cpu_features.VARIABLE, name.upper())
    if name in available():
        assert isa() == name
        assert vector_bits() == ISAS[name].bits
    else:
        with pytest.raises(ValueError, match=f"HETERO_KV_ISA is '{name}', but this CPU lacks"):
            isa()


def test_an_unknown_name_is_refused_and_the_known_ones_named(monkeypatch):
    monkeypatch.setenv(cpu_features.VARIABLE, "sse9")
    with pytest.raises(ValueError, match="HETERO_KV_ISA is 'sse9'; the instruction sets are avx512, avx2, neon"):
        isa()
    with pytest.raises(ValueError, match="requested instruction set is 'sse9'"):
        use_isa("sse9")


@pytest.mark.parametrize("name", available())
def test_the_function_goes_before_the_environment_and_ends_with_its_block(name, monkeypatch):
    monkeypatch.setenv(cpu_features.VARIABLE, "generic")
    with forced_isa(name):
        assert isa() == name
    assert isa() == "generic"


@pytest.mark.usefixtures("a_zen_5")
def test_a_narrower_instruction_set_hides_the_features_above_it():
    assert available() == ("avx512", "avx2", "generic")
    assert isa() == "avx512"
    assert has("avx512vnni")
    with forced_isa("avx2"):
        assert vector_bits() == 256
        assert has("avxvnni")
        assert not has("avx512vnni")
    with forced_isa("generic"):
        assert vector_bits() == 128
        assert not has("fma")
    with pytest.raises(ValueError, match="lacks neon; it can run avx512, avx2, generic"):
        use_isa("neon")
