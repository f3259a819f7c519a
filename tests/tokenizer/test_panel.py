"""Notebook 01's widgets: what they show is what the tokenizer says."""

from __future__ import annotations

import html as html_module
import re
from itertools import pairwise

import pytest

from labkit.tokenizer import bpe
from labkit.ui import lesson
from labkit.ui.panels import token_bill
from labkit.ui.panels import tokenizer as panel


@pytest.fixture(scope="module")
def model():
    return bpe.train(["low lower lowest <b> & naïve"], bpe.N_BYTES + 5)


def shown(view: str) -> list[str]:
    return [html_module.unescape(chip) for chip in re.findall(r"<li[^>]*>(.*?)</li>", view, re.DOTALL)]


def test_the_slider_shows_the_merges_in_use(model):
    slider = panel.MergeSlider(model, "lowest")
    assert shown(slider.view.value) == list("lowest")
    slider.next_button.click()
    assert slider.slider.value == 1
    assert shown(slider.view.value) == ["lo", "w", "e", "s", "t"]
    assert "Merge 1: <code>l</code> and <code>o</code> became <code>lo</code>, seen 3 times" in slider.view.value
    slider.slider.value = len(model.merges)
    assert slider.n_tokens == len(model.encode("lowest"))


def test_text_is_escaped_and_bytes_are_shown_in_hex(model):
    slider = panel.MergeSlider(model, "<b>\n ï")
    assert shown(slider.view.value) == ["<", "b", ">", "⏎", "·", "C3", "AF"]
    assert "<b>\n" not in slider.view.value


def test_long_texts_are_shown_in_part(model):
    slider = panel.MergeSlider(model, "x" * 1000)
    assert shown(slider.view.value)[-1] == "… and 600 more"
    assert slider.n_tokens == 1000


def test_the_token_view_follows_the_text(smollm2_metadata):
    tokenizer = panel.default_tokenizer()
    view = panel.TokenView(tokenizer, "a  12")
    assert shown(view.view.value) == ["a", "··", "1", "2"]
    view.text.value = "Hi"
    assert view.ids == tokenizer.encode("Hi")


@pytest.mark.parametrize("vocabulary", token_bill.VOCABULARIES)
@pytest.mark.parametrize("unit", token_bill.UNITS)
def test_the_bill(vocabulary, unit):
    fields = {
        "vocabulary": lesson.choice("Vocabulary", token_bill.VOCABULARIES, vocabulary),
        "unit": lesson.choice("Show", token_bill.UNITS, unit),
    }
    experiment = lesson.Experiment("?", token_bill.token_bill, fields)
    experiment.run_button.click()
    result = experiment.wait()
    tokenizer = token_bill.VOCABULARIES[vocabulary]()
    counted = {name: [len(tokenizer.encode(text)) for text in texts] for name, texts in token_bill.SENTENCES.items()}
    assert result.data["tokens"] == counted
    bars, ceiling = result.figure.data
    assert list(bars.x)[-1] == pytest.approx(result.rows[0][unit])
    assert all(value <= most + 1e-9 for value, most in zip(bars.x, ceiling.x, strict=True)), "above its ceiling"
    ratios = sorted(a / b for a, b in zip(counted["Hindi"], counted["English"], strict=True))
    assert result.data["times English"]["Hindi"] == ratios[1]


def test_the_exercise_accepts_the_real_thing_and_refuses_overlaps():
    def overlapping(ids, pair, token_id):
        return [token_id for a in pairwise(ids) if a == pair] or ids

    assert lesson.check(bpe.merge, panel.MERGE)
    assert not lesson.check(overlapping, panel.MERGE)
