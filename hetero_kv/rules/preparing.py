"""Compiles an injected model's kernels before its first answer: with progress, and while its weights load."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from transformers import PreTrainedModel

from hetero_kv.adapter import attention_module
from hetero_kv.adapter.kv_shape import KVShape
from hetero_kv.adapter.operator import AttentionOperator
from hetero_kv.adapter.replacement import Operator
from hetero_kv.gpu_ops.attention import compile_for_prompts
from hetero_kv.models import ProgressReport
from hetero_kv.printing import passing_line

_logger = logging.getLogger(__name__)
#: Seconds after which the log explains the wait; loading compiled kernels from the disk takes less.
_LONG = 2.0
_WHAT_TAKES_LONG = (
    "compiling kernels for this model and method before the first answer; they are stored on disk for the next time. "
    "hetero_kv.load_model(name, config=...) compiles them while it loads the model"
)


class Preparation:
    """Compiles the kernels of a model's operators once.

    Args:
        model: the model with its operators injected.
        operators: module path -> operator.

    Attributes:
        is_done: whether all are compiled.
    """

    def __init__(self, model: PreTrainedModel, operators: Mapping[str, Operator]) -> None:
        self._model, self._operators = model, operators
        self._lock = threading.Lock()
        self.is_done = False

    def compile(self, progress: ProgressReport | None = None) -> None:
        """Compile all kernels, or load them from Numba's cache. The weights must be loaded.

        A long compilation is logged once.

        Args:
            progress: called with an activity, the modules done and the total; None draws a line on standard error.
        """
        with self._lock:
            self._compile(logging.INFO, progress)

    def compile_for_first_cache(self) -> None:
        """As `compile`, for a model that was not prepared; the log warns of the time it takes.

        It does nothing while weights are on the meta device. Kernels that fail to compile here compile on first use.
        """
        if self.is_done or any(parameter.is_meta for parameter in self._model.parameters()):
            return
        with self._lock:
            try:
                self._compile(logging.WARNING)
            except Exception as error:
                _logger.warning("kernels are compiled on first use, not before the first answer: %s", error)
                self.is_done = True

    def skip(self) -> None:
        """Compile missing kernels on first use only, for rules that are injected many times."""
        self.is_done = True

    @contextmanager
    def beginning(self) -> Iterator[None]:
        """Compile attention kernels, which need no weights, in another thread while weights load in this context.

        At the context's end the thread stops after its current module. `compile` does the rest, and raises the errors.
        """
        is_over = threading.Event()
        thread = threading.Thread(target=self._begin, args=(is_over,), name="hetero_kv kernels")
        thread.start()
        try:
            yield
        except BaseException:
            is_over.set()
            raise
        finally:
            thread.join()

    def _begin(self, is_over: threading.Event) -> None:
        try:
            for step in self._attention_steps():
                if is_over.is_set():
                    return
                step()
        except Exception as error:
            _logger.debug("kernels of attention, while weights load: %s", error)

    def _attention_steps(self) -> list[Callable[[], None]]:
        model: Any = self._model
        config = attention_module.text_config(model)
        softcap = getattr(config, "attn_logit_softcapping", None) or 0.0
        steps: list[Callable[[], None]] = []
        for operator in self._operators.values():
            if isinstance(operator, AttentionOperator):
                shape = KVShape.of_attention(operator.wrapped, config)
                group = config.num_attention_heads // shape.kv_heads

                def step(operator: AttentionOperator = operator, shape: KVShape = shape, group: int = group) -> None:
                    operator.compile_kernels(shape.kv_heads, group, shape.k_dim, shape.v_dim, softcap)
                    compile_for_prompts(model.dtype, model.device, shape.k_dim, shape.v_dim, softcap > 0)

                steps.append(step)
        return steps

    def _compile(self, level: int, progress: ProgressReport | None = None) -> None:
        if self.is_done:
            return
        steps = [*self._attention_steps(), *(each.compile_own_kernels for each in self._operators.values())]
        began, has_logged = time.monotonic(), False
        with passing_line("preparing kernels") if progress is None else nullcontext(lambda _: None) as show:
            for number, step in enumerate(steps):
                show(f"preparing kernels, {number} of {len(steps)} modules; the first time they must be compiled")
                step()
                if progress is not None:
                    progress("preparing kernels", number + 1, len(steps))
                if not has_logged and time.monotonic() - began > _LONG:
                    has_logged = True
                    _logger.log(level, _WHAT_TAKES_LONG)
        self.is_done = True
