"""Resolves a model's name: a named model, a `.gguf` file, a directory, or a hub id."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

from hetero_kv.models.errors import ModelError
from hetero_kv.models.fetching import fetch
from hetero_kv.models.gguf.file import MAGIC
from hetero_kv.models.gguf.model_files import gguf_models, model_stem
from hetero_kv.models.hub_files import HUB_FILE, HUB_ID, hub_gguf
from hetero_kv.models.named import NAMED_MODELS, unknown_name
from hetero_kv.models.progress import ProgressReport, reporting
from hetero_kv.models.sources import HUB_TIMEOUT_SECONDS


@dataclass(frozen=True)
class Location:
    """The places of a model's parts.

    Attributes:
        name: the model's name.
        pretrained: the directory or hub id with configuration and tokenizer; None if the GGUF file has them.
        gguf: the GGUF file with the weights; None if `pretrained` has them.
        context_length: in tokens; None if only the configuration has it.
        offline: whether the hub is unreachable, so that its local cache is used.
    """

    name: str
    pretrained: str | None
    gguf: Path | None
    context_length: int | None = None
    offline: bool = False


def locate(
    name_or_path: str | os.PathLike[str], gguf_path: str | os.PathLike[str] | None, progress: ProgressReport | None
) -> Location:
    """The Location of a model; a named model that is missing in the cache is fetched.

    A named model takes precedence over a directory of the same name: write `./name` for the directory.

    Raises:
        ModelError: nothing has this name, or it is no model.
    """
    name = os.fspath(name_or_path)
    path = Path(name).expanduser()
    # Ollama's blobs have no suffix.
    is_gguf = (path.suffix.lower() == ".gguf" and not _is_hub_file(name)) or _begins_as_gguf(path)
    is_on_hub = _is_hub_file(name)
    has_weights = name in NAMED_MODELS or is_gguf or is_on_hub
    if has_weights and gguf_path is not None:
        raise ModelError(
            f"{name!r} includes weights, and gguf_path is {os.fspath(gguf_path)!r} as well; leave gguf_path out, or "
            "give the directory or hub id of the configuration as the model"
        )
    if name in NAMED_MODELS:
        model = NAMED_MODELS[name]
        with reporting(name, progress) as report:
            return Location(name, None, fetch(model, report)[0], model.context_length)
    if is_on_hub:
        return Location(name, None, hub_gguf(name, progress))
    _require_regular(path)
    if is_gguf and not path.is_dir():
        return Location(model_stem(path), None, path)
    gguf = None if gguf_path is None else _gguf_at(os.fspath(gguf_path), progress)
    if path.is_dir():
        if not (path / "config.json").is_file():
            found = [file.name for file in gguf_models(path.glob("*.gguf"))]
            remedy = f"give one of its GGUF files: {', '.join(found)}" if found else "give a model's directory"
            raise ModelError(
                f"the directory {name!r} has no config.json, so it is not in Hugging Face format; {remedy}"
            )
        return Location(path.resolve().name, str(path), gguf)
    if path.exists():
        raise ModelError(
            f"{name!r} is neither a directory nor a GGUF file; give one of these, a hub id or a named model"
        )
    if HUB_ID.fullmatch(name):
        return Location(name, name, gguf, offline=_hub_is_silent(name))
    if name.startswith((".", "/", "~")) or os.sep in name:
        raise ModelError(f"there is no directory or file {name!r}; check the path")
    raise unknown_name(name)


def _begins_as_gguf(path: Path) -> bool:
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise ModelError(f"{str(path)!r} cannot be read: {error.strerror}; check its permissions") from error


def _require_regular(path: Path) -> None:
    """Raise ModelError for a pipe, a device or a socket, which cannot be read at random positions."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ModelError(
            f"{str(path)!r} is a pipe or a device, and a model is read at random positions; save it in a file first"
        )


def _is_hub_file(name: str) -> bool:
    return HUB_FILE.fullmatch(name) is not None and not Path(name).exists()


def _gguf_at(name: str, progress: ProgressReport | None) -> Path:
    """The GGUF file that `gguf_path` names."""
    if _is_hub_file(name):
        return hub_gguf(name, progress)
    path = Path(name).expanduser()
    _require_regular(path)
    if not path.is_dir():
        return path
    found = gguf_models(path.glob("*.gguf"))
    if len(found) != 1:
        listed = f" ({', '.join(file.name for file in found)})" if found else ""
        raise ModelError(
            f"gguf_path is {str(path)!r}, which has {len(found)} .gguf files{listed}; "
            "it must have exactly one, or be the file itself"
        )
    return found[0]


def _hub_is_silent(repo: str) -> bool:
    """Whether the hub is unreachable, so that only its local cache can serve `repo`.

    Raises ModelError if the hub refuses `repo`, or if it is unreachable and the cache lacks it.
    """
    try:
        # One request without retries: transformers would retry for half a minute if the hub is unreachable.
        huggingface_hub.get_hf_file_metadata(
            huggingface_hub.hf_hub_url(repo, "config.json"), timeout=HUB_TIMEOUT_SECONDS
        )
    except GatedRepoError as error:
        raise ModelError(f"the hub asks for access rights to {repo!r}; run `hf auth login` first") from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"there is no hub repository {repo!r} (nor such a directory); check the spelling") from error
    except LocalEntryNotFoundError:
        return _cached(repo)
    except EntryNotFoundError as error:
        raise ModelError(
            f"the hub repository {repo!r} has no config.json; give a repository in Hugging Face format, or one of its "
            f".gguf files by the type of its weights or by its name: {repo}:Q4_K_M"
        ) from error
    except Exception:
        # The exception for an unreachable hub depends on the HTTP library.
        return _cached(repo)
    return False


def _cached(repo: str) -> bool:
    if huggingface_hub.try_to_load_from_cache(repo, "config.json") is None:
        raise ModelError(
            f"there is no directory {repo!r}, and the hub cannot be reached, whose cache lacks it too; check the "
            f"network, or give a directory, a .gguf file or one of {', '.join(NAMED_MODELS)}"
        )
    return True
