"""Loads kernels from Numba's on-disk cache without the data that is needed only to compile other kernels.

Bitcode. With a kernel's machine code, Numba keeps its bitcode, from which other kernels inline it. Parsing that takes
most of the time of loading a kernel. Here it is parsed when a kernel that inlines it is compiled; the names that it
defines, which Numba looks up to find the machine code, are kept with it.

Registries. Before it loads a kernel, Numba imports all its implementations of Python's and numpy's functions. Compiling
does that by itself. Here only the runtime that kernels call is made ready.
"""

from typing import Any

import llvmlite.binding as llvm
from numba.core.caching import Cache, IndexDataCacheFile
from numba.core.codegen import CPUCodeLibrary
from numba.core.runtime import rtsys

_from_state = CPUCodeLibrary._unserialize.__func__
_module_for_linking = CPUCodeLibrary._get_module_for_linking


class KeptBitcode(bytes):
    """A kernel's bitcode in the cache; `defined` are the names of the functions and variables that it defines."""

    defined: frozenset[str]

    @classmethod
    def of(cls, bitcode: bytes) -> "KeptBitcode":
        """The bitcode with its names."""
        module = llvm.parse_bitcode(bitcode)
        kept = cls(bitcode)
        entries = (*module.functions, *module.global_variables)
        kept.defined = frozenset(entry.name for entry in entries if not entry.is_declaration)
        return kept


def with_names(data: Any) -> Any:
    """A compiled kernel as Numba saves it, its bitcode as KeptBitcode; other data as it is."""
    match data:
        case ((name, "object", (code, bitcode)), *rest):
            return (name, "object", (code, KeptBitcode.of(bitcode))), *rest
    return data


def _library(cls: Any, codegen: Any, state: Any) -> Any:
    match state:
        case (name, "object", (code, KeptBitcode() as bitcode)):
            library = codegen.create_library(name)
            library.enable_object_caching()
            library._set_compiled_object(code)
            library.hetero_kv_bitcode = bitcode
            library._finalize_final_module()
            codegen._engine._defined_symbols |= bitcode.defined
            return library
    return _from_state(cls, codegen, state)


def _linked(self: Any) -> Any:
    bitcode = self.__dict__.pop("hetero_kv_bitcode", None)
    if bitcode is not None:
        self._shared_module = llvm.parse_bitcode(bitcode)
    return _module_for_linking(self)


def _overload(self: Any, signature: Any, context: Any) -> Any:
    rtsys.initialize(context)
    with self._guard_against_spurious_io_errors():
        return self._load_overload(signature, context)


def load_less() -> None:
    """Patch Numba as described above; further calls do nothing."""
    if not hasattr(IndexDataCacheFile, "hetero_kv_loads_less"):
        IndexDataCacheFile.hetero_kv_loads_less = True
        CPUCodeLibrary._unserialize = classmethod(_library)
        CPUCodeLibrary._get_module_for_linking = _linked
        Cache.load_overload = _overload
