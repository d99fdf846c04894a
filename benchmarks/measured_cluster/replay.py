"""Sends a trace to a server, and says what came of it."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from benchmarks.http_clients import TimedAnswer, ask, ask_all
from benchmarks.http_serving import document
from benchmarks.measured_cluster.trace import Conversation

ANSWER = 16
"""Tokens of an answer."""
_QUESTIONS = ("Which word comes first?", "Which word comes most often?", "Which words are left out?")


@dataclass(frozen=True)
class Outcome:
    """What came of a trace.

    Attributes:
        answers: of all questions, with what was sent: (document, the question's number, answer).
        lengths: document -> its tokens.
        seconds: until the last answer.
        loads: CPU seconds of each replica.
    """

    answers: Sequence[tuple[int, int, TimedAnswer]]
    lengths: dict[int, int]
    seconds: float
    loads: Sequence[float]

    def row(self, name: str) -> list[str]:
        """The figures, as `COLUMNS` has them."""
        answers = [answer for _, _, answer in self.answers]
        cached, tokens = (sum(getattr(each, name) for each in answers) for name in ("cached_tokens", "prompt_tokens"))
        firsts = sorted(each.first_s for each in answers)
        computed = sum(answer.cached_tokens < self.lengths[number] / 2 for number, _, answer in self.answers)
        return [
            name,
            f"{100 * cached / tokens:.1f} %",
            f"{statistics.median(firsts):.2f} s",
            f"{statistics.quantiles(firsts, n=100, method='inclusive')[98]:.2f} s",
            f"{max(self.loads) / statistics.mean(self.loads):.2f}",
            f"{computed / len(self.lengths):.2f}",
            f"{self.seconds:.0f} s",
        ]


COLUMNS = (
    "router", "tokens from memory or store", "first token, median", "99th percentile", "largest load / mean",
    "prefills per document", "whole trace",
)  # fmt: skip


def replayed(address: str, replicas: Sequence[psutil.Process], trace: Sequence[Conversation]) -> Outcome:
    """Send the trace, each conversation in a thread of its own."""
    # Kernels are compiled, and both replicas have measured their speed, before the clock runs.
    for turn in range(2):
        ask_all(address, [document(200, -10 * turn - number) for number in range(1, 5)], ANSWER)
    time.sleep(1.5)
    before = [_cpu_s(each) for each in replicas]
    answers: list[tuple[int, int, TimedAnswer]] = []
    failures: list[Exception] = []
    began = time.perf_counter()

    def converse(conversation: Conversation) -> None:
        prompt = document(conversation.tokens, conversation.document)
        for number, pause_s in enumerate((0.0, *conversation.pauses_s)):
            time.sleep(pause_s)
            prompt += f"\n\n{_QUESTIONS[number]}\n"
            try:
                answer = ask(address, prompt, ANSWER)
            except Exception as error:
                failures.append(error)
                return
            answers.append((conversation.document, number, answer))
            prompt += answer.text

    threads = []
    for each in trace:
        time.sleep(max(0.0, began + each.at_s - time.perf_counter()))
        threads.append(threading.Thread(target=converse, args=(each,)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    seconds = time.perf_counter() - began
    loads = [_cpu_s(each) - start for each, start in zip(replicas, before, strict=True)]
    return Outcome(answers, {each.document: each.tokens for each in trace}, seconds, loads)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
