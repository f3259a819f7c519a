"""What a lesson says of its own measurement: sentences made from the numbers, with a branch for each way they can go.

Every function takes what a panel's ``Result.data`` holds and returns plain words (`code` and **bold** work). None of
them knows what *should* come out; where the usual explanation does not fit the numbers, they say so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from labkit.ui.words import counted, say, sentences

CLEARLY = 1.15
"""A ratio of medians below this is not called a difference."""
SAME = 1.05
"""A ratio of medians below this is said as "as long"."""
NEAR_CEILING = 50.0
"""Per cent of a ceiling from which a step is said to be bound by it."""


def takes(ratio: float) -> str:
    """What follows "a token takes": how long, where the other way took ``ratio`` times as long.

    >>> takes(2.0), takes(1.01), takes(0.5)
    ('2.0 times less time', 'as long', '2.0 times as long')
    """
    if ratio >= SAME:
        return say("{n:.1f} times less time", n=ratio)
    return say("{n:.1f} times as long", n=1 / ratio) if ratio <= 1 / SAME else say("as long")


def crossing(data: Mapping[str, Any]) -> str:
    """Lesson 03: where attention overtook the FFN by the clock, beside where it does by counted FLOPs."""
    lengths, measured, by_count = data["lengths"], data["crossing"], data["counted_crossing"]
    count = say("By counted FLOPs it never does.")
    if by_count is not None:
        count = say("By counted FLOPs it does at {n:,} tokens.", n=by_count)
    if measured is None:
        never = "By the clock attention did not catch up with the FFN up to {n:,} tokens."
        longer = say("Choose a longer prompt to see where this machine's curve crosses.")
        return sentences(say(never, n=lengths[-1]), count, longer)
    clock = say("By the clock attention caught up at about {n:,.0f} tokens.", n=measured)
    if measured <= lengths[0]:
        early = "By the clock attention caught up before {n:,} tokens, the shortest prompt measured."
        clock = say(early, n=lengths[0])
    spread = data.get("crossings") or [measured]
    low, high = min(spread), max(spread)
    range_ = say("Single repeats: {low:,.0f} to {high:,.0f}.", low=low, high=high) if high > 1.1 * low else ""
    why = "Here the clock agrees with the count: both halves run at about the same rate."
    if by_count is None or measured < by_count / CLEARLY:
        why = "Here a FLOP of attention takes longer than one of the FFN, so it catches up earlier."
    elif measured > by_count * CLEARLY:
        why = "Here a FLOP of attention is the cheaper one, so it catches up later than the count says."
    return sentences(clock, range_, count, say(why))


def same_text(first: Sequence[int], second: Sequence[int], names: tuple[str, str]) -> str:
    """Two runs that should have chosen the same tokens."""
    n = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))
    if list(first) == list(second):
        chose = "**{a}** and **{b}** chose the same {n} tokens."
        return say(chose, a=say(names[0]), b=say(names[1]), n=len(first))
    return say(
        "A finding: **{a}** and **{b}** parted at token {n}. The mathematics is the same, the order of its additions "
        "is not: where two scores lie within a rounding of each other, either may win, and from there on the texts "
        "differ. It happens in 16-bit numbers; float32 makes it rare.",
        a=say(names[0]),
        b=say(names[1]),
        n=n + 1,
    )


def toggled(data: Mapping[str, Any]) -> tuple[str | None, str]:
    """Lesson 06: which of the three guesses the run bore out (None: none of them), and what it showed."""
    used, times = data["used"][1:], data["times_ms"]
    medians = data["medians_ms"]
    on = next((i for i in range(1, len(used)) if used[i] != "none" and used[i - 1] == "none"), None)
    if on is None or len(medians) < 2:
        return None, say("The run ended before both ways had a token of their own: let it write more tokens.")
    without, with_cache = medians["none"], medians["contiguous"]
    ratio, filling = without / with_cache, times[on] / with_cache
    took = "A token took {without:.1f} ms without the cache and {with_cache:.1f} ms with it."
    said = say(took, without=without, with_cache=with_cache)
    if ratio < CLEARLY:
        alike = (
            "That is no difference to speak of. At this length a step over the whole text takes hardly longer than one "
            "over a single token, because both read every weight once. Let the text grow and look again."
        )
        return None, sentences(said, say(alike))
    if filling > CLEARLY:
        slow = (
            "The step that filled it took {took:.1f} ms, {times:.1f} times one with it: it went over the whole text "
            "once more."
        )
        return "One slow step, then faster and nearly flat", sentences(said, say(slow, took=times[on], times=filling))
    quick = "The step that filled it was as quick as those after it: so short a text goes through at once."
    return "Faster from the very next token on", sentences(said, say(quick))


def climbed(data: Mapping[str, Any]) -> str:
    """Lesson 05: did the time per token grow without a cache, and as the arithmetic did?"""
    ratio, work = data["ratio"], data["work"][-1] / data["work"][0]
    longer = "The last tokens took {ratio:.1f} times as long as the first, with {work:.0f} times the arithmetic."
    why = "The time climbed about as the arithmetic did."
    if ratio < CLEARLY:
        why = (
            "Here the time hardly climbed: what each step costs whatever its length, reading the weights and starting "
            "its operations, still hides the arithmetic. More tokens, or a longer prompt, bring it out."
        )
    elif ratio < 0.7 * work:
        why = "It climbed less than the arithmetic did: a price that does not depend on the length is in it."
    return sentences(say(longer, ratio=ratio, work=work), say(why))


def bound_by(dot: Mapping[str, float]) -> str:
    """Which ceiling a measured step is near: "memory", "arithmetic" or "neither"."""
    mfu, mbu = dot["MFU %"], dot["MBU %"]
    if max(mfu, mbu) < NEAR_CEILING:
        return "neither"
    return "arithmetic" if mfu > mbu else "memory"


def roofline(dots: Sequence[Mapping[str, float]]) -> list[str]:
    """Lesson 07: the two ends of the series, and what more tokens together bought."""
    binds = {
        "memory": "**{who}**: MBU {mbu:.0f} %, MFU {mfu:.1f} %, so memory binds it.",
        "arithmetic": "**{who}**: MBU {mbu:.0f} %, MFU {mfu:.1f} %, so arithmetic binds it.",
        "neither": (
            "**{who}**: MBU {mbu:.0f} %, MFU {mfu:.1f} %, so neither ceiling binds it: overhead does, or code that "
            "reaches only part of either."
        ),
    }
    said = []
    for dot in (dots[0], dots[-1]):
        who = counted(int(dot["tokens together"]), "One token", "{n} tokens together")
        said.append(say(binds[bound_by(dot)], who=who, mbu=dot["MBU %"], mfu=dot["MFU %"]))
    first, last = dots[0], dots[-1]
    longer, more = last["ms"] / first["ms"], last["tokens together"] / first["tokens together"]
    gain = "{more:.0f} times the tokens took {longer:.1f} times as long: {gain:.1f} times the tokens in a second."
    said.append(say(gain, more=more, longer=longer, gain=more / longer))
    return said


def losses(data: Mapping[str, Any]) -> list[str]:
    """Lesson 08: what each way of keeping less cost. ``data`` {name: something with logit_error, perplexity_change}."""
    least = min(data, key=lambda name: data[name].logit_error)
    worst = max(data, key=lambda name: data[name].perplexity_change)
    moved = (
        "**{name}** moved the scores least: by {error:.1f} % of their spread; its perplexity changed by "
        "{change:+.1f} %."
    )
    error, change = data[least].logit_error, data[least].perplexity_change
    cost = "**{name}** cost most: {change:+.0f} % perplexity."
    said = [
        say(moved, name=say(least), error=100 * error, change=100 * change),
        say(cost, name=say(worst), change=100 * data[worst].perplexity_change),
    ]
    sinks, none = (data.get(f"sliding 128, {what} sinks") for what in ("4", "no"))
    if sinks is not None and none is not None:
        a, b = 100 * sinks.perplexity_change, 100 * none.perplexity_change
        if b > a + 2:
            said.append(say("Four sink tokens decide: {a:+.0f} % with them, {b:+.0f} % without.", a=a, b=b))
        else:
            said.append(say("The four sinks made no difference on this text: {a:+.0f} % and {b:+.0f} %.", a=a, b=b))
    return said


def speed_share(speed: float, ceiling: float) -> str:
    """Lesson 00: a run's speed beside the ceiling that memory sets."""
    share = 100 * speed / ceiling
    reached = "Your run reached **{share:.0f} %** of its ceiling: {speed:.1f} of {ceiling:.1f} tokens a second."
    what = "The rest of the lab is about where the remainder goes."
    if share > 100:
        what = (
            "Above the ceiling? Part of the weights came from a cache of the processor, or the bandwidth was measured "
            "in a busy moment: measure it again."
        )
    elif share >= 60:
        what = "That is near what this memory allows."
    return sentences(say(reached, share=share, speed=speed, ceiling=ceiling), say(what))


def speculation(data: Mapping[str, Any]) -> list[str]:
    """Lesson 10: how often guesses held, what that made of the speed, and where it would have broken even."""
    found = data["median"]
    low, high = data["spread"]
    name, n = data["drafter"], data["n_draft"]
    if not found.guesses_per_round:
        plain = "**{name}** found nothing to guess in this text, so it was plain decoding: {times:.2f} times."
        return [say(plain, name=name, times=found.measured)]
    out = [
        say(
            "Of the guesses of **{name}** that were looked at, {held:.0%} held: {tokens:.2f} tokens a round.",
            name=name,
            held=found.acceptance,
            tokens=found.tokens_per_round,
        ),
        say(
            "That made it **{times:.2f} times** as fast (from {low:.2f} to {high:.2f}); the formula says "
            "{formula:.2f}.",
            times=found.measured,
            low=low,
            high=high,
            formula=found.predicted,
        ),
    ]
    even = found.break_even
    if even is None:
        out.append(say("At these costs even guesses that always hold would lose at length {n}.", n=n))
    elif found.acceptance < even:
        out.append(say("It breaks even where {share:.0%} hold, and these did not.", share=even))
    else:
        out.append(say("It breaks even where {share:.0%} hold.", share=even))
    if not data["same"]:
        out.append(
            say(
                "The text is not the same as without a drafter: two scores lay so close together that a check of "
                "several tokens, which rounds in another order, ranked them otherwise."
            )
        )
    return out
