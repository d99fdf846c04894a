"""Downloads a GGUF model from a repository of the hub: `owner/repo:Q4_K_M`, or `owner/repo:name.gguf`.

Files are in huggingface_hub's cache, which checks and shares them, and serves them when the hub cannot be reached.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import huggingface_hub
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from huggingface_hub.file_download import repo_folder_name

from hetero_kv.models.errors import ModelError
from hetero_kv.models.gguf.model_files import PART_NAME, encoders, gguf_models
from hetero_kv.models.progress import ProgressReport, reporting
from hetero_kv.models.sources import DISK_ERRORS, HUB_TIMEOUT_SECONDS, bar_that_reports, first_line

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
HUB_FILE = re.compile(rf"(?P<repo>{HUB_ID.pattern}):(?P<wanted>[\w.-][\w./-]*)")
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _File:
    """A repository's file; `size` is 0 if it is unknown."""

    commit: str
    size: int


@dataclass(frozen=True)
class _Listing:
    """The files of a repository; `offline` if they are those in the cache."""

    repo: str
    offline: bool
    files: dict[PurePosixPath, _File]


def hub_gguf(name: str, progress: ProgressReport | None) -> Path:
    """The GGUF model `owner/repo:WANTED`, downloaded; of a split model, all parts, and the path of the first.

    WANTED is a file's name or path in the repository, or the type of its weights as names have it (`Q4_K_M`).

    Raises:
        ModelError: there is no such repository or file, several files match, or the download failed.
    """
    match = HUB_FILE.fullmatch(name)
    assert match is not None
    with reporting(name, progress) as report:
        report("contacting the hub", 0, 0)
        listing = _listing(match["repo"])
        chosen = _chosen(listing, match["wanted"])
        if left := encoders(listing.files):
            _logger.warning(
                "%s: texts only; the encoder of images or sounds beside it is left out: %s",
                name,
                ", ".join(map(str, left)),
            )
        parts = _parts(listing, chosen)
        total, before, paths = sum(listing.files[part].size for part in parts), 0, []
        for part in parts:
            paths.append(_downloaded(listing, part, _counting(report, before, total)))
            before += listing.files[part].size
    return paths[0]


def _counting(report: ProgressReport, before: int, total: int) -> Callable[[int], None]:
    """Reports the bytes of one part as those of the whole model."""
    return lambda done: report("downloading", before + done, total)


def _listing(repo: str) -> _Listing:
    try:
        info = huggingface_hub.HfApi().model_info(repo, timeout=HUB_TIMEOUT_SECONDS, files_metadata=True)
    except GatedRepoError as error:
        raise _gated(repo) from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"there is no hub repository {repo!r}; check the spelling") from error
    except Exception as error:
        # The exception for an unreachable hub depends on the HTTP library.
        if not (cached := _cached(repo)):
            raise ModelError(
                f"the hub cannot be reached, and its cache has nothing of {repo!r}; check the network, or give a .gguf "
                "file"
            ) from error
        return _Listing(repo, True, cached)
    files = {PurePosixPath(each.rfilename): _File(str(info.sha), each.size or 0) for each in info.siblings or ()}
    return _Listing(repo, False, files)


def _cached(repo: str) -> dict[PurePosixPath, _File]:
    """The GGUF files in the cache, of several commits the newest there."""
    folder = Path(huggingface_hub.constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model")
    snapshots = sorted((folder / "snapshots").glob("*"), key=lambda path: path.stat().st_mtime)
    return {
        PurePosixPath(path.relative_to(snapshot).as_posix()): _File(snapshot.name, 0)
        for snapshot in snapshots
        for path in snapshot.rglob("*.gguf")
    }


def _chosen(listing: _Listing, wanted: str) -> PurePosixPath:
    models = gguf_models(listing.files)
    if wanted.lower().endswith(".gguf"):
        named = PurePosixPath(wanted)
        found = [path for path in listing.files if named in (path, PurePosixPath(path.name))]
    else:
        # As llama.cpp: the type is a word anywhere in the path, in letters of either case.
        word = re.compile(rf"(?<![^-._/]){re.escape(wanted)}(?=[-./])", re.IGNORECASE)
        found = [path for path in models if word.search(str(path))]
    if len(found) == 1:
        return found[0]
    where = f"the hub repository {listing.repo!r}" + (
        " in the hub's cache, without network," if listing.offline else ""
    )
    if found:
        names = ", ".join(map(str, found))
        raise ModelError(f"{where} has {len(found)} files for {wanted!r}: {names}; give one as {listing.repo}:NAME")
    known = ", ".join(map(str, models[:20])) + (", …" if len(models) > 20 else "")
    raise ModelError(f"{where} has no GGUF file for {wanted!r}; it has {known or 'no GGUF files'}")


def _parts(listing: _Listing, chosen: PurePosixPath) -> list[PurePosixPath]:
    """The paths of all parts of a model, in order."""
    match = PART_NAME.fullmatch(chosen.name)
    if match is None:
        return [chosen]
    names = [
        chosen.with_name(f"{match['stem']}-{number:05d}-of-{match['count']}{match['suffix']}")
        for number in range(1, int(match["count"]) + 1)
    ]
    commit = listing.files[chosen].commit
    if missing := [str(name) for name in names if name not in listing.files or listing.files[name].commit != commit]:
        raise ModelError(
            f"the hub repository {listing.repo!r} lacks {len(missing)} of the {len(names)} parts of {str(chosen)!r} "
            f"({', '.join(missing[:3])}); give another file"
        )
    return names


def _downloaded(listing: _Listing, part: PurePosixPath, report: Callable[[int], None]) -> Path:
    try:
        return Path(
            huggingface_hub.hf_hub_download(
                listing.repo,
                str(part),
                # All parts from one commit, though the repository may change.
                revision=listing.files[part].commit,
                local_files_only=listing.offline,
                etag_timeout=HUB_TIMEOUT_SECONDS,
                tqdm_class=bar_that_reports(report),
            )
        )
    except GatedRepoError as error:
        raise _gated(listing.repo) from error
    except Exception as error:
        # Broad, because huggingface_hub raises the errors of the HTTP library that its version uses.
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            raise ModelError(
                f"{str(part)!r} of {listing.repo!r} cannot be downloaded: {error.strerror}; free some space, or set "
                "HF_HOME to a folder on another disk"
            ) from error
        raise ModelError(
            f"{str(part)!r} of the hub repository {listing.repo!r} could not be downloaded: {first_line(error)}; "
            "try again"
        ) from error


def _gated(repo: str) -> ModelError:
    return ModelError(f"the hub asks for access rights to {repo!r}; run `hf auth login` first")
