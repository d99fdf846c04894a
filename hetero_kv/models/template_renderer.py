"""Renders a model's chat templates in a separate process, which `hetero_kv.models.templates` starts.

A template is a program by the model's author. Jinja's sandbox isolates it, and the limits here bound its use of the
machine. The operating system enforces processor time and memory, so that no filter, method or operator evades them.
Requests and answers are lines of JSON on standard input and output:

    {"template": …, "variables": {…}, "seconds": …, "memory": …, "longest": …} -> {"text": …}, {"limit": …} or
    {"error": …}

Without variables (null), the text is the list of those that the template reads, as JSON.

It imports nothing of this package, so that it starts quickly and exposes little.
"""

from __future__ import annotations

import contextlib
import functools
import json
import resource
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import ext, meta, nodes, parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class GenerationBlocks(ext.Extension):
    """Renders the content of `{% generation %}` blocks, which mark answers for training."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> ImmutableSandboxedEnvironment:
    """A Jinja environment like that of transformers: the same trimming of blocks, tags, filters and functions."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, ext.loopcontrols]
    )
    made.filters["tojson"] = _tojson
    made.globals["raise_exception"] = _raise
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None,
            sort_keys: bool = False) -> str:  # fmt: skip
    # Jinja's own filter escapes HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def rendered(made: ImmutableSandboxedEnvironment, request: dict[str, Any]) -> dict[str, str]:
    """The answer to a request."""
    text: list[str] = []
    length = 0
    try:
        if request["variables"] is None:
            parsed = made.parse(request["template"])
            names = meta.find_undeclared_variables(parsed) & _read_first(parsed) - made.globals.keys()
            return {"text": json.dumps(sorted(names))}
        for piece in _compiled(made, request["template"]).generate(**request["variables"]):
            text.append(piece)
            length += len(piece)
            if length > request["longest"]:
                return {"limit": f"its text is longer than {request['longest']:,} characters"}
        return {"text": "".join(text)}
    except MemoryError:
        return {"limit": f"it takes more than {request['memory'] / 1e6:,.0f} MB"}
    except Exception as error:  # a template can raise anything
        return {"error": f"{type(error).__name__}: {error}"[:500]}


@functools.lru_cache(maxsize=8)
def _compiled(made: ImmutableSandboxedEnvironment, template: str) -> jinja2.Template:
    """Compiling takes many times as long as rendering, and a process has few templates."""
    return made.from_string(template)


def _read_first(template: nodes.Template) -> set[str]:
    """The names in a template that are read before they are set.

    Jinja's own `find_undeclared_variables` also gives names that are set in a branch and read in another one.
    """
    is_read: dict[str, bool] = {}
    waiting: list[nodes.Node] = [template]
    while waiting:
        node = waiting.pop()
        if isinstance(node, nodes.Name):
            is_read.setdefault(node.name, node.ctx == "load")
        children = list(node.iter_child_nodes())
        # What is assigned is read first.
        waiting += children if isinstance(node, nodes.Assign) else reversed(children)
    return {name for name, is_first in is_read.items() if is_first}


def limit(seconds: float, room: int) -> None:
    """Limit further processor time to `seconds`, and further memory to `room` bytes.

    The system ends the process when the time is exceeded.
    """
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    for kind, most in (
        (resource.RLIMIT_CPU, int(used + seconds) + 1),
        (resource.RLIMIT_AS, _bytes_in_use() + room),
        (resource.RLIMIT_CORE, 0),
    ):
        hardest = resource.getrlimit(kind)[1]
        # Some systems cannot limit memory; the limits on time and length still apply.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (most if hardest == resource.RLIM_INFINITY else min(most, hardest), hardest))


def _bytes_in_use() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 256 << 20


def main() -> None:
    """Answer requests until standard input ends."""
    made = environment()
    for line in sys.stdin:
        request = json.loads(line)
        limit(request["seconds"], request["memory"])
        print(json.dumps(rendered(made, request)), flush=True)


if __name__ == "__main__":
    main()
