"""Lesson 13: five servers whose fault is sealed, what their probes show, and what would really have helped each.

They are simulated, on a clock of their own, by ``labkit.diagnose.quirks``: so the truth is known, and "what would
help" is not an opinion but the same server with one thing changed, probed again.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from labkit.diagnose import Targets, Workload, page, probe_target
from labkit.diagnose.dialects import Ask
from labkit.diagnose.measured import fit, n_prompt
from labkit.diagnose.probes import fresh_prompt
from labkit.diagnose.quirks import Quirks
from labkit.diagnose.report import Report
from labkit.diagnose.simulated import SimulatedServer
from labkit.diagnose.stream import Stream, read_stream
from labkit.perf.verdict import CAUSES
from labkit.ui.controls import choice
from labkit.ui.exercise import Exercise
from labkit.ui.experiment import Experiment, Result
from labkit.ui.quiz import Item, Quiz

WORKLOAD, TARGETS = Workload(256, 128, 4), Targets(0.45, 0.04)
FAULTS: dict[str, dict[str, Any]] = {
    "prefill-bound": {"prefill_tok_s": 180.0},
    "queue-bound": {"n_slots": 1, "decode_s": 0.028, "prefill_tok_s": 9000.0},
    "buffered": {"buffer_bytes": 8192, "prefill_tok_s": 6000.0},
    "cached": {"prefill_tok_s": 150.0, "prefix_cache": True},
    "decode-bound": {"decode_s": 0.11, "context_s": 0.03, "prefill_tok_s": 20_000.0},
}
LOOKS_LIKE = {
    "prefill-bound": "TTFT would climb with the prompt's length, one request alone, and a prompt sent again would "
    "wait as long as before.",
    "queue-bound": "One request alone would start at once, and TTFT would climb with the number of users.",
    "buffered": "The long answer would come in a few bursts with silence between, and one token would come sooner "
    "than the first of many.",
    "cached": "TTFT would climb with fresh prompts, and a prompt sent again would start many times sooner.",
    "decode-bound": "The start would be quick, and each token after it slow.",
}
"""What the plots of such a server show: said to who chose it and was wrong."""
CHANGES: dict[str, Any] = {
    "as it is": lambda q: q,
    "prompts 2x faster": lambda q: replace(q, prefill_tok_s=2 * q.prefill_tok_s),
    "steps 2x faster": lambda q: replace(q, decode_s=q.decode_s / 2, context_s=q.context_s / 2),
    "more sequences at once": lambda q: replace(q, n_slots=16),
    "no buffer": lambda q: replace(q, buffer_bytes=0),
    "prefix cache": lambda q: replace(q, prefix_cache=True),
}


class Sealed:
    """Five servers, A to E. Their faults stay inside; ``open`` them when you have decided."""

    def __init__(self, seed: int) -> None:
        dice = random.Random(seed)
        faults = list(FAULTS)
        dice.shuffle(faults)
        self._faults = dict(zip("ABCDE", faults, strict=True))
        self._seed = seed
        self._reports: dict[str, Report] = {}

    def __repr__(self) -> str:
        return "five sealed servers: A, B, C, D, E"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._faults)

    @property
    def seed(self) -> int:
        return self._seed

    def quirks(self, name: str) -> Quirks:
        """The truth about one of them."""
        return Quirks(**{"jitter": 0.04, "seed": self._seed + ord(name), **FAULTS[self._faults[name]]})

    def report(self, name: str) -> Report:
        """Probes of one server, made once."""
        if name not in self._reports:
            target = SimulatedServer(self.quirks(name))
            self._reports[name] = probe_target(
                target, workload=WORKLOAD, targets=TARGETS, seed=self._seed, where=f"server {name}"
            )
        return self._reports[name]

    def open(self, name: str) -> str:
        """The fault that was put in."""
        return self._faults[name]


def suspects(seed: int = 13) -> Sealed:
    """Five hidden servers; another seed gives them other names."""
    return Sealed(seed)


def charts(report: Report) -> str:
    """The report's own pictures, side by side where there is room. They show times, never the verdict."""
    return f'<div class="lk-charts">{"".join(page.pictures(report))}</div>'


def panel(servers: Sealed, guess: Any = None) -> Experiment:
    """Look at one server: every probe as a dot."""

    def run(job: Any, *, server: str) -> Result:
        job.progress(-1, f"probing server {server}")
        report = servers.report(server)
        rows = report.figures()
        seen = report.measured
        summary = (
            f"Server **{server}**: {len(report.streams)} requests. Alone, a fresh prompt of {seen.n_prompt:,.0f} "
            f"tokens waited {1e3 * (seen.ttft_s or 0):,.0f} ms for its first token and "
            f"{1e3 * (seen.tpot_s or 0):,.0f} ms for each further one."
        )
        data = {"server": server, "n_requests": len(report.streams)}
        return Result(None, rows, summary, "What the dots add up to", charts(report), data=data)

    fields = {"server": choice("Server", list(servers.names), "A")}
    question = "What is wrong with this server?"
    note = "Simulated: a mock server on a clock of its own, probed as `labkit diagnose` probes a real one."
    return Experiment(question, run, fields, kind="simulated", note=note, guess=guess)


def naming(servers: Sealed) -> Quiz:
    """One question a server. The explanation of the right answer is what its own probes say."""
    items = []
    for name in servers.names:
        fault = servers.open(name)
        answers = {}
        for cause in FAULTS:
            label = CAUSES[cause].title
            if cause == fault:
                found = next((f for f in servers.report(name).findings if f.cause == cause), None)
                evidence = found.evidence if found else ("The probes show it too faintly here to quote a figure.",)
                answers[label] = " ".join(evidence)
            else:
                answers[label] = LOOKS_LIKE[cause]
        items.append(Item(f"Server {name}:", answers, CAUSES[fault].title))
    return Quiz(items)


def what_would_help(servers: Sealed) -> list[dict[str, Any]]:
    """Every server with one thing changed, probed again: ms to the first token among the workload's users."""
    rows = []
    for name in servers.names:
        row: dict[str, Any] = {"server": name, "fault": servers.open(name)}
        for words, change in CHANGES.items():
            target = SimulatedServer(change(servers.quirks(name)))
            report = probe_target(target, workload=WORKLOAD, targets=TARGETS, budget="small", seed=servers.seed)
            row[words] = round(first_token_ms(report))
        rows.append(row)
    return rows


def first_token_ms(report: Report) -> float:
    """What a user of the workload waits for: among the others, the first token of an answer of ordinary length."""
    seen = report.measured
    alone = max(seen.stream_ttft_s or 0.0, seen.ttft_s or 0.0)
    return 1e3 * max(alone, seen.load.ttft_s if seen.load else 0.0)


def helped_by(rows: list[dict[str, Any]], words: str = "prompts 2x faster") -> int:
    """For how many servers that are slow to start a change brought the first token at least a quarter sooner."""
    slow = [row for row in rows if row["as it is"] > 1e3 * TARGETS.ttft_s]
    return sum(row[words] < 0.75 * row["as it is"] for row in slow)


# --- where it loses: the same server, measured with prompts that come again


def benchmark_twice(servers: Sealed) -> list[dict[str, Any]]:
    """A benchmark that draws its prompts anew, and one that sends the same ones again, on the server with a cache."""
    name = next(name for name in servers.names if servers.open(name) == "cached")
    target = SimulatedServer(servers.quirks(name))
    dice = random.Random(servers.seed)
    prompts = {n: fresh_prompt(n, dice) for n in (128, 256, 512, 1024)}
    rows = []
    for words in ("every prompt for the first time", "the same prompts again"):
        points = []
        for prompt in prompts.values():
            stream = read_stream(target.record(Ask(prompt, 8)))
            points.append((n_prompt(stream), stream.ttft_s or 0.0))
        line = fit(points)
        assert line is not None, "four prompts were sent"
        rows.append(
            {
                "prompts": words,
                "TTFT of 1,024 words, ms": points[-1][1] * 1e3,
                "prefill it seems to have, tokens/s": 1 / line.slope if line.slope > 1e-9 else None,
            }
        )
    return rows


# --- one stream, every tool's figures


def one_stream() -> Stream:
    """An answer whose tokens come four to an event, after a role chunk, as servers under load send them."""
    return read_stream(SimulatedServer(Quirks(tokens_per_event=4, prefill_tok_s=1500.0)).record(Ask("word " * 200, 64)))


# --- the exercise


def _rate_and_fixed(short: tuple[float, float], long: tuple[float, float]) -> tuple[float, float]:
    """By labkit's own line through the two."""
    line = fit([short, long])
    assert line is not None, "two points were given"
    return 1 / line.slope, line.intercept


def _near(found: Any, expected: tuple[float, float]) -> bool:
    return all(abs(a - b) <= 1e-6 * max(1.0, abs(b)) for a, b in zip(found, expected, strict=True))


SLOPE = Exercise(
    "prefill rate and fixed wait",
    cases=[((100, 0.3), (1100, 2.3)), ((64, 0.05), (1088, 0.178)), ((10, 1.0), (20, 1.25))],
    oracle=_rate_and_fixed,
    same=_near,
    hints=(
        "Both waits contain the same fixed part, so it is gone from their difference.",
        "The difference in tokens, divided by the difference in seconds, is the rate.",
        "The fixed part is what is left of one wait: `seconds - tokens / rate`.",
    ),
)

QUIZ = (
    (
        "TTFT is 900 ms for a prompt of 100 tokens and 950 ms for one of 2,000. What would a GPU with twice the "
        "arithmetic bring?",
        {
            "Nearly nothing": "Right: 1,900 more tokens cost 50 ms. The other 850 ms are no arithmetic.",
            "Half the TTFT": "No: only what grows with the prompt is arithmetic, 50 ms for 1,900 tokens.",
            "It depends on the tokens a second": "No: that is the pace after the first token.",
        },
        "Nearly nothing",
    ),
    (
        "Behind a new proxy TTFT rose from 20 to 290 ms, and the gap between tokens fell from 5.5 to 1.6 ms. What "
        "happened?",
        {
            "The server got faster at decoding": "No: then the last token would come sooner, and it does not.",
            "The proxy collects tokens and sends them in bursts": "Right: late, then many at once. Turn buffering off.",
            "The prompt is cached now": "No: that lowers TTFT.",
        },
        "The proxy collects tokens and sends them in bursts",
    ),
    (
        "Two tools report a mean ITL of 20 ms and of 80 ms for the same server. Which is wrong?",
        {
            "The one with 80 ms": "Perhaps neither: it may count events, and an event may carry four tokens.",
            "The one with 20 ms": "Perhaps neither: it may spread an event's gap over its tokens.",
            "Perhaps neither": "Right: one counts events, the other tokens. Ask for the definition before the figure.",
        },
        "Perhaps neither",
    ),
)
