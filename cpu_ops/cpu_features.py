"""The vector instruction set that kernels are compiled for: detected from the CPU, or forced.

The four instruction sets differ in what a kernel's inner loops depend on: the width of a vector and the number of
vector registers. The environment variable `HETERO_KV_ISA=avx2|avx512|neon|generic` forces one, and `use_isa` and
`forced_isa` do so at any time. Forcing one also restricts `has`, so that tests can run every path that a machine
supports.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import llvmlite.binding as llvm
from numba.core import codegen, config

VARIABLE = "HETERO_KV_ISA"


@dataclass(frozen=True)
class InstructionSet:
    """bits: of one vector. registers: number of vector registers. needs: required features, by LLVM's names."""

    name: str
    bits: int
    registers: int
    needs: frozenset[str]

    @property
    def float_lanes(self) -> int:
        """float32 numbers in one vector."""
        return self.bits // 32


ISAS = {
    isa.name: isa
    for isa in (
        InstructionSet("avx512", 512, 32, frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "fma", "f16c"})),
        InstructionSet("avx2", 256, 16, frozenset({"avx2", "fma", "f16c"})),
        InstructionSet("neon", 128, 32, frozenset({"neon"})),
        InstructionSet("generic", 128, 16, frozenset()),
    )
}
"""Best first. generic means 128-bit vectors on any CPU, without named instructions."""
_BEYOND_AVX2 = ("avx512", "avx10", "amx")
_forced: str | None = None


@cache
def _features() -> frozenset[str]:
    """Returns the features that Numba compiles for: the CPU's, or those of NUMBA_CPU_FEATURES and NUMBA_CPU_NAME."""
    flags = codegen.get_host_cpu_features() if config.CPU_FEATURES is None else config.CPU_FEATURES
    found = {flag[1:] for flag in flags.split(",") if flag.startswith("+")}
    if llvm.get_process_triple().startswith(("aarch64", "arm64")):
        found.add("neon")  # part of the architecture; LLVM does not list it everywhere
    return frozenset(found)


@cache
def available() -> tuple[str, ...]:
    """Returns the instruction sets that this machine can run, best first; always including 'generic'."""
    return tuple(name for name, each in ISAS.items() if each.needs <= _features())


@cache
def _require(name: str, source: str) -> str:
    if name not in ISAS:
        raise ValueError(f"{source} is {name!r}; the instruction sets are {', '.join(ISAS)}")
    if name not in available():
        missing = ", ".join(sorted(ISAS[name].needs - _features()))
        raise ValueError(f"{source} is {name!r}, but this CPU lacks {missing}; it can run {', '.join(available())}")
    return name


def isa() -> str:
    """Returns the name of the instruction set in use: 'avx512', 'avx2', 'neon' or 'generic'.

    Raises ValueError if HETERO_KV_ISA names one that is unknown or that this CPU cannot run.
    """
    if _forced is not None:
        return _forced
    requested = os.environ.get(VARIABLE, "")
    return _require(requested.lower(), VARIABLE) if requested else available()[0]


def vector_bits() -> int:
    """Returns the bits of a vector of the instruction set in use: 512, 256 or 128. Raises the errors of `isa`."""
    return ISAS[isa()].bits


def has(feature: str) -> bool:
    """Whether kernels may use a feature, by LLVM's name: 'avx512vnni', 'avxvnni', 'avx512bf16', 'dotprod', 'i8mm'.

    True if the CPU has the feature and the instruction set in use includes it. Raises the errors of `isa`.
    """
    name = isa()
    if feature not in _features() or name == "generic":
        return False
    return name != "avx2" or not feature.startswith(_BEYOND_AVX2)


def is_amd() -> bool:
    """Whether this is an x86 CPU of AMD's: only these have SSE4a."""
    return "sse4a" in _features()


def is_intel() -> bool:
    """Whether this is an x86 CPU, and not AMD's."""
    return "sse2" in _features() and not is_amd()


def use_isa(name: str | None) -> None:
    """Force an instruction set, overriding the environment; None returns to HETERO_KV_ISA or the detected one.

    Kernels that are already compiled do not change; later ones are compiled for this instruction set. Raises ValueError
    for a name that is unknown or that this CPU cannot run.
    """
    global _forced
    _forced = None if name is None else _require(name, "the requested instruction set")


@contextmanager
def forced_isa(name: str | None) -> Iterator[None]:
    """Force an instruction set within a `with` block; raises the errors of `use_isa`."""
    before = _forced
    use_isa(name)
    try:
        yield
    finally:
        use_isa(before)
