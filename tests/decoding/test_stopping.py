"""Stop strings over every way of cutting the text into pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.decoding import StopStrings


def until_stop(text: str, stops: list[str]) -> str:
    """The obvious definition: everything before the earliest end of a stop string, cut where that one begins."""
    ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
    return text[: min(ends)[1]] if ends else text


@given(text=st.text("ab ", max_size=30), stop=st.text("ab ", min_size=1, max_size=4), data=st.data())
def test_any_cut_of_the_text_gives_the_same(text, stop, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    watcher = StopStrings([stop])
    shown = "".join(watcher.push(piece) for piece in pieces)
    shown += "" if watcher.hit else watcher.flush()
    assert shown == until_stop(text, [stop])
    assert watcher.hit == (stop in text)


def test_text_is_held_back_only_while_it_may_be_a_stop():
    stop = StopStrings(["END"])
    assert [stop.push(c) for c in "aEbENcEND!"] == ["a", "", "Eb", "", "", "ENc", "", "", "", ""]
    assert stop.hit


def test_the_earliest_of_several_stops_wins():
    stop = StopStrings(["\n\n", "User:"])
    assert stop.push("Yes. User: no\n\n") == "Yes. "
    assert stop.hit
    assert stop.push("more") == stop.flush() == ""


def test_without_stops_everything_passes():
    stop = StopStrings([])
    assert (stop.push("a"), stop.flush(), stop.hit) == ("a", "", False)


@pytest.mark.parametrize("wrong", ["END", [""], [3]])
def test_stops_must_be_a_list_of_strings(wrong):
    with pytest.raises(ValueError, match="stop must be a list of non-empty strings"):
        StopStrings(wrong)
