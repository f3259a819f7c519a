"""A against B, measured in turn: medians, ranges, whether the machine was busy, and a sentence that says just that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from labkit.perf.busy import BusyWatch
from labkit.perf.machine import BUSY_SHARE
from labkit.ui.words import counted, say, sentences

N_TURNS = 3
ALIKE = 0.05
"""Two medians that differ by less than this are called the same, however tidy the runs were."""


@dataclass(frozen=True)
class Comparison:
    """What each of two contenders took, turn by turn, in one unit; lower is faster."""

    values: Mapping[str, Sequence[float]]
    unit: str = "ms"
    busy_share: float = 0.0
    """The share of this process's cores that other programs took meanwhile, 0 to 1."""

    def __post_init__(self) -> None:
        counts = {len(turns) for turns in self.values.values()}
        if len(self.values) != 2 or len(counts) != 1 or not counts.pop():
            raise ValueError("a comparison has two contenders with equally many turns, at least one.")

    @property
    def names(self) -> tuple[str, str]:
        first, second = self.values
        return first, second

    @property
    def medians(self) -> tuple[float, float]:
        first, second = (median(turns) for turns in self.values.values())
        return first, second

    @property
    def ratio(self) -> float:
        """How many times as long the second took, by the medians."""
        first, second = self.medians
        return second / first if first else float("inf")

    @property
    def ratios(self) -> tuple[float, float]:
        """The smallest and largest ratio of one turn."""
        pairs = [b / a if a else float("inf") for a, b in zip(*self.values.values(), strict=True)]
        return min(pairs), max(pairs)

    @property
    def clear(self) -> bool:
        """Whether every turn had the same winner and the medians are apart: a difference, not this hour's noise."""
        low, high = self.ratios
        return (low > 1 or high < 1) and abs(self.ratio - 1) > ALIKE

    @property
    def busy(self) -> bool:
        return self.busy_share > BUSY_SHARE

    def words(self) -> str:
        """The result as a sentence, whichever way it went.

        >>> Comparison({"with": [10.0, 11.0, 10.0], "without": [20.0, 21.0, 22.0]}).words()
        '**without** took 2.1 times as long as **with** (1.9 to 2.2 in 3 turns).'
        >>> Comparison({"with": [10.0, 12.0, 10.0], "without": [11.0, 11.0, 10.0]}).words()
        'No difference that these 3 turns can tell from noise: **with** and **without** took 10.0 and 11.0 ms.'
        """
        first, second = self.names
        n = len(self.values[first])
        noise = say("Other programs were busy meanwhile: take it as rough.") if self.busy else ""
        if not self.clear:
            a, b = self.medians
            found = {"first": say(first), "second": say(second), "a": a, "b": b, "unit": say(self.unit)}
            same = counted(
                n,
                "No difference that this turn can tell from noise: **{first}** and **{second}** took {a:.1f} and "
                "{b:.1f} {unit}.",
                "No difference that these {n} turns can tell from noise: **{first}** and **{second}** took {a:.1f} and "
                "{b:.1f} {unit}.",
                **found,
            )
            return sentences(same, noise)
        slow, fast, ratio = (second, first, self.ratio) if self.ratio > 1 else (first, second, 1 / self.ratio)
        low, high = self.ratios if self.ratio > 1 else tuple(1 / r for r in reversed(self.ratios))
        longer = counted(
            n,
            "**{slow}** took {ratio:.1f} times as long as **{fast}** (one turn).",
            "**{slow}** took {ratio:.1f} times as long as **{fast}** ({low:.1f} to {high:.1f} in {n} turns).",
            slow=say(slow),
            fast=say(fast),
            ratio=ratio,
            low=low,
            high=high,
        )
        return sentences(longer, noise)

    def rows(self, what: str = "") -> list[dict[str, Any]]:
        """One row a contender: median and range. ``what`` heads the first column."""
        unit = say(self.unit)
        return [
            {
                what or "contender": say(name),
                say("median, {unit}", unit=unit): median(turns),
                say("lowest, {unit}", unit=unit): min(turns),
                say("highest, {unit}", unit=unit): max(turns),
                "turns": len(turns),
                "machine busy": say("yes") if self.busy else say("no"),
            }
            for name, turns in self.values.items()
        ]


def in_turn(contenders: Mapping[str, Callable[[], float]], *, turns: int = N_TURNS, unit: str = "ms") -> Comparison:
    """Measure two contenders A B A B ..., each call giving one value: what changes meanwhile meets both alike."""
    values: dict[str, list[float]] = {name: [] for name in contenders}
    with BusyWatch() as watch:
        for _ in range(turns):
            for name, measure in contenders.items():
                values[name].append(measure())
    return Comparison(values, unit, watch.share)
