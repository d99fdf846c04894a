"""What an answer consists of, as it comes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reasoning:
    """A part of a thought."""

    text: str


@dataclass(frozen=True)
class Content:
    """A part of the text for the reader."""

    text: str


@dataclass(frozen=True)
class CallBegun:
    """A tool call begins: number `index` of the answer."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A part of a call's arguments, JSON text."""

    index: int
    text: str


Event = Reasoning | Content | CallBegun | CallArguments
