"""Opens a model's speculation; loads a draft model and plans memory for it next to the model's."""

from __future__ import annotations

import gc
import logging
from typing import Any

from hetero_kv.engine.reservations import PLANNING, reserved_by_others
from hetero_kv.engine.store import Store
from hetero_kv.errors import ConfigError, OutOfMemoryError
from hetero_kv.loading import load_model
from hetero_kv.models import LoadedModel, ModelError
from hetero_kv.planning.common_plan import CommonPlan
from hetero_kv.rules.injection import Injection
from hetero_kv.serving.forward import ModelForward
from hetero_kv.serving.speculation.draft_model import DraftModel
from hetero_kv.serving.speculation.speculation import Speculation, tell_off
from hetero_kv.serving.speculation.vocabularies import difference
from hetero_kv.serving.speculation.ways import WAYS, require_way_or_model

_logger = logging.getLogger(__name__)
#: A way, the name or path of a draft model, or one that is loaded.
Guessing = str | LoadedModel | DraftModel
#: The rules of draft models: full attention.
_RULES = "dense"
# Settings that are the process's, not a model's.
_SHARED_SETTINGS = ("threads_num", "dram_budget_gb", "packed_cache_gb")
# The largest part of the free memory for a draft model's keys and values.
_MOST_SHARE = 0.5


def open_speculation(
    forward: ModelForward, tokenizer: Any, guessing: Guessing, *, max_seq_len: int | None = None, sequences: int = 1,
    longest_gap_s: float = 0.25,
) -> Speculation:  # fmt: skip
    """Speculation for a model, before its own keys and values are planned.

    If the model cannot verify guesses, or the draft model cannot drop tokens, it is off, and the log says why.

    Args:
        forward: the model's.
        tokenizer: the model's.
        guessing: a way, a draft model's name or path, or a draft model.
        max_seq_len: capacity of each sequence of the model, tokens; None for its rules' setting.
        sequences: how many there are at a time.
        longest_gap_s: a target for the time between two tokens of a sequence, seconds.

    Raises:
        ConfigError: there is no such way and no such model, or the draft model has another vocabulary.
        HeteroKVError: the draft model cannot be loaded, or has no memory.
    """
    if isinstance(guessing, DraftModel):
        return Speculation(forward, guessing.name, guessing)
    if isinstance(guessing, str) and require_way_or_model(guessing) in WAYS:
        speculation = Speculation(forward, guessing)
        if speculation.in_effect() == "sparse":
            forward.model.hetero_kv_injection.sparse_drafts = True
        return speculation
    reason = forward.why_no_drafts
    if reason is None:
        loaded = guessing if isinstance(guessing, LoadedModel) else load_draft(guessing, forward.model)
        require_drafts_for(loaded, tokenizer)
        reason = ModelForward(loaded.model).why_no_drafts
        if reason is None:
            store = _store(loaded, forward.model.hetero_kv_injection, max_seq_len, sequences)
            vocab_size = forward.model.config.get_text_config(decoder=True).vocab_size
            return Speculation(forward, loaded.name, DraftModel(loaded, store, vocab_size, longest_gap_s))
        reason = f"the draft model {loaded.name}: {reason}"
    tell_off(reason, is_chosen=True)
    return Speculation(forward, "off")


def load_draft(name_or_path: str, model: Any) -> LoadedModel:
    """Load a draft model with rules of its own, on the device and with the threads of a model that has rules.

    Raises ConfigError if there is no such model, and the errors of `load_model`.
    """
    engine = model.hetero_kv_injection.engine
    settings = {name: getattr(engine, name) for name in _SHARED_SETTINGS}
    try:
        return load_model(name_or_path, config=_RULES, device=str(model.device), **settings)
    except ModelError as error:
        raise ConfigError(f"speculation is {name_or_path!r}, a draft model that cannot be loaded: {error}") from error


def require_drafts_for(draft: LoadedModel, tokenizer: Any) -> None:
    """Raise ConfigError unless a loaded draft model has rules, a name, and the tokens of a model's tokenizer."""
    if not hasattr(draft.model, "hetero_kv_injection"):
        raise ConfigError(
            f"the draft model {draft.name} has no rules injected; load it by hetero_kv.load_model(name, "
            f"config={_RULES!r})"
        )
    if draft.name in WAYS:
        raise ConfigError(f"the draft model is called {draft.name!r}, which is a way to guess; rename its file")
    if (found := difference(tokenizer, draft.tokenizer)) is not None:
        raise ConfigError(
            f"the draft model {draft.name} has other tokens: {found}; give a model of the same family, or `lookup`"
        )


def _store(draft: LoadedModel, main: Injection, max_seq_len: int | None, sequences: int) -> Store:
    """The store of a draft model's caches: its share of the free memory, by what a token of both models takes."""
    injection: Injection = draft.model.hetero_kv_injection
    requested = main.engine.max_seq_len if max_seq_len is None else max_seq_len
    longest = min(main.context_length if isinstance(requested, str) else requested, injection.context_length)
    own, mains = injection.bytes_per_token(), main.bytes_per_token()
    # A model without a growing cache needs its part, too.
    share = min(_MOST_SHARE, own / max(1.0, own + mains))
    with PLANNING:
        # Unreferenced caches may wait for the cycle collector.
        gc.collect()
        fitting = CommonPlan.of(injection, sequences, reserved=reserved_by_others(None)).share(share).largest()
        capacity = min(longest, max(1, fitting))
        try:
            store = injection.common_store(capacity, sequences, share=share)
        except OutOfMemoryError as error:
            raise OutOfMemoryError(f"the keys and values of the draft model {draft.name}: {error}") from error
    if isinstance(requested, int) and capacity < requested:
        _logger.warning(
            "the draft model %s takes %d tokens of a sequence; later tokens are answered without guesses",
            draft.name,
            capacity,
        )
    return store
