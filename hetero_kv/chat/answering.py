"""Sends one question to the conversation, with a progress bar before the answer and Ctrl-C at any time."""

from __future__ import annotations

from collections.abc import Callable

from hetero_kv.chat.answer import ChatAnswer
from hetero_kv.chat.interrupt import Interrupt
from hetero_kv.chat.prefill_bar import PrefillBar
from hetero_kv.chat.question import ChatQuestion
from hetero_kv.chat.session import ChatSession


def answer_to(
    session: ChatSession,
    question: ChatQuestion,
    on_text: Callable[[str], None] | None = None,
    on_thought: Callable[[str], None] | None = None,
    on_token: Callable[[int], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> ChatAnswer:
    """The answer to `question`; its pieces go to `on_text` and `on_thought` (`Conversation.ask`) as they come.

    The number of tokens goes to `on_token`.

    Ctrl-C, or `should_stop`, ends it at the next chunk or token with finish_reason "stopped".

    Raises:
        HeteroKVError: the question cannot be answered.
        KeyboardInterrupt: a second Ctrl-C. The conversation is unchanged.
    """
    interrupt = Interrupt()
    settings = session.options.answer
    with interrupt.catching(), PrefillBar(interrupt) as bar:

        def after_bar(show: Callable[[str], None] | None) -> Callable[[str], None]:
            def write(piece: str) -> None:
                bar.stop()
                if show is not None:
                    show(piece)

            return write

        document, prompt = question.document, question.prompt
        return session.conversation.ask(
            question.text if prompt is None else prompt,
            document=None if prompt is None else document,
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            min_p=settings.min_p,
            repetition_penalty=settings.repetition_penalty,
            presence_penalty=settings.presence_penalty,
            frequency_penalty=settings.frequency_penalty,
            stop=session.options.stop,
            seed=settings.fixed_seed,
            on_text=after_bar(on_text),
            on_thought=None if on_thought is None else after_bar(on_thought),
            on_token=on_token,
            on_progress=bar.report,
            should_stop=lambda: interrupt.requested or (should_stop is not None and should_stop()),
        )
