"""Prompts of five kinds and one length for the fidelity task, a file each: essays, code, licences, JSON and dialogue.

    python -m benchmarks.fidelity_texts --haystack $ESSAYS --out DIRECTORY [--length 4096] [--samples 20] [--seed 0]

Essays are passages of the haystack; code is modules of Python's standard library; licences are those of the installed
packages; JSON is the metadata of these packages; a dialogue asks for functions of the standard library, one after the
other, and answers with their documentation. The question at each text's end requires the model to look back at it.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import random
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from hetero_kv.evals.haystack import Haystack
from hetero_kv.evals.tasks.fitting import fit
from hetero_kv.models import DEFAULT_MODEL, open_model

_MODULES = (
    "argparse", "bisect", "calendar", "collections", "configparser", "copy", "csv", "datetime", "decimal", "difflib",
    "email.message", "fnmatch", "fractions", "ftplib", "functools", "getopt", "glob", "gzip", "heapq", "html",
    "http.client", "imaplib", "inspect", "io", "ipaddress", "itertools", "json", "locale", "logging", "mailbox",
    "math", "mimetypes", "os", "os.path", "pathlib", "pickle", "pkgutil", "plistlib", "pprint", "queue", "random",
    "re", "sched", "shelve", "shlex", "shutil", "smtplib", "socket", "sqlite3", "statistics", "string", "subprocess",
    "tarfile", "tempfile", "textwrap", "threading", "timeit", "tokenize", "traceback", "types", "unicodedata",
    "unittest", "urllib.parse", "urllib.request", "uuid", "warnings", "weakref", "xml.dom.minidom", "zipfile",
)  # fmt: skip
#: Limits on a docstring's length: shorter ones are empty of content, longer ones are chapters.
_ANSWER_CHARACTERS = range(120, 1200)


def _windows(texts: list[str], rng: random.Random) -> Callable[[int], str]:
    """Yields consecutive texts of the requested number of lines, beginning at a random line."""
    lines = "\n".join(rng.sample(texts, len(texts))).splitlines()
    start = rng.randrange(len(lines))
    return lambda count: "\n".join((lines[start:] + lines[:start])[:count])


def essays(rng: random.Random, haystack: Haystack) -> Callable[[int], str]:
    """A passage, then its gist in its own words."""
    words = haystack.text.split()
    start = rng.randrange(len(words) // 2)
    return lambda count: (
        f"{' '.join(words[start : start + count])}\n\nWhat does the author argue? Quote the sentences that say so."
    )


def code(rng: random.Random, haystack: Haystack) -> Callable[[int], str]:
    """Modules, then a list of their definitions."""
    sources = [path.read_text() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))]
    window = _windows(sources, rng)
    return lambda count: (
        f"```python\n{window(count)}\n```\n\nList the functions and classes of this code, with what each is for."
    )


def licences(rng: random.Random, haystack: Haystack) -> Callable[[int], str]:
    """Licences, then the conditions that they set."""
    texts = {text for _, text in _licences()}
    window = _windows(sorted(texts), rng)
    return lambda count: (
        f"{window(count)}\n\nList the conditions above under which copies may be passed on, word by word."
    )


def _licences() -> Iterator[tuple[str, str]]:
    for distribution in metadata.distributions():
        for file in distribution.files or ():
            if file.name.upper().startswith(("LICENSE", "LICENCE", "COPYING", "NOTICE")):
                path = Path(str(distribution.locate_file(file)))
                if path.is_file():
                    yield file.name, path.read_text(errors="replace")


def objects(rng: random.Random, haystack: Haystack) -> Callable[[int], str]:
    """An array of packages' metadata, then a table of it."""
    found = [_described(distribution) for distribution in metadata.distributions()]
    rng.shuffle(found)
    lines = ",\n".join(json.dumps(each, indent=1) for each in found).splitlines()
    return lambda count: "\n".join(
        ("[", *lines[:count], "]", "", "Write a table of these packages: name, version, summary.")
    )


def _described(distribution: metadata.Distribution) -> dict[str, Any]:
    names = ("name", "version", "summary", "author", "license_expression", "requires_python", "requires_dist")
    fields = distribution.metadata.json
    return {name: fields[name] for name in names if name in fields}


def dialogue(rng: random.Random, haystack: Haystack) -> Callable[[int], str]:
    """Questions and answers about functions, then one of the questions again."""
    documented = [*_documented()]
    rng.shuffle(documented)

    def build(count: int) -> str:
        turns = "\n\n".join(f"User: What does {name} do?\n\nAssistant: {text}" for name, text in documented[:count])
        return f"{turns}\n\nUser: Tell me again, word by word: what does {documented[count // 3][0]} do?"

    return build


def _documented() -> Iterator[tuple[str, str]]:
    for module in map(importlib.import_module, _MODULES):
        for name, member in sorted(vars(module).items()):
            own = getattr(member, "__module__", None) == module.__name__ and not name.startswith("_")
            text = inspect.getdoc(member) if own and callable(member) else None
            if text and len(text) in _ANSWER_CHARACTERS:
                yield f"{module.__name__}.{name}", text


KINDS = {"essays": essays, "code": code, "licences": licences, "json": objects, "dialogue": dialogue}


def write_texts(
    out: Path,
    essays_file: Path,
    tokenizer: Any,
    length: int,
    samples: int,
    kinds: Sequence[str] = tuple(KINDS),
    seed: int = 0,
) -> None:
    """Write the files `KIND-NN.txt` into the folder `out`, each of about `length` tokens."""
    haystack = Haystack.from_file(essays_file)
    out.mkdir(parents=True, exist_ok=True)
    for kind in kinds:
        for number in range(samples):
            build = KINDS[kind](random.Random(f"{kind}/{number}/{seed}"), haystack)
            found = fit(build, lambda text: len(tokenizer(text)["input_ids"]), length, kind)
            (out / f"{kind}-{number:02}.txt").write_text(found.text)


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--haystack", type=Path, required=True, help="essays: text, or JSON with a 'text' field")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="whose tokens are counted")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a text, the question included")
    parser.add_argument("--samples", type=int, default=20, help="of each kind")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    kinds, tokenizer = flags.kinds.split(","), open_model(flags.model).tokenizer
    write_texts(flags.out, flags.haystack, tokenizer, flags.length, flags.samples, kinds, flags.seed)


if __name__ == "__main__":
    main()
