"""What is wrong with this server? Findings from figures, the one that matters most first.

The order of asking: can the times be trusted (did the reader keep up, did something hold tokens back)? Then which
wait is furthest above its target, and what makes it; then whether only the first request waits. The words are
``labkit.perf.verdict``'s.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp

from labkit.diagnose.measured import Measured
from labkit.perf.verdict import Finding, NextStep, ranked
from labkit.registry import check_options, option

HELD = 0.5
BUSY = 0.5
SAVES = 0.5
"""A repeated prompt that starts in less than this share of a fresh one's time is served from a cache."""


@dataclass(frozen=True)
class Targets:
    """When a wait is too long. The defaults are the interactive limits of MLPerf Inference 5.0 (Llama-2-70B): 450 ms to
    the first token, 40 ms for each after it, both at the 99th percentile there."""

    ttft_s: float = option(0.45, low=0.001, high=600.0, help="seconds to the first token")
    tpot_s: float = option(0.04, low=0.0001, high=60.0, help="seconds for each token after it")

    def __post_init__(self) -> None:
        check_options(self)


def judge(seen: Measured, targets: Targets | None = None) -> tuple[Finding, ...]:
    """Findings, never empty; the first is the verdict."""
    targets = targets or Targets()
    if seen.ttft_s is None and seen.first_s is None:
        return (_failed(seen) if seen.first_error or not seen.n_streams else _no_times(seen),)
    trust = [found for found in (_client_bound(seen), _buffered(seen)) if found]
    steady = [pair for pair in (*_slow_start(seen, targets), _slow_stream(seen, targets)) if pair]
    steady.sort(key=lambda pair: -pair[0])
    cold = _cold(seen, targets)
    further = [*(finding for _, finding in steady), *([cold] if cold else [])]
    if trust:  # what cannot be trusted cannot be sure
        further = [replace(finding, confidence=finding.confidence / 2) for finding in further]
    found = [*trust, *further]
    if seen.alone and (reused := _reused(seen)):
        found.append(reused)
    return tuple(found) or (_healthy(seen, targets),)


def _sure(margin: float) -> float:
    """Confidence from how far a figure lies beyond its limit: 0.5 at the limit, 0.9 at twice."""
    return max(0.05, min(0.98, 1 - 0.5 * exp(-1.6 * (margin - 1))))


def _ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _failed(seen: Measured) -> Finding:
    why = seen.first_error or "the server sent no token, and said nothing"
    return Finding("failed", (why,), (NextStep("look-at-log"),), 0.95)


def _no_times(seen: Measured) -> Finding:
    lines = ("The text of an answer is here, its times are not.",)
    return Finding("unknown", lines, (NextStep("record"),), 0.95)


def _reused(seen: Measured) -> Finding | None:
    """A recording whose prompt the server had already read for the most part."""
    if not seen.n_cached or seen.n_cached < 0.5 * seen.n_prompt:
        return None
    lines = (
        f"{seen.n_cached:,} of {seen.n_prompt:,.0f} prompt tokens were in the server's cache, so its first token came "
        "sooner than a fresh prompt's would.",
    )
    return Finding("cached", lines, (NextStep("measure-fresh"),), 0.9)


def _client_bound(seen: Measured) -> Finding | None:
    share = max([seen.client_share or 0.0, *(load.client_share for load in seen.loads)])
    if seen.client_share is None or share < BUSY:
        return None
    alone = (seen.client_share or 0.0) >= BUSY
    lines = [f"The reader was busy for {share:.0%} of the time in which tokens came, so they waited for it."]
    lines.append("One stream is enough for that." if alone else "Only under load: one stream it reads in time.")
    lines.append("All times below are the reader's as much as the server's.")
    return Finding("client-bound", tuple(lines), (NextStep("faster-reader"),), _sure(1 + (share - BUSY) / BUSY * 2))


def _buffered(seen: Measured) -> Finding | None:
    if seen.held_share < HELD or (seen.client_share or 0.0) >= BUSY:
        return None
    lines = [
        f"{seen.n_events} events came in {seen.n_bursts} burst{'s' if seen.n_bursts != 1 else ''}, with silence before."
    ]
    gain, margin = None, 1.5
    if seen.stream_ttft_s and seen.one_ttft_s:
        gain = seen.stream_ttft_s / max(seen.one_ttft_s, 1e-6)
        lines.append(
            f"An answer of one token was here after {_ms(seen.one_ttft_s)}, the first token of a long one after "
            f"{_ms(seen.stream_ttft_s)}: a server does not know the length of its answer before it, a buffer does."
        )
        margin = 2.5 if gain > 1.5 else 1.1
    return Finding("buffered", tuple(lines), (NextStep("unbuffer", gain=gain),), _sure(margin))


def _slow_start(seen: Measured, targets: Targets) -> list[tuple[float, Finding]]:
    ttft, load = seen.ttft_s, seen.load
    if ttft is None:
        return []
    if ttft > targets.ttft_s:
        ratio = ttft / targets.ttft_s
        share = seen.prefill_s / ttft if ttft else 0.0
        if share < 0.5:
            return [(ratio, _unsure(seen, _waits_alone(seen, ttft, share, ratio)))]
        prefill = _unsure(seen, _prefill_bound(seen, ttft, share, ratio))
        cached = _cached(seen, targets, ratio)
        return [(ratio * 1.01, cached), (ratio, prefill)] if cached else [(ratio, prefill)]
    if load and load.ttft_s > targets.ttft_s and load.ttft_s > 1.2 * ttft:
        ratio = load.ttft_s / targets.ttft_s
        return [(ratio, _waits_in_line(seen, load.n, load.ttft_s, ttft, ratio))]
    return []


def _unsure(seen: Measured, found: Finding) -> Finding:
    """One recording cannot tell a long prompt from a long queue: only the server can, or a probe."""
    if not seen.alone or "prefill_s" in seen.server:
        return found
    lines = (
        *found.evidence,
        "That the prompt makes this wait, or does not, is a guess: prompts of one length cannot show it.",
    )
    steps = (NextStep("record"), *found.next_steps)
    return Finding(found.cause, lines, steps, min(0.4, found.confidence))


def _prefill_bound(seen: Measured, ttft: float, share: float, ratio: float) -> Finding:
    line = seen.prefill
    assert line is not None, "a slow start was measured, so its line was too"
    rate = 1 / line.slope if line.slope > 0 else float("inf")
    lines = [
        f"{_ms(ttft)} to the first token of a fresh prompt of {seen.n_prompt:,.0f} tokens, "
        f"{ratio:.1f} times the target.",
        f"Each 1,000 more tokens add {_ms(1000 * line.slope)} ({rate:,.0f} tokens a second): {share:.0%} of the wait "
        f"grows with the prompt, {_ms(max(0.0, line.intercept))} does not.",
    ]
    if "prefill_s" in seen.server:
        lines.append(f"The server itself says {seen.server.get('prefill_tok_s', 0):,.0f} prompt tokens a second.")
    total, part = seen.total_s, seen.prefill_s
    saved = _saved(seen)
    prefix = (
        NextStep("same-prefix", gain=_gain(total, part * saved))
        if saved > 1 - SAVES
        else NextStep("prefix-cache", gain=_gain(total, part * 0.9))
    )
    steps = [prefix, NextStep("shorter-prompt", "half as long", _gain(total, part / 2))]
    steps.append(NextStep("faster-arithmetic", "twice the rate", _gain(total, part / 2)))
    return Finding("prefill-bound", tuple(lines), ranked(steps), min(_sure(ratio), _sure(1 + 3 * (share - 0.4))))


def _saved(seen: Measured) -> float:
    """Share of TTFT that the cache saved when a prompt came again, 0 to 1."""
    if seen.repeat_s is None or seen.repeat_s[0] <= 0:
        return 0.0
    return max(0.0, 1 - seen.repeat_s[1] / seen.repeat_s[0])


def _cached(seen: Measured, targets: Targets, ratio: float) -> Finding | None:
    """A fresh prompt is too slow, a repeated one is not: what a benchmark shows depends on its prompts."""
    saved = _saved(seen)
    if seen.repeat_s is None or saved < 1 - SAVES or seen.repeat_s[1] > targets.ttft_s:
        return None
    fresh, again = seen.repeat_s
    lines = [
        f"The same prompt of {seen.n_repeat:,.0f} tokens: {_ms(fresh)} when new, {_ms(again)} when it came again.",
    ]
    if seen.n_cached:
        lines.append(f"The server says that {seen.n_cached:,} of its tokens were cached.")
    lines.append("A benchmark that repeats its prompts shows the second figure; your users' first words see the first.")
    steps = (NextStep("same-prefix", gain=_gain(seen.total_s, seen.prefill_s * saved)), NextStep("measure-fresh"))
    return Finding("cached", tuple(lines), steps, min(_sure(ratio), _sure(1 + 2 * (saved - 0.4))))


def _waits_alone(seen: Measured, ttft: float, share: float, ratio: float) -> Finding:
    fixed = max(0.0, seen.prefill.intercept if seen.prefill else 0.0)
    lines = [
        f"{_ms(ttft)} to the first token, {ratio:.1f} times the target, with nothing else sent from here.",
        f"Only {share:.0%} of it grows with the prompt: {_ms(fixed)} pass whatever is asked.",
    ]
    if seen.prefill and seen.prefill.noise > 0.15 * ttft:
        lines.append(f"Equal requests differ by {_ms(seen.prefill.noise)} and more, as places in a queue do.")
    sure = 0.7 * _sure(ratio)
    if "queue_s" in seen.server:
        lines.append(f"The server itself says {_ms(seen.server['queue_s'])} of queue.")
        sure = _sure(ratio) if seen.server["queue_s"] > fixed / 2 else 0.5
    else:
        lines.append("Other people's requests, a slow network or a gateway would look the same from outside.")
    steps = (NextStep("more-slots", gain=_gain(seen.total_s, 0.9 * fixed)),)
    return Finding("queue-bound", tuple(lines), steps, sure)


def _waits_in_line(seen: Measured, n: int, at_load: float, alone: float, ratio: float) -> Finding:
    worst = max((load.worst_ttft_s for load in seen.loads if load.n == n), default=at_load)
    lines = [
        f"Alone {_ms(alone)} to the first token; {n} at once {_ms(at_load)} in the mean and {_ms(worst)} at worst, "
        f"{ratio:.1f} times the target.",
    ]
    prompts_s = seen.prefill_s * (n - 1)
    if at_load - alone > 1.5 * prompts_s:
        lines.append(
            f"Reading the others' prompts explains at most {_ms(prompts_s)} of that: they wait for whole answers."
        )
        remedy = "more-slots"
    else:
        lines.append("That is about what it takes to read the others' prompts one after the other.")
        remedy = "same-prefix"
    total = at_load + (seen.workload.n_new_tokens - 1) * (seen.tpot_s or 0.0)
    gain = _gain(total, at_load - alone)
    return Finding(
        "queue-bound", tuple(lines), ranked([NextStep(remedy, gain=gain), NextStep("admit-less")]), _sure(ratio)
    )


def _slow_stream(seen: Measured, targets: Targets) -> tuple[float, Finding] | None:
    tpot, load = seen.tpot_s, seen.load
    under_load = load.tpot_s if load and load.tpot_s is not None else None
    slow = tpot if tpot is not None and tpot > targets.tpot_s else under_load
    if tpot is None or slow is None or slow <= targets.tpot_s:
        return None
    ratio, line = slow / targets.tpot_s, seen.decode
    assert line is not None, "a pace was measured, so its line was too"
    context_s = max(0.0, line.slope) * seen.n_prompt
    lines = [f"{_ms(tpot)} for each token after the first when alone, {1 / tpot:,.1f} tokens a second."]
    if under_load is not None and load is not None:
        lines.append(f"{load.n} at once: {_ms(under_load)} each, {load.n / under_load:,.1f} tokens a second together.")
    lines.append(f"The context of {seen.n_prompt:,.0f} tokens is {context_s / tpot:.0%} of it.")
    if "decode_s" in seen.server:
        lines.append(f"The server itself says {_ms(seen.server['decode_s'])} a token.")
    n, total = seen.workload.n_new_tokens - 1, (seen.ttft_s or 0.0) + (seen.workload.n_new_tokens - 1) * slow
    base = slow - context_s
    steps = [
        NextStep("fewer-bits", "half of them", _gain(total, n * base / 2)),
        NextStep("more-tokens-a-step", "two a step by a drafter", _gain(total, n * slow / 2)),
        NextStep("smaller-cache", "half of it", _gain(total, n * context_s / 2)),
    ]
    if tpot <= targets.tpot_s:
        steps.append(NextStep("admit-less", gain=_gain(total, n * (slow - tpot))))
    return ratio, Finding("decode-bound", tuple(lines), ranked(steps), _sure(ratio))


def _cold(seen: Measured, targets: Targets) -> Finding | None:
    if seen.first_s is None or seen.ttft_s is None:
        return None
    more = seen.first_s - seen.ttft_s
    limit = max(targets.ttft_s, 3 * seen.ttft_s)
    if more <= limit:
        return None
    lines = (
        f"The first request waited {_ms(seen.first_s)}, later ones of its kind {_ms(seen.ttft_s)}.",
        "Loading, compiling or filling a pool happens once; a model that is unloaded when idle pays it again.",
    )
    total = seen.total_s + more
    return Finding("cold", lines, (NextStep("keep-warm", gain=_gain(total, more)),), _sure(more / limit))


def _healthy(seen: Measured, targets: Targets) -> Finding:
    lines = []
    if seen.ttft_s is not None:
        lines.append(f"{_ms(seen.ttft_s)} to the first token (target {_ms(targets.ttft_s)}).")
    if seen.tpot_s is not None:
        lines.append(f"{_ms(seen.tpot_s)} for each token after it (target {_ms(targets.tpot_s)}).")
    if load := seen.load:
        pace = f", {_ms(load.tpot_s)} a token" if load.tpot_s is not None else ""
        lines.append(f"{load.n} at once: {_ms(load.ttft_s)} to the first token{pace}.")
    if not lines or seen.tpot_s is None:
        return Finding("unknown", (*lines, "No pace could be measured."), (NextStep("record"),), 0.5)
    nearest = max((seen.ttft_s or 0.0) / targets.ttft_s, seen.tpot_s / targets.tpot_s)
    return Finding("healthy", tuple(lines), (NextStep("nothing"),), _sure(1 / max(nearest, 0.05)))


def _gain(total_s: float, saved_s: float) -> float | None:
    """How many times shorter a whole answer becomes when so much of it goes."""
    left = total_s - max(0.0, saved_s)
    return total_s / left if total_s > 0 and left > 0 else None
