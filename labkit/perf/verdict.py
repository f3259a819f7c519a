"""What may be wrong with a stream, in one set of words: for a run in this process and for a server elsewhere.

A verdict is a list of findings, the one that matters most first. A finding names a cause, says by what evidence and
how surely, and what to do next, the step with the largest expected gain first. ``labkit.perf.diagnosis`` finds causes
from a trace and this machine's ceilings; ``labkit.diagnose`` from what can be seen of a server from outside.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Say = Callable[..., str]
"""Fills figures into a sentence by name, perhaps in another language; ``str.format`` is plain English."""


@dataclass(frozen=True)
class Cause:
    """``symptom`` is what the user notices; ``title`` says the cause in a sentence without figures."""

    name: str
    symptom: str
    title: str


CAUSES = {
    cause.name: cause
    for cause in (
        Cause("prefill-bound", "slow to start", "the wait is for reading the prompt"),
        Cause("decode-bound", "slow to stream", "the wait is between tokens"),
        Cause("queue-bound", "slow to start", "requests wait for their turn"),
        Cause("cold", "slow to start", "only the first request waits"),
        Cause("cached", "slow to start", "fast only while the prompt is in the cache"),
        Cause("client-bound", "slow to stream", "the reader is slower than the server"),
        Cause("buffered", "slow to start", "something on the way holds tokens back"),
        Cause("failed", "no answer", "no stream came that could be timed"),
        Cause("unknown", "not known", "too little was measured to say"),
        Cause("healthy", "nothing is slow", "both waits are within their targets"),
    )
}

REMEDIES = {
    "kv-cache": "a KV cache: each step recomputes the whole sequence now",
    "fewer-bits": "fewer bits a weight: the bytes are what is waited for",
    "smaller-cache": "a smaller cache (int8 keys and values, grouped or latent heads), since the context is felt",
    "more-tokens-a-step": "more tokens for each pass over the weights: a batch, or a drafter that proposes several",
    "shorter-prompt": "a shorter prompt, or one whose beginning is already cached",
    "faster-arithmetic": "a dtype that the machine multiplies faster: compare its matmul rates",
    "smaller-model": "a smaller model",
    "fused": "a backend that fuses the step: fewer, larger operations",
    "share-overhead": "more tokens a step: a batch shares the overhead",
    "idle-machine": "an idle machine: others may hold the cores",
    "same-prefix": "prompts that begin alike, so that the cache of prefixes serves them",
    "prefix-cache": "a cache of prefixes in the server, and prompts that begin alike",
    "more-slots": "more sequences at once, or a second replica: nobody then waits for somebody else's answer",
    "admit-less": "fewer requests at once from here: what waits in the client is not charged to the server",
    "keep-warm": "a request at start-up, and no unloading when idle: the first user then waits like any other",
    "measure-fresh": "a benchmark with prompts that nobody sent before: repeated ones measure the cache",
    "unbuffer": "no buffering between the server and the reader (nginx: proxy_buffering off, or the header "
    "X-Accel-Buffering: no)",
    "faster-reader": "a reader that takes tokens as they come: less work for each event, or another thread for it",
    "record": "a recording with times: labkit diagnose URL --save, or curl -N --trace-ascii - --trace-time",
    "look-at-log": "the server's own log, which has the reason for the failure",
    "nothing": "nothing: what is left to gain costs more than it gives",
}
"""What may help, each in words that fit behind "What would move it:". Every diagnosis takes its advice from here."""


@dataclass(frozen=True)
class NextStep:
    """One thing to do. ``gain``: how many times shorter the wait in question would be; None when nobody can say."""

    remedy: str
    how: str = ""
    """The switch that does it, where it is known: "weights='int8'"."""
    gain: float | None = None

    @property
    def text(self) -> str:
        return self.said()

    def said(self, say: Say = str.format) -> str:
        """The step in a sentence: what, by which switch, why, and what it gains."""
        words, why = re.split("(?=[:：])|$", say(REMEDIES[self.remedy]), maxsplit=1)
        how = f" ({self.how})" if self.how else ""
        gain = say(" [about {gain:.1f} times]", gain=self.gain) if self.gain is not None and self.gain >= 1.05 else ""
        return say("{step}.", step=f"{words}{how}{why}{gain}")


@dataclass(frozen=True)
class Finding:
    """One cause, with its evidence. ``confidence`` is between 0 and 1; ``next_steps`` the largest gain first."""

    cause: str
    evidence: tuple[str, ...] = ()
    next_steps: tuple[NextStep, ...] = ()
    confidence: float = 1.0

    @property
    def symptom(self) -> str:
        return CAUSES[self.cause].symptom

    @property
    def title(self) -> str:
        """The finding in one line."""
        return f"{self.why()} ({self.cause})"

    def why(self, say: Say = str.format) -> str:
        """The cause in words."""
        return say(CAUSES[self.cause].title)

    def headline(self, say: Say = str.format) -> str:
        """What the user notices, why, and how sure that is."""
        symptom = say(self.symptom).capitalize()
        head = say("{symptom}: {why} ({cause}).", symptom=symptom, why=self.why(say), cause=self.cause)
        return head if self.confidence >= 1 else head + say(" [{share:.0%} sure]", share=self.confidence)

    @property
    def remedies(self) -> tuple[str, ...]:
        return tuple(step.text for step in self.next_steps)

    def __str__(self) -> str:
        lines = [self.headline(), *(f"  - {line}" for line in self.evidence)]
        return "\n".join([*lines, "What would move it:", *(f"  - {line}" for line in self.remedies)])

    def to_dict(self) -> dict[str, Any]:
        return {
            "cause": self.cause,
            "symptom": self.symptom,
            "title": self.title,
            "confidence": round(self.confidence, 2),
            "evidence": list(self.evidence),
            "next_steps": [{"step": step.text, "gain": step.gain} for step in self.next_steps],
        }


def ranked(steps: list[NextStep]) -> tuple[NextStep, ...]:
    """The largest expected gain first; what nobody can put a figure to comes last, in the order given."""
    return tuple(sorted(steps, key=lambda step: -(step.gain or 0.0)))
