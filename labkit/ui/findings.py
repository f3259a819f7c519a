"""What a lesson says of its own measurement: sentences made from the numbers, with a branch for each way they can go.

Every function takes what a panel's ``Result.data`` holds and returns plain words (`code` and **bold** work). None of
them knows what *should* come out; where the usual explanation does not fit the numbers, they say so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

CLEARLY = 1.15
"""A ratio of medians below this is not called a difference."""
NEAR_CEILING = 50.0
"""Per cent of a ceiling from which a step is said to be bound by it."""


def crossing(data: Mapping[str, Any]) -> str:
    """Lesson 03: where attention overtook the FFN by the clock, beside where it does by counted FLOPs."""
    lengths, measured, counted = data["lengths"], data["crossing"], data["counted_crossing"]
    count = "never" if counted is None else f"at {counted:,} tokens"
    if measured is None:
        return (
            f"By the clock attention did not catch up with the FFN up to {lengths[-1]:,} tokens; by counted FLOPs it "
            f"does {count}. Choose a longer prompt to see where this machine's curve crosses."
        )
    where = f"at about {measured:,.0f} tokens"
    if measured <= lengths[0]:
        where = f"before {lengths[0]:,} tokens, the shortest prompt measured"
    spread = data.get("crossings") or [measured]
    range_ = f" (single repeats: {min(spread):,.0f} to {max(spread):,.0f})" if max(spread) > 1.1 * min(spread) else ""
    head = f"By the clock attention caught up {where}{range_}, by counted FLOPs {count}."
    if counted is None or measured < counted / CLEARLY:
        return f"{head} Here a FLOP of attention takes longer than one of the FFN, so it catches up earlier."
    if measured > counted * CLEARLY:
        return f"{head} Here a FLOP of attention is the cheaper one, so it catches up later than the count says."
    return f"{head} Here the clock agrees with the count: both halves run at about the same rate."


def same_text(first: Sequence[int], second: Sequence[int], names: tuple[str, str]) -> str:
    """Two runs that should have chosen the same tokens."""
    n = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))
    if list(first) == list(second):
        return f"**{names[0]}** and **{names[1]}** chose the same {len(first)} tokens."
    return (
        f"A finding: **{names[0]}** and **{names[1]}** parted at token {n + 1}. The mathematics is the same, the order "
        "of its additions is not: where two scores lie within a rounding of each other, either may win, and from there "
        "on the texts differ. It happens in 16-bit numbers; float32 makes it rare."
    )


def toggled(data: Mapping[str, Any]) -> tuple[str | None, str]:
    """Lesson 06: which of the three guesses the run bore out (None: none of them), and what it showed."""
    used, times = data["used"][1:], data["times_ms"]
    medians = data["medians_ms"]
    on = next((i for i in range(1, len(used)) if used[i] != "none" and used[i - 1] == "none"), None)
    if on is None or len(medians) < 2:
        return None, "The run ended before both ways had a token of their own: let it write more tokens."
    without, with_cache = medians["none"], medians["contiguous"]
    ratio, filling = without / with_cache, times[on] / with_cache
    said = f"A token took {without:.1f} ms without the cache and {with_cache:.1f} ms with it"
    if ratio < CLEARLY:
        return None, (
            f"{said}: no difference to speak of. At this length a step over the whole text takes hardly longer "
            "than one over a single token, because both read every weight once. Let the text grow and look again."
        )
    if filling > CLEARLY:
        said += f". The step that filled it took {times[on]:.1f} ms, {filling:.1f} times one with it"
        return "One slow step, then faster and nearly flat", f"{said}: it went over the whole text once more."
    return "Faster from the very next token on", (
        f"{said}. The step that filled it was as quick as those after it: so short a text goes through at once."
    )


def climbed(data: Mapping[str, Any]) -> str:
    """Lesson 05: did the time per token grow without a cache, and as the arithmetic did?"""
    ratio, work = data["ratio"], data["work"][-1] / data["work"][0]
    said = f"The last tokens took {ratio:.1f} times as long as the first, with {work:.0f} times the arithmetic."
    if ratio < CLEARLY:
        return (
            f"{said} Here the time hardly climbed: what each step costs whatever its length, reading the weights and "
            "starting its operations, still hides the arithmetic. More tokens, or a longer prompt, bring it out."
        )
    if ratio < 0.7 * work:
        return f"{said} It climbed less than the arithmetic did: a price that does not depend on the length is in it."
    return f"{said} The time climbed about as the arithmetic did."


def bound_by(dot: Mapping[str, float]) -> str:
    """Which ceiling a measured step is near: "memory", "arithmetic" or "neither"."""
    mfu, mbu = dot["MFU %"], dot["MBU %"]
    if max(mfu, mbu) < NEAR_CEILING:
        return "neither"
    return "arithmetic" if mfu > mbu else "memory"


def roofline(dots: Sequence[Mapping[str, float]]) -> list[str]:
    """Lesson 07: the two ends of the series, and what more tokens together bought."""
    names = {
        "memory": "memory binds it",
        "arithmetic": "arithmetic binds it",
        "neither": "neither ceiling binds it: overhead does, or code that reaches only part of either",
    }
    said = []
    for dot in (dots[0], dots[-1]):
        n = int(dot["tokens together"])
        who = "One token" if n == 1 else f"{n} tokens together"
        said.append(f"**{who}**: MBU {dot['MBU %']:.0f} %, MFU {dot['MFU %']:.1f} %, so {names[bound_by(dot)]}.")
    first, last = dots[0], dots[-1]
    longer, more = last["ms"] / first["ms"], last["tokens together"] / first["tokens together"]
    gain = f"{more:.0f} times the tokens took {longer:.1f} times as long"
    said.append(f"{gain}: {more / longer:.1f} times the tokens in a second.")
    return said


def losses(data: Mapping[str, Any]) -> list[str]:
    """Lesson 08: what each way of keeping less cost. ``data`` {name: something with logit_error, perplexity_change}."""
    least = min(data, key=lambda name: data[name].logit_error)
    worst = max(data, key=lambda name: data[name].perplexity_change)
    said = [
        f"**{least}** moved the scores least: by {100 * data[least].logit_error:.1f} % of their spread; its perplexity "
        f"changed by {100 * data[least].perplexity_change:+.1f} %.",
        f"**{worst}** cost most: {100 * data[worst].perplexity_change:+.0f} % perplexity.",
    ]
    sinks, none = (data.get(f"sliding 128, {what} sinks") for what in ("4", "no"))
    if sinks is not None and none is not None:
        a, b = sinks.perplexity_change, none.perplexity_change
        if b > a + 0.02:
            said.append(f"Four sink tokens decide: {100 * a:+.0f} % with them, {100 * b:+.0f} % without.")
        else:
            said.append(f"The four sinks made no difference on this text: {100 * a:+.0f} % and {100 * b:+.0f} %.")
    return said


def speed_share(speed: float, ceiling: float) -> str:
    """Lesson 00: a run's speed beside the ceiling that memory sets."""
    share = 100 * speed / ceiling
    said = f"Your run reached **{share:.0f} %** of its ceiling: {speed:.1f} of {ceiling:.1f} tokens a second."
    if share > 100:
        return (
            f"{said} Above the ceiling? Part of the weights came from a cache of the processor, or the bandwidth was "
            "measured in a busy moment: measure it again."
        )
    if share >= 60:
        return f"{said} That is near what this memory allows."
    return f"{said} The rest of the lab is about where the remainder goes."


def speculation(data: Mapping[str, Any]) -> list[str]:
    """Lesson 10: how often guesses held, what that made of the speed, and where it would have broken even."""
    found = data["median"]
    low, high = data["spread"]
    name, n = data["drafter"], data["n_draft"]
    if not found.guesses_per_round:
        return [
            f"**{name}** found nothing to guess in this text, so it was plain decoding: {found.measured:.2f} times."
        ]
    out = [
        f"Of the guesses of **{name}** that were looked at, {found.acceptance:.0%} held: {found.tokens_per_round:.2f} "
        f"tokens a round. That made it **{found.measured:.2f} times** as fast (from {low:.2f} to {high:.2f}); the "
        f"formula says {found.predicted:.2f}."
    ]
    even = found.break_even
    if even is None:
        out.append(f"At these costs even guesses that always hold would lose at length {n}.")
    elif found.acceptance < even:
        out.append(f"It breaks even where {even:.0%} hold, and these did not.")
    else:
        out.append(f"It breaks even where {even:.0%} hold.")
    if not data["same"]:
        out.append(
            "The text is not the same as without a drafter: two scores lay so close together that a check of several "
            "tokens, which rounds in another order, ranked them otherwise."
        )
    return out
