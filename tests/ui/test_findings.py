"""Sentences that lessons compute: whatever a machine measured, none of them says the opposite of the numbers."""

from __future__ import annotations

import re
from itertools import accumulate, pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.ui import findings
from labkit.ui.compare import Comparison, in_turn
from labkit.ui.panels import batching, cache_toggle, capstone, quantization, race, roofline
from labkit.ui.recorded import recording

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


# Lessons 09 and 14 on the same three: bytes are counted and alike, times are made up.
TOKEN_MS = {
    "fast": {"unpacked": 9.0, "stored": 4.0, "int8": 5.0, "int4": 3.2, "int3": 30.0},
    "slow": {"unpacked": 40.0, "stored": 41.0, "int8": 39.5, "int4": 40.5, "int3": 300.0},
    "busy": {"unpacked": 90.0, "stored": 130.0, "int8": 60.0, "int4": 140.0, "int3": 95.0},
}
MEGABYTES = {"unpacked": 538.0, "stored": 97.0, "int8": 143.0, "int4": 76.0, "int3": 59.0}


def recorded_toggle():
    return cache_toggle.draw_recorded(recording("cache-toggle").data)


def contradictions(said: str) -> list[str]:
    """Phrases that deny themselves: a gain below one, a loss below one."""
    gains = re.findall(r"([\d.]+) times\*{0,2} (?:less time|as long|as fast|less\b|more\b)", said)
    return [gain for gain in gains if float(gain) < 1.0]


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


@pytest.mark.parametrize("machine", TOKEN_MS)
def test_fewer_bits_are_called_faster_only_where_they_were(machine):
    ms = TOKEN_MS[machine]
    rows = [
        {"weights": name, "MB": MEGABYTES[name], "perplexity": 10.0, "ms a token": ms[name], "computed by": "fused"}
        for name in MEGABYTES
    ]
    data = {"rows": rows, "busy": machine == "busy"}
    said = [quantization._weighed(data), *quantization.found(data)]
    assert not contradictions(" ".join(said))
    for sentence, name in ((said[0], "int4"), (said[2], "stored"), (said[3], "int8")):
        ratio = ms["unpacked"] / ms[name]
        assert ("times less time" in sentence) == (ratio >= findings.SAME), sentence
        assert ("times as long" in sentence) == (ratio <= 1 / findings.SAME), sentence
    assert ("no faster here" in said[1]) == (ms["unpacked"] / ms["int4"] < 1.05)

    def request(name):
        return {"weights": name, "short: first token, ms": 3 * ms[name], "long: per token, ms": ms[name]}

    helped = capstone.where_it_helps([request("unpacked"), request("stored")])
    ratio = ms["unpacked"] / ms["stored"]
    assert helped.count("times less") == (2 if ratio >= 1.1 else 0)
    assert helped.count("times more") == (2 if ratio <= 1 / 1.1 else 0)


def test_no_sentence_contradicts_what_was_recorded():
    """Real runs, of the machine that each names (``data/recorded``)."""
    result = recorded_toggle()
    medians = result.data["medians_ms"]
    actual, words = findings.toggled(result.data)
    assert ("no difference" in words) == (actual is None) == (medians["none"] / medians["contiguous"] < 1.15)
    assert not contradictions(f"{words} {result.summary}")
    for name in ("roofline", "roofline-plain"):
        seen = roofline.draw_recorded(recording(name).data).data["dots"]
        for words, dot in zip(findings.roofline(seen)[:2], (seen[0], seen[-1]), strict=True):
            assert ("neither" in words) == (max(dot["MFU %"], dot["MBU %"]) < 50)
    for name, draw in (("race", race.race_result), ("batching", batching.served_result)):
        compared = draw(recording(name).data).data["comparison"]
        slower = max(compared.values, key=lambda each: sorted(compared.values[each])[1])
        assert not compared.clear or compared.words().startswith(f"**{slower}** took")
        assert ("busy" in compared.words()) == compared.busy


@pytest.mark.parametrize("machine", MACHINES)
def test_a_summary_of_the_switch_says_which_way_it_went(machine):
    raw = recording("cache-toggle").data
    factor = {"fast": 1.0, "slow": 4.0, "busy": 0.0}[machine]  # 0: every token takes as long as the next
    traces = []
    for each in raw["traces"]:
        gaps = [b - a for a, b in pairwise(each["token_s"])]
        gaps = [0.5 if not factor else gap * factor for gap in gaps]
        traces.append(each | {"token_s": list(accumulate(gaps, initial=0.3)), "wall_s": 99.0})
    result = cache_toggle.draw_recorded(raw | {"traces": traces})
    assert not contradictions(result.summary)
    assert ("takes **as long**" in result.summary) == (not factor)


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
