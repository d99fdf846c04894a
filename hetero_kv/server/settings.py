"""The server's settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hetero_kv.contexts.settings import ContextSettings
from hetero_kv.serving.speculation.ways import Way
from hetero_kv.settings.setting import Settings, setting


@dataclass(frozen=True)
class ServerSettings(Settings):
    """The server's address and limits."""

    host: str = setting("127.0.0.1", "address to listen at; one that other machines reach needs --api_key")
    port: int = setting(8080, "port to listen at; 0: any free one", minimum=0, maximum=65535)
    max_batch: int = setting(8, "requests that are answered at a time; others wait", minimum=1)
    queue_length: int = setting(64, "requests that may wait; further ones get status 429", minimum=0)
    queue_s: float = setting(600.0, "the longest wait of a request in the queue", unit="seconds", minimum=0)
    longest_gap_s: float = setting(
        0.25,
        "target for the time between two tokens of an answer while another prompt passes",
        unit="seconds",
        minimum=0.001,
    )
    kept_prefixes: int = setting(
        16,
        "sequences of ended requests that stay in memory, where there is room, for prompts that begin alike",
        minimum=0,
    )
    speculation: Way | str = setting(
        "auto",
        "how the next tokens are guessed, several of which are then verified at a time: lookup: what followed the same "
        "words earlier; sparse: by the model itself, with attention to few blocks; the name or path of a draft model: "
        "by that small model of the same vocabulary; auto: lookup where the rules allow it; off: one token at a time; "
        "the answers are the same",
    )
    requests_per_minute: int | Literal["all"] = setting(
        "all", "requests of one API key in a minute; all: no limit", minimum=1
    )
    tokens_per_minute: int | Literal["all"] = setting(
        "all", "tokens of one API key in a minute, prompts and answers; all: no limit", minimum=1
    )
    contexts_per_key: int | Literal["all"] = setting(
        "all",
        "stored contexts of one API key and model; its least recently used ones are removed; all: no limit",
        minimum=1,
    )
    share_prefixes: bool = setting(
        False,
        "API keys share known prefixes of prompts, in memory and on the disk; otherwise each has its own",
        formerly=("share_beginnings",),
    )
    body_mb: float = setting(64.0, "the largest body of a request, MB", minimum=0.001)
    read_s: float = setting(60.0, "the longest time in which a client sends its request", unit="seconds", minimum=0.1)
    write_s: float = setting(
        60.0, "the longest time in which a client takes a piece of an answer", unit="seconds", minimum=0.1
    )
    ping_s: float = setting(
        5.0, "time between two signs of life in a stream without tokens", unit="seconds", minimum=0.1
    )
    stuck_s: float = setting(
        120.0, "time without a step after which /health says that the engine is stuck", unit="seconds", minimum=1
    )
    shutdown_s: float = setting(30.0, "time that answers get to end when the server stops", unit="seconds", minimum=0)
    file_folder: str = setting(
        "auto", "folder of uploaded documents; auto: files in HETERO_KV_HOME, or in ~/.cache/hetero_kv"
    )
    file_gb: float = setting(1.0, "GB that the texts of all uploaded documents may take", minimum=0)
    kept_responses: int = setting(1000, "responses that previous_response_id finds; the oldest go first", minimum=0)
    insecure: bool = setting(False, "listen at an address that other machines reach without an API key")
    log_prompts: bool = setting(False, "write prompts and answers to the log")


@dataclass(frozen=True)
class ServedContextSettings(ContextSettings):
    """Saved contexts, and whether the server uses them."""

    context_cache: Literal["off", "on"] = setting(
        "on", "on: the sequences of ended requests go to the folder, and later prompts find them, also after a restart"
    )
    context_cache_gb: float | Literal["all"] = setting(
        20.0, "GB that all contexts may take; the least recently used are removed first; all: no limit", minimum=0
    )
