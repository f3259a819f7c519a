"""Panels in Chinese, driven and then read: what is on them is Chinese, names and units apart."""

from __future__ import annotations

import re

import pytest

import labkit
from labkit import prompts, registry
from labkit.model.config import DTYPES
from labkit.perf.diagnosis import diagnose
from labkit.perf.machine import sheet
from labkit.perf.trace import Trace
from labkit.ui import lesson, words
from labkit.ui.language_switch import LanguageSwitch
from labkit.ui.machine import this_machine
from labkit.ui.panels.switchboard import Switchboard
from labkit.ui.session import shelf
from labkit.ui.verdict_note import finding_note
from tests.ui.visible import of_html, of_widget

TERMS = "token TTFT ITL KV GPU CPU GPTQ AWQ Python PyTorch labkit ffn norm lm head dtype auto Language"
UNITS = "ms s tok MB GB kB B p95"


@pytest.fixture(autouse=True)
def _in_chinese():
    words.choose("zh-CN")
    yield
    words.choose(None)


def english_in(texts, as_it_is=frozenset()) -> set[str]:
    """The English words in these texts that are no term, no unit and no name of a component or of this machine.
    ``as_it_is``: sentences of the library's own, such as why another backend computed."""
    infos = [info for kind in registry.KINDS for info in labkit.components(kind)]
    names = {info.name for info in infos} | {option.name.replace("_", " ") for info in infos for option in info.options}
    names |= {this_machine().cpu, *labkit.models(), *DTYPES}
    reasons = {info.unavailable for info in infos if info.unavailable}
    known = {word.lower() for word in f"{TERMS} {UNITS}".split()}
    left: set[str] = set()
    for text in texts:
        for name in sorted({*names, *reasons, *as_it_is}, key=len, reverse=True):
            text = text.replace(name, " ")
        left |= {word for word in re.findall(r"[A-Za-z][A-Za-z0-9]+", text) if word.lower() not in known}
    return left


def test_the_test_sees_english():
    assert english_in(["首 token 延迟 (TTFT)，见 contiguous，12 ms"]) == set()
    assert english_in(["完成 in 3 s"]) == {"in"}
    shown = of_html('<style>.a b</style><p title="Hint one">see <code>x y</code> it &lt;now&gt;</p>')
    assert [text.split() for text in shown] == [["Hint", "one"], ["see", "it", "<now>"]]


def test_the_switchboard(default_model):
    shelf.put(default_model)
    board = Switchboard(prompt="one_word", max_new_tokens=4)
    before = list(of_widget(board.widget))
    board.run_button.click()
    first = board.wait(120)
    board.switches.pickers["kv_cache"].field.value = "none"
    board.run_button.click()
    notes = {run.trace.meta.get("backend_note") or "–" for run in (first, board.wait(120))}
    after = list(of_widget(board.widget))
    shelf.clear()
    assert len(after) > len(before) > 50
    assert english_in([*before, *after], notes) == set()
    assert {"运行", "停止", "首 token 延迟"} <= set(after)
    assert "不同之处：KV 缓存。" in board.runs.value
    assert prompts.ready_prompt("one_word").text == board.switches.prompt.value, (
        "what the model reads is not translated"
    )


def test_the_parts_of_a_lesson(capsys):
    guess = lesson.predict("How many tokens will this machine write in one second?", unit="tok/s")
    guess.input.value = "3"
    guess.keep_button.click()
    lab = lesson.setup()
    shown = [*of_widget(guess.widget), *of_html(lab._repr_html_()), *of_widget(LanguageSwitch())]
    assert english_in(shown) <= {"English"} | set(re.findall(r"[a-z]+", "torch"))
    assert guess.verdict(6.0) == "你猜的是 3.00 tok/s，结果是 6.00 tok/s：是你所猜的 2.0 倍。"


def test_a_finding_about_a_run():
    steps = (0.0, 0.1, 0.2, 0.3)
    trace = Trace((), steps, 0.3, meta={"dtype": "fp32", "weights_bytes": 100_000_000, "kv_cache": "none"})
    found = diagnose(trace, machine=sheet("T4"), say=words.say)
    shown = list(of_html(finding_note(found)))
    assert english_in(shown, {sheet("T4").name, found.cause}) <= {
        "GFLOP",
        "MFU",
        "MBU",
        "cache",
    }  # a switch as code takes it
    assert "输出慢" in shown[0]
    assert "Slow to stream" in str(diagnose(trace, machine=sheet("T4")))


def test_the_menu_of_languages_keeps_the_choice(monkeypatch, tmp_path):
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path))
    monkeypatch.delenv("LABKIT_LANGUAGE", raising=False)
    words.choose(None)
    menu = LanguageSwitch()
    assert menu.field.value == "en"
    menu.field.value = "zh-CN"
    assert "简体中文" in menu.note.value
    words.choose(None)
    assert words.language() == "zh-CN"
