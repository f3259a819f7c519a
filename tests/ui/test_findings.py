"""Sentences that lessons compute: whatever a machine measured, none of them says the opposite of the numbers."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.ui import findings
from labkit.ui.compare import Comparison, in_turn

# Made-up results of the kind that lessons 03, 05, 06 and 07 give on a fast machine, a slow one and a busy one,
# chosen so that each branch of a sentence is taken. They are not recordings.
MACHINES = {
    "fast": {
        "crossing": {"lengths": [128, 512, 1024], "crossing": None, "crossings": [], "counted_crossing": 1537},
        "toggle": ([9.0] * 6 + [10.0] + [8.6] * 6, {"none": 9.0, "contiguous": 8.6}),
        "climb": {"ratio": 1.08, "work": [1.0, 32.0]},
        "dots": [(1, 6.0, 0.7, 82.0), (64, 14.0, 61.0, 38.0)],
    },
    "slow": {
        "crossing": {"lengths": [128, 512, 1024], "crossing": 682, "crossings": [640, 700], "counted_crossing": 1537},
        "toggle": ([40.0, 44.0, 47.0, 50.0, 53.0, 56.0, 60.0] + [21.0] * 6, {"none": 50.0, "contiguous": 21.0}),
        "climb": {"ratio": 4.1, "work": [1.0, 32.0]},
        "dots": [(1, 23.0, 1.9, 78.0), (64, 160.0, 55.0, 14.0)],
    },
    "busy": {
        "crossing": {"lengths": [128, 512, 1024], "crossing": 128, "crossings": [128, 361], "counted_crossing": 1537},
        "toggle": ([90.0] * 6 + [70.0] + [88.0] * 6, {"none": 90.0, "contiguous": 88.0}),
        "climb": {"ratio": 0.8, "work": [1.0, 32.0]},
        "dots": [(1, 300.0, 0.2, 7.0), (64, 900.0, 8.0, 3.0)],
    },
}


def dots(rows):
    return [dict(zip(("tokens together", "ms", "MFU %", "MBU %"), row, strict=True)) for row in rows]


def toggle(times, medians):
    n_off = 7
    used = ["none"] * (n_off) + ["contiguous"] * (len(times) - n_off + 1)
    return {"used": used, "times_ms": times, "medians_ms": medians}


@pytest.mark.parametrize("machine", MACHINES)
def test_no_sentence_contradicts_what_a_machine_measured(machine):
    seen = MACHINES[machine]
    crossing = seen["crossing"]
    words = findings.crossing(crossing)
    assert ("did not catch up" in words) == (crossing["crossing"] is None)
    assert ("earlier" in words) == (crossing["crossing"] is not None and crossing["crossing"] < 1537 / 1.15)

    times, medians = seen["toggle"]
    actual, words = findings.toggled(toggle(times, medians))
    ratio = medians["none"] / medians["contiguous"]
    assert ("no difference" in words) == (ratio < 1.15)
    assert (actual is None) == (ratio < 1.15)

    words = findings.climbed(seen["climb"])
    assert ("hardly climbed" in words) == (seen["climb"]["ratio"] < 1.15)

    one, many, gain = findings.roofline(dots(seen["dots"]))
    for words, (_, _, mfu, mbu) in zip((one, many), seen["dots"], strict=True):
        assert ("neither" in words) == (max(mfu, mbu) < 50)
        assert ("memory binds" in words) == (mbu >= 50 and mbu >= mfu)
        assert ("arithmetic binds" in words) == (mfu >= 50 and mfu > mbu)
    took = seen["dots"][1][1] / seen["dots"][0][1]
    assert f"took {took:.1f} times" in gain


def test_texts_that_part_are_a_finding_and_say_where():
    assert "chose the same 3 tokens" in findings.same_text([1, 2, 3], [1, 2, 3], ("a", "b"))
    assert "parted at token 3" in findings.same_text([1, 2, 3, 4], [1, 2, 9, 4], ("a", "b"))
    assert "parted at token 3" in findings.same_text([1, 2, 3], [1, 2], ("a", "b"))


def test_losses_name_the_least_and_the_worst():
    def lost(error, change):
        return SimpleNamespace(logit_error=error, perplexity_change=change)

    data = {"int8": lost(0.04, 0.0), "int4": lost(0.2, 0.3)}
    data |= {"sliding 128, 4 sinks": lost(0.5, 0.1), "sliding 128, no sinks": lost(0.9, 4.0)}
    said = findings.losses(data)
    assert said[0].startswith("**int8**")
    assert "4.0 %" in said[0]
    assert said[1].startswith("**sliding 128, no sinks**")
    assert "decide" in said[2]
    data["sliding 128, no sinks"] = lost(0.5, 0.1)
    assert "made no difference" in findings.losses(data)[2]


times = st.lists(st.floats(0.5, 100.0), min_size=1, max_size=5)


@given(times, st.randoms())
@settings(max_examples=60, deadline=None)
def test_a_comparison_never_names_the_wrong_winner(first, random):
    second = [max(0.1, value * random.uniform(0.5, 2.0)) for value in first]
    words = Comparison({"A": first, "B": second}).words()
    pairs = [b / a for a, b in zip(first, second, strict=True)]
    if match := re.match(r"\*\*(.)\*\* took ([\d.]+) times as long as \*\*(.)\*\*", words):
        slower = match[1]
        assert all(ratio > 1 for ratio in pairs) if slower == "B" else all(ratio < 1 for ratio in pairs)
        assert float(match[2]) >= 1.0
    else:
        assert "No difference" in words
        mixed = min(pairs) <= 1 <= max(pairs)
        a, b = (sorted(values)[len(values) // 2] for values in (first, second))
        assert mixed or len(first) % 2 == 0 or abs(b / a - 1) <= 0.05


def test_contenders_take_turns():
    order = []
    found = in_turn({"A": lambda: order.append("A") or 1.0, "B": lambda: order.append("B") or 2.0}, turns=3)
    assert order == ["A", "B"] * 3
    assert found.medians == (1.0, 2.0)
    with pytest.raises(ValueError, match="two contenders"):
        Comparison({"A": [1.0]})
