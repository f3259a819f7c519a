"""What is shown is escaped, readable and fetched from nowhere."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pandas as pd
import plotly.graph_objects as go
import pytest

from labkit.perf import timer
from labkit.ui import html, narrow, theme

UI = Path(theme.__file__).parent


def luminance(color: str) -> float:
    channels = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_every_phase_of_the_timer_has_its_own_look():
    assert list(theme.PHASES) == list(timer.PHASES)
    looks = {(look.color, look.pattern) for look in theme.PHASES.values()}
    assert len(looks) == len(theme.PHASES)


@pytest.mark.parametrize("name", theme.PHASES)
def test_text_on_a_phase_is_readable(name):
    assert contrast(theme.PHASES[name].ink, theme.PHASES[name].color) >= 4.5


def test_figure_text_reads_on_light_and_dark():
    assert min(contrast(theme.NEUTRAL, background) for background in ("#ffffff", "#111111")) >= 4


def test_a_figure_is_transparent_and_its_axes_are_named():
    figure = theme.figure_layout(go.Figure(go.Scatter(x=[1], y=[2], **theme.series(3))), x="tokens", y="ms")
    assert figure.layout.paper_bgcolor == figure.layout.plot_bgcolor == "rgba(0,0,0,0)"
    assert (figure.layout.xaxis.title.text, figure.layout.yaxis.title.text) == ("tokens", "ms")


def test_series_differ_by_more_than_colour():
    assert len({(theme.series(i)["line"]["dash"], theme.series(i)["marker"]["symbol"]) for i in range(6)}) == 6


@pytest.mark.parametrize("text", ["<script>alert(1)</script>", "<img src=x onerror=alert(1)>", '"><b>'])
def test_text_is_never_interpreted(text):
    for shown in (html.prose(text), html.table([{"a": text}], text), html.table({text: text})):
        assert not re.search(r"<(script|img|b)\b", shown)


def test_a_table_says_what_it_is():
    shown = html.table(pd.DataFrame({"phase": ["ffn", "norm"], "ms": [12.34, 0.5]}), "Times")
    assert "<caption><span>Times</span></caption>" in shown
    assert shown.count('scope="col"') == 2
    assert shown.count('scope="row"') == 2
    assert re.search(r'<td class="is-number">12\.3</td>', shown)
    assert "nothing yet" in html.table([], "Times")


def test_nothing_of_ours_is_fetched_from_elsewhere():
    for path in [*UI.glob("static/*"), *UI.glob("static/jupyter/**/*.*")]:
        if path.is_file():
            assert not re.search(r"https?://|//cdn|@import|import\s*\(|eval\(", path.read_text()), path.name


def test_only_the_api_that_colab_has():
    """ipywidgets 7.7.1 knows no Stack, TagsInput, ColorsInput, TimePicker, and no titles= or gap=."""
    newer = re.compile(r"\bw\.(Stack|TagsInput|ColorsInput|\w*TimePicker|\w*DatetimePicker)\b|\btitles=|\bgap=")
    for path in UI.rglob("*.py"):
        assert not newer.search(path.read_text(encoding="utf-8")), path.name


def test_a_figures_words_are_broken_for_a_phone():
    bars = go.Bar(y=["a name of several words"], x=[1], orientation="h", name="predicted: what a formula says of it")
    figure = theme.figure_layout(go.Figure(bars), x="per cent of what is allowed (striped: too much)")
    figure.add_vline(x=1, annotation_text="the most that this machine's memory allows")
    spec = narrow.fit(json.loads(figure.to_json()))
    trace, layout = spec["data"][0], spec["layout"]
    broken = [trace["name"], trace["y"][0], layout["xaxis"]["title"]["text"], layout["annotations"][0]["text"]]
    assert all(len(line) <= 28 for words in broken for line in words.split("<br>"))
    assert trace["name"].replace("<br>", " ") == "predicted: what a formula says of it", "no word is lost"
    assert narrow.wrapped("unbreakable" * 4, 10) == "unbreakable" * 4
    counted = theme.figure_layout(go.Figure(go.Bar(y=[1, 2], x=[1, 2], orientation="h")), x="seconds since they came")
    title = narrow.fit(json.loads(counted.to_json()))["layout"]["xaxis"]["title"]["text"]
    assert title == "seconds since they came", "numbers at the other axis leave room for one line"
