"""Shows the progress of a long prefill on standard error, so that standard output has only the answer."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from hetero_kv.chat.interrupt import Interrupt
from hetero_kv.models.progress import TimeLeft
from hetero_kv.printing import console

LONG_PROMPT_TOKENS = 512
LONG_WAIT_S = 1.0


class _Layer(ProgressColumn):
    def render(self, task: Task) -> Text:
        """The layer in progress: "layer 3/24"."""
        if not task.total:
            return Text("")
        return Text(f"layer {min(task.fields['layers_done'] + 1, task.fields['layers'])}/{task.fields['layers']}")


class _Tokens(ProgressColumn):
    def render(self, task: Task) -> Text:
        """The prompt's full length: "30,000 tokens"."""
        return Text(f"{round(task.total / task.fields['layers']):,} tokens" if task.total else "")


class _TokensPerSecond(ProgressColumn):
    def render(self, task: Task) -> Text:
        """Prompt tokens per second; a token counts in parts, one for each layer that is done."""
        elapsed = task.finished_time or task.elapsed
        if not task.total or not elapsed or not task.completed:
            return Text("")
        return Text(f"{task.completed / task.fields['layers'] / elapsed:,.0f} tokens/s", style="progress.data.speed")


class PrefillBar(Progress):
    """A bar with layer, tokens, tokens per second and time left, shown only for long waits.

    It appears for prompts of more than `LONG_PROMPT_TOKENS`, and after `LONG_WAIT_S` for any; it vanishes when stopped.
    Nothing is drawn if standard error is not a terminal.
    """

    def __init__(self, interrupt: Interrupt) -> None:
        terminal = console(stderr=True)
        self._interrupt = interrupt
        self._prompt_tokens = 0
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(),
            _Layer(),
            _Tokens(),
            _TokensPerSecond(),
            TimeLeft(),
            console=terminal,
            transient=True,
            disable=not terminal.is_terminal,
        )
        # Without a total the bar pulses, until the first chunk is done.
        self._task = self.add_task("prefill", total=None, layers=0, layers_done=0)

    def report(self, layers_done: int, layers: int, tokens_done: int, tokens: int) -> None:
        """Show the progress that `Conversation.ask` reports to `on_progress`."""
        self._prompt_tokens = tokens
        # A finished layer already counts in `layers_done`, so its tokens are not counted again.
        completed = layers_done * tokens + (tokens_done if tokens_done < tokens else 0)
        self.update(self._task, completed=completed, total=layers * tokens, layers=layers, layers_done=layers_done)

    def get_renderables(self) -> Iterable[RenderableType]:
        # Progress renders once before it has a task.
        waited = max((task.elapsed or 0 for task in self.tasks), default=0)
        if self._prompt_tokens <= LONG_PROMPT_TOKENS and waited <= LONG_WAIT_S:
            return
        if self._interrupt.requested:
            yield Text("stopping after this chunk; press Ctrl-C again to stop at once", style="yellow")
        else:
            yield self.make_tasks_table(self.tasks)
