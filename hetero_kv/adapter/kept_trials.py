"""Keeps what trials of fast paths have shown, so that a later start of the same model need not repeat most of them.

`trials` in the folder of a model's packed weights has the results of one start, behind its SHA-256, and what they
depend on: the weights, by that folder's name; the code of this package, of the model's classes, and of the libraries
by their versions; the model's configuration, its operators and their settings; the processor, the number of threads,
and the environment. Whatever differs, all layers are tried again. So is the first layer at every start.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import asdict, is_dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import torch

from hetero_kv.cpu_ops.cpu_features import isa
from hetero_kv.durable_file import write_atomically
from hetero_kv.file_states import file_state, file_states

_logger = logging.getLogger(__name__)

TRIALS = "trials"
_PACKAGE = Path(__file__).parents[1]
_LIBRARIES = "torch", "transformers", "numpy", "numba", "llvmlite"
# Environment variables that change what is computed, by how they begin.
_ENVIRONMENT = "ATEN_", "HETERO_KV_ISA", "GOMP_", "KMP_", "MKL_", "NUMBA_", "OMP_", "ONEDNN_", "TORCH_"


class KeptTrials:
    """The results of a model's trials, by the fast path's name and its layer's path.

    Args:
        path: the file; it is read if it is there.
        identity: what the results depend on.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        self._path, self._identity = path, json.loads(json.dumps(identity))
        self._kept: dict[str, Any] = self._read()
        self._shown: dict[str, Any] = {}
        self._tried: set[str] = set()
        self._all_agree = True

    def result(self, name: str, path: str) -> Any:
        """The kept result of a layer that is not the first one tried with this fast path; None for none."""
        kept = self._kept.get(f"{name} {path}") if name in self._tried else None
        if kept is not None:
            self._shown[f"{name} {path}"] = kept
        return kept

    def show(self, name: str, path: str, result: Any) -> None:
        """Take down the result of a trial; None if the fast path did not agree."""
        key = f"{name} {path}"
        self._all_agree &= result is not None
        # JSON makes lists of tuples.
        shown = json.loads(json.dumps(result))
        if self._kept and self._kept.get(key) != shown:
            _logger.warning("%s: its trials have other results than those kept in %s, which go", path, self._path)
            self._kept = {}
        self._shown[key] = shown
        self._tried.add(name)

    def save(self) -> None:
        """Keep the results, unless they are kept already or some layer has none."""
        if not self._all_agree or self._shown == self._kept:
            return
        text = json.dumps({"identity": self._identity, "results": self._shown})
        # Where nothing can be written, all layers are tried at every start.
        with suppress(OSError):
            write_atomically(self._path, f"{_digest(text)}\n{text}")

    def _read(self) -> dict[str, Any]:
        try:
            digest, _, text = self._path.read_text().partition("\n")
        except (OSError, UnicodeDecodeError):
            return {}
        if digest != _digest(text):
            _logger.warning("%s is damaged; it is made again", self._path)
            return {}
        kept = json.loads(text)
        results: dict[str, Any] = kept["results"] if kept["identity"] == self._identity else {}
        return results


#: The results of the model whose fast paths this thread prepares. They are not in a `ForwardBatch`, because trials run
#: outside of forwards; they are no argument, because operators outside the package override `compile_own_kernels`,
#: which takes none.
TRIALS_OF_MODEL: ContextVar[KeptTrials | None] = ContextVar("TRIALS_OF_MODEL", default=None)


@contextmanager
def trials_kept(model: Any, operators: Mapping[str, Any], engine: Any) -> Iterator[None]:
    """Within this context, trials of the model's fast paths are kept, if its packed weights are.

    No code of others may have changed the model or its classes.
    """
    folder: Path | None = getattr(model, "hetero_kv_packed_folder", None)
    if folder is None:
        yield
        return
    trials = KeptTrials(folder / TRIALS, _identity(model, operators, engine, folder.name))
    token = TRIALS_OF_MODEL.set(trials)
    try:
        yield
    finally:
        TRIALS_OF_MODEL.reset(token)
    trials.save()


def _identity(model: Any, operators: Mapping[str, Any], engine: Any, packed: str) -> dict[str, Any]:
    classes = {type(module).__module__ for module in model.modules()}
    files = sorted(str(sys.modules[name].__file__) for name in classes)
    return {
        "packed": packed,
        "code": _digest("\n".join((*file_states(_PACKAGE), *(file_state(Path(file)) for file in files)))),
        "libraries": {name: metadata.version(name) for name in _LIBRARIES},
        "config": _digest(json.dumps(model.config.to_dict(), sort_keys=True, default=str)),
        "dtype": str(model.dtype),
        "operators": _digest(json.dumps([_described(path, each) for path, each in operators.items()], default=str)),
        "engine": asdict(engine),
        "processor": [isa(), llvm.get_host_cpu_name(), torch.backends.cpu.get_cpu_capability()],
        "threads": torch.get_num_threads(),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_ENVIRONMENT)},
    }


def _described(path: str, operator: Any) -> list[Any]:
    settings = operator.settings
    fields = asdict(settings) if is_dataclass(settings) and not isinstance(settings, type) else settings
    return [path, type(operator).__qualname__, fields]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
