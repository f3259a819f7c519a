"""Lesson 13's panels: the seal holds, the probes say what was put in, and a page asks no address that it may not."""

from __future__ import annotations

import pytest

from labkit.diagnose import replay
from labkit.diagnose.loopback import LoopbackServer
from labkit.diagnose.quirks import Quirks
from labkit.ui.panels import mystery, own_server
from labkit.ui.predict import Guess

PASTED = "".join(
    f"data: {event}\n\n"
    for event in (
        '{"choices":[{"delta":{"content":"<b>Hel</b>"}}]}',
        '{"choices":[{"delta":{"content":"lo"},"finish_reason":"stop"}]}',
        '{"choices":[],"timings":{"prompt_n":900,"prompt_ms":2400.0,"predicted_n":2,"predicted_ms":30.0}}',
        "[DONE]",
    )
)


@pytest.fixture(scope="module")
def servers():
    return mystery.suspects()


def test_the_seal_holds(servers):
    assert not any(fault.split("-")[0] in repr(servers) for fault in mystery.FAULTS)
    panel = mystery.panel(servers)
    panel.run_button.click()
    result = panel.wait()
    shown = panel.below.value.lower()
    assert result is not None
    assert not any(fault in shown for fault in mystery.FAULTS)
    assert shown.count("<svg") == 4


@pytest.mark.parametrize("seed", [13, 1, 2])
def test_the_probes_find_what_was_put_in(seed):
    sealed = mystery.suspects(seed)
    assert sorted(map(sealed.open, sealed.names)) == sorted(mystery.FAULTS)
    for name in sealed.names:
        assert sealed.report(name).verdict.cause == sealed.open(name)


def test_naming_them_all_is_a_full_score(servers):
    quiz = mystery.naming(servers)
    for idx, item in enumerate(quiz.items):
        quiz.radios[idx].value = item.right
        quiz.check_buttons[idx].click()
    assert quiz.score == 5


def test_each_change_helps_where_it_should(servers):
    """The mock's own arithmetic: a prompt read twice as fast, a buffer taken away, more slots."""
    rows = {row["fault"]: row for row in mystery.what_would_help(servers)}
    assert mystery.helped_by(list(rows.values())) == 2
    now = "as it is"
    assert rows["buffered"]["no buffer"] < 0.5 * rows["buffered"][now]
    assert rows["queue-bound"]["more sequences at once"] < 0.5 * rows["queue-bound"][now]
    assert rows["queue-bound"]["prompts 2x faster"] > 0.8 * rows["queue-bound"][now]


def test_a_guess_covers_the_figure_until_it_is_settled(servers, monkeypatch):
    monkeypatch.setenv("LABKIT_TEST", "0")
    guess = Guess("How many?", choices=["one", "two"])
    panel = mystery.panel(servers, guess)
    panel.run_button.click()
    panel.wait()
    assert "<svg" not in panel.below.value
    guess.skip_button.click()
    assert "<svg" in panel.below.value


def run(**values):
    panel = own_server.panel()
    for name, value in values.items():
        panel.fields[name].value = value
    panel.start()
    panel.runner.job.ended.wait(60)
    return panel


def test_a_pasted_recording_needs_no_network():
    panel = run(pasted=PASTED)
    assert panel.results[0].data.verdict.cause == "prefill-bound"
    assert "<b>Hel" not in panel.below.value


def test_nothing_is_sent_before_it_is_said():
    with LoopbackServer(Quirks(decode_s=0.001, prefill_tok_s=50_000)) as server:
        panel = run(url=server.url)
        assert "At most" in panel.below.value
        assert not server.jobs
        panel = run(url=server.url, send=own_server.SEND)
        assert server.jobs
    assert replay(panel.results[0].data.to_json()).verdict.cause == panel.results[0].data.verdict.cause


@pytest.mark.parametrize(
    ("listed", "url", "allowed"),
    [
        ("", "http://127.0.0.1:8000", False),
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000/v1", True),
        ("http://127.0.0.1:8000", "http://127.0.0.1:80001", False),
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000@evil.example", False),
        ("http://a:1, http://b:2/", "http://b:2", True),
        ("http://b:2", "https://b:2", False),
    ],
)
def test_under_voila_only_listed_servers(monkeypatch, listed, url, allowed):
    monkeypatch.setenv("SERVER_SOFTWARE", "voila/0.5")
    monkeypatch.setenv(own_server.ALLOW, listed)
    assert (own_server.refused(url) is None) is allowed


def test_a_refused_address_is_shown_kindly(monkeypatch):
    monkeypatch.setenv("SERVER_SOFTWARE", "voila/0.5")
    monkeypatch.delenv("LABKIT_TEST", raising=False)
    panel = run(url="http://127.0.0.1:9", send=own_server.SEND)
    assert "may not send" in panel.error.value
    assert own_server.ALLOW in panel.error.value
