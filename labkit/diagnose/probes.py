"""What is sent to a server to learn where its time goes, said before it is sent, and never more than agreed.

first     the first request: what a cold server takes longer
length    fresh prompts of several lengths, one at a time: TTFT's slope is prefill, its intercept is all the rest;
          the same answers show how the time between tokens grows with the context
stream    one long answer: its pace, and whether tokens come in bursts
one       the same with one token: a buffer on the way would let it through sooner
repeat    one prompt again and again: what the server's cache saves
load      several fresh prompts at once: what waiting costs
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from labkit.diagnose.dialects import Ask
from labkit.diagnose.recording import Recording
from labkit.diagnose.stream import Stream, read_stream
from labkit.registry import check_options, option

Progress = Callable[[float, str], None]
ENDING = "Tell a very long story in which all of these words occur."
WORDS = (
    "time year people way day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work number night point home water room "
    "mother area money story fact month lot right study book eye job word business issue side kind head house "
    "service friend father power hour game line end member law car city name team minute idea body back parent "
    "face level office door health person art war history party result change morning reason research girl guy "
    "moment air teacher force education"
)
VOCABULARY = tuple(WORDS.split(" "))
"""Common English words: about a token each in every vocabulary."""


@dataclass(frozen=True)
class Workload:
    """What the answer is about: one user's prompt and answer, and how many users at once."""

    n_prompt_tokens: int = option(256, low=16, high=200_000, help="tokens of a prompt")
    n_new_tokens: int = option(128, low=2, high=10_000, help="tokens of an answer")
    concurrency: int = option(4, low=1, high=64, help="requests at once")

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class Budget:
    """How much is sent. Lengths are multiples of the workload's."""

    name: str
    lengths: tuple[float, ...]
    n_rounds: int
    n_new: int
    n_stream: int
    levels: tuple[float, ...]
    max_s: float


BUDGETS = {
    budget.name: budget
    for budget in (
        Budget("small", (0.25, 1.0, 2.0), 2, 12, 64, (1.0,), 90.0),
        Budget("normal", (0.25, 1.0, 4.0), 3, 16, 96, (0.5, 1.0, 2.0), 240.0),
        Budget("thorough", (0.25, 0.5, 1.0, 2.0, 4.0, 8.0), 5, 32, 192, (0.5, 1.0, 2.0, 4.0), 900.0),
    )
}


class Target(Protocol):
    """What can be asked: a ``Client``, or the mock on a clock of its own."""

    def record_all(self, asks: Sequence[Ask]) -> list[Recording]: ...


@dataclass(frozen=True)
class Wave:
    """Requests that go out together."""

    probe: str
    asks: tuple[Ask, ...]

    @property
    def n_prompt(self) -> int:
        return sum(ask.meta["n_words"] for ask in self.asks)

    @property
    def n_new(self) -> int:
        return sum(ask.max_new_tokens for ask in self.asks)


@dataclass(frozen=True)
class Plan:
    """Everything that would be sent, known before anything is."""

    workload: Workload
    budget: Budget
    waves: tuple[Wave, ...]

    @property
    def n_requests(self) -> int:
        return sum(len(wave.asks) for wave in self.waves)

    def describe(self, url: str) -> str:
        """The load, in one sentence."""
        n_prompt, n_new = sum(w.n_prompt for w in self.waves), sum(w.n_new for w in self.waves)
        at_once = max(len(wave.asks) for wave in self.waves)
        return (
            f"At most {self.n_requests} requests to {url} and to nothing else: about {n_prompt:,} prompt tokens and "
            f"{n_new:,} answer tokens, at most {at_once} at once, no new one after {self.budget.max_s:.0f} s."
        )


def find_budget(name: str) -> Budget:
    """Raises ValueError that lists the choices."""
    if name not in BUDGETS:
        raise ValueError(f"unknown budget {name!r}: choose one of {', '.join(BUDGETS)}.")
    return BUDGETS[name]


def plan(workload: Workload | None = None, *, budget: str = "normal", seed: int | None = None) -> Plan:
    """The probes for a workload. ``seed`` None makes prompts that no cache has seen; a number makes them again."""
    workload, found = workload or Workload(), find_budget(budget)
    words = random.Random(seed)
    n = workload.n_prompt_tokens

    def ask(probe: str, n_words: int, n_new: int, prompt: str | None = None, **meta: Any) -> Ask:
        text = prompt or fresh_prompt(n_words, words)
        return Ask(text, n_new, meta={"probe": probe, "n_words": n_words, **meta})

    waves = [Wave("first", (ask("first", n, found.n_new),))]
    lengths = [max(16, round(n * share)) for share in found.lengths] * found.n_rounds
    words.shuffle(lengths)  # so that a drift of the server does not look like a length
    waves += [Wave("length", (ask("length", each, found.n_new),)) for each in lengths]
    waves.append(Wave("stream", (ask("stream", n, found.n_stream),)))
    waves += [Wave("one", (ask("one", n, 1),)) for _ in range(2)]
    longest = max(16, round(n * max(found.lengths)))
    same = fresh_prompt(longest, words)
    waves += [Wave("repeat", (ask("repeat", longest, found.n_new, same, nth=nth),)) for nth in range(3)]
    for level in sorted({max(2, round(workload.concurrency * share)) for share in found.levels}):
        if workload.concurrency > 1:
            asks = tuple(ask("load", n, 2 * found.n_new, concurrency=level) for _ in range(level))
            waves.append(Wave("load", asks))
    return Plan(workload, found, tuple(waves))


def fresh_prompt(n_words: int, random_: random.Random) -> str:
    """A prompt of so many words whose beginning is new, so that no cache of prefixes knows it.

    >>> len(fresh_prompt(40, random.Random(0)).split())
    40
    """
    ending = ENDING.split()
    body = [f"{random_.getrandbits(48):x}", *random_.choices(VOCABULARY, k=max(0, n_words - len(ending) - 1))]
    return " ".join([*body, *ending][:n_words] if n_words < len(body) + len(ending) else [*body, *ending])


@dataclass
class Run:
    """What came of a plan."""

    streams: list[Stream] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    spent_s: float = 0.0

    def of(self, probe: str, **meta: Any) -> list[Stream]:
        """The streams of one probe that bore a token."""
        wanted = {"probe": probe, **meta}
        return [s for s in self.streams if s.tokens and wanted.items() <= s.recording.meta.items()]


def carry_out(
    target: Target, plan: Plan, *, progress: Progress | None = None, should_stop: Callable[[], bool] = lambda: False
) -> Run:
    """Send the waves one after the other, within the budget's time; what is left out is named in the notes.

    Ends early when the server sends nothing usable three times running, or says that it is asked too much (429).
    """
    run, failures, skipped = Run(), 0, []
    for at, wave in enumerate(plan.waves):
        if should_stop():
            run.notes.append("Stopped by you: the verdict is about what had been measured.")
            break
        if run.spent_s + _expected_s(run, wave) > plan.budget.max_s:
            skipped.append(wave)
            continue
        if progress:
            progress(at / len(plan.waves), f"{wave.probe}: {len(wave.asks)} x {wave.asks[0].meta['n_words']:,} words")
        recordings = target.record_all(wave.asks)
        streams = [read_stream(recording) for recording in recordings]
        run.streams += streams
        run.spent_s += max((recording.end_s for recording in recordings), default=0.0)
        failures = 0 if any(stream.tokens for stream in streams) else failures + 1
        if any(recording.status == 429 for recording in recordings):
            run.notes.append("The server said that it is asked too much (429): the rest was not sent.")
            break
        if failures >= 3 or (failures and at == 0):
            run.notes.append("No token came: the rest was not sent.")
            break
    if skipped:
        names = ", ".join(sorted({wave.probe for wave in skipped}))
        run.notes.append(
            f"{len(skipped)} of {len(plan.waves)} waves ({names}) were left out: they would have gone beyond the "
            f"{plan.budget.max_s:.0f} s of the budget {plan.budget.name!r}."
        )
    return run


def _expected_s(run: Run, wave: Wave) -> float:
    """What a wave should take by what was seen: prompts one after the other, answers at the pace of one."""
    seen = [s for s in run.streams if s.ttft_s is not None and s.recording.meta.get("probe") not in ("first", "load")]
    if not seen:
        return 0.0
    a_word_s = max((s.ttft_s or 0.0) / max(1, s.recording.meta["n_words"]) for s in seen[-3:])
    a_token_s = max((s.tpot_s or 0.0) for s in seen[-3:])
    return a_word_s * wave.n_prompt + a_token_s * max(ask.max_new_tokens for ask in wave.asks)
