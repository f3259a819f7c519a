"""The race's lanes: what stands in them at one moment of the replay."""

from __future__ import annotations

import html
import re

from labkit.ui.panels.race import SHOWN_PROMPT, lanes_html

NAMES, TIMES = ("A", "B"), ([0.1, 0.2], [1.0, 2.0])


def texts_of(page: str) -> list[str]:
    lanes = re.findall(r'class="lk-lane-text">(.*?)</div>', page, flags=re.S)
    return [html.unescape(re.sub(r"<[^>]+>", "", lane)) for lane in lanes]


def test_a_lane_begins_with_the_prompt_that_it_goes_on_from():
    page = lanes_html(NAMES, ("<upon> a", ""), TIMES, 0.5, "Once")
    assert texts_of(page) == ["Once<upon> a", "Once"]
    assert "done after 0.20 s" in page
    assert "0 of 2 tokens" in page


def test_of_a_long_prompt_its_end_is_shown():
    page = lanes_html(NAMES, ("", ""), TIMES, 0.0, "x" * 500 + "end")
    assert all(text.startswith("… ") and text.endswith("end") for text in texts_of(page))
    assert len(texts_of(page)[0]) == SHOWN_PROMPT + 2
