"""Constraints of an answer: a JSON object, a value of a JSON schema, or a text of a grammar."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

from hetero_kv.errors import shown
from hetero_kv.server.errors import ApiError
from hetero_kv.server.served import ServedModel
from hetero_kv.serving.grammar import GrammarMask


class Constrained(Protocol):
    """A request that may constrain its answer."""

    response_format: dict[str, Any] | None
    json_schema: Any
    grammar: str | None


def masks_of(
    served: ServedModel, body: Constrained, count: int, prompt: Sequence[int] = ()
) -> list[GrammarMask | None]:
    """A mask for each of `count` answers, None without a constraint.

    A thought that the prompt opens is free; what follows it is constrained.

    Raises ApiError 400 for two constraints, or an unknown one, and ConfigError for one that cannot be compiled.
    """
    constraint = constraint_of(body)
    if constraint is None:
        return [None] * count
    kind, value = constraint
    grammars, thinks = served.grammars, served.form.opens_thought(prompt)
    if thinks and kind in ("grammar", "regex"):
        raise ApiError(
            400, f"the model begins with a thought, which the {kind} does not allow; ask with enable_thinking: false"
        )
    schema = {"type": "object"} if kind == "object" else value
    make = {
        "grammar": lambda: grammars.lark(value),
        "regex": lambda: grammars.regex(value),
        "behind a thought": lambda: grammars.lark(served.form.value_grammar(prompt, schema)),
    }.get("behind a thought" if thinks else kind, lambda: grammars.schema(schema))
    return [make() for _ in range(count)]


def constraint_of(body: Constrained) -> tuple[str, Any] | None:
    """The kind of constraint of a request, and its value. Raises as `masks_of`."""
    given: list[tuple[str, Any]] = []
    if body.json_schema is not None:
        given.append(("schema", _schema(body.json_schema, "json_schema")))
    if body.grammar:
        given.append(("grammar", body.grammar))
    form: Any = body.response_format or {}
    if not isinstance(form, dict):
        raise ApiError(400, f"the format is {shown(form, 80)}; give an object with a type", param="response_format")
    match form.get("type", "text"):
        case "text":
            pass
        case "json_object":
            given.append(("object", None) if "schema" not in form else ("schema", _schema(form["schema"], "schema")))
        case "json_schema":
            inner = form.get("json_schema", form)
            named = inner.get("schema") if isinstance(inner, dict) else None
            given.append(("schema", _schema(named, "response_format.json_schema.schema")))
        case "regex" | "grammar" as kind if isinstance(form.get(kind), str):
            given.append((kind, form[kind]))
        case other:
            raise ApiError(
                400, f"response_format has the type {other!r}; give text, json_object, json_schema, grammar or regex",
                param="response_format",
            )  # fmt: skip
    if len(given) > 1:
        raise ApiError(400, "json_schema, grammar and response_format constrain one answer; give one of them")
    return given[0] if given else None


def _schema(schema: Any, field: str) -> Any:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"{field} is no JSON: {error}", param=field) from None
    if not isinstance(schema, dict | bool):
        raise ApiError(400, f"{field} is missing or no JSON schema; give an object", param=field)
    return schema
