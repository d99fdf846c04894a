"""Which vector instructions kernels are written for: found out from the CPU, or set.

Four instruction sets are told apart by what a kernel's inner loops depend on: how wide a vector is, and how many of
them a core holds. `HETERO_KV_ISA=avx2|avx512|neon|generic` in the environment sets one, `use_isa` and `forced_isa` do
at any time. What is set narrows what `has` answers too, so that code which asks here before it emits one runs
every path that a machine has.
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
class Isa:
    """bits: of one vector. registers: vectors that a core holds. needs: features, by LLVM's names."""

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
        Isa("avx512", 512, 32, frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "fma", "f16c"})),
        Isa("avx2", 256, 16, frozenset({"avx2", "fma", "f16c"})),
        Isa("neon", 128, 32, frozenset({"neon"})),
        Isa("generic", 128, 16, frozenset()),
    )
}
"""Best first. generic is 128-bit vectors of any CPU, with no instruction named."""
_BEYOND_AVX2 = ("avx512", "avx10", "amx")
_forced: str | None = None


@cache
def _features() -> frozenset[str]:
    """What Numba compiles for: the CPU's features, or those that NUMBA_CPU_FEATURES and NUMBA_CPU_NAME leave."""
    flags = codegen.get_host_cpu_features() if config.CPU_FEATURES is None else config.CPU_FEATURES
    found = {flag[1:] for flag in flags.split(",") if flag.startswith("+")}
    if llvm.get_process_triple().startswith(("aarch64", "arm64")):
        found.add("neon")  # part of the architecture; LLVM does not list it everywhere
    return frozenset(found)


@cache
def available() -> tuple[str, ...]:
    """The instruction sets that this machine can run, best first; 'generic' is always one."""
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
    """The name of the instruction set in use: 'avx512', 'avx2', 'neon' or 'generic'.

    Raises ValueError where HETERO_KV_ISA names one that is unknown or that this CPU cannot run.
    """
    if _forced is not None:
        return _forced
    wanted = os.environ.get(VARIABLE, "")
    return _require(wanted.lower(), VARIABLE) if wanted else available()[0]


def vector_bits() -> int:
    """Bits of one vector of the instruction set in use: 512, 256 or 128. Raises as `isa`."""
    return ISAS[isa()].bits


def has(feature: str) -> bool:
    """Whether kernels may use a feature, by LLVM's name: 'avx512vnni', 'avxvnni', 'avx512bf16', 'dotprod', 'i8mm'.

    True where the CPU has it and the instruction set in use does not stand below it. Raises as `isa`.
    """
    name = isa()
    if feature not in _features() or name == "generic":
        return False
    return name != "avx2" or not feature.startswith(_BEYOND_AVX2)


def use_isa(name: str | None) -> None:
    """Use an instruction set from now on, whatever the environment says; None: what was found or HETERO_KV_ISA again.

    Kernels that were made for another one stay as they are; those asked for from now on are made for this one.
    Raises ValueError for a name that is unknown or that this CPU cannot run.
    """
    global _forced
    _forced = None if name is None else _require(name, "the instruction set asked for")


@contextmanager
def forced_isa(name: str | None) -> Iterator[None]:
    """`use_isa` for the length of a with block; raises as it does."""
    before = _forced
    use_isa(name)
    try:
        yield
    finally:
        use_isa(before)
