"""Every quirk against the mock's known truth: the client finds each token within 5 % or 2 ms of where it was."""

from __future__ import annotations

import pytest

from labkit.diagnose.dialects import Ask
from labkit.diagnose.quirks import Quirks
from labkit.diagnose.simulated import SimulatedServer
from labkit.diagnose.stream import Stream, read_stream

PROMPT = "word " * 100


def ask(quirks: Quirks, n_new: int = 40) -> tuple[Stream, SimulatedServer]:
    server = SimulatedServer(quirks)
    return read_stream(server.record(Ask(PROMPT, n_new))), server


def near(found: list[float], truth: tuple[float, ...]) -> bool:
    return len(found) == len(truth) and all(
        abs(a - b) <= max(0.002, 0.05 * b) for a, b in zip(found, truth, strict=True)
    )


QUIRKS = {
    "plain": Quirks(),
    "completions": Quirks(dialect="openai-completions"),
    "tgi": Quirks(dialect="tgi"),
    "triton": Quirks(dialect="triton"),
    "no usage": Quirks(says_usage=False),
    "no role": Quirks(role_first=False),
    "split": Quirks(split=True),
    "split crlf": Quirks(split=True, line_end="\r\n"),
    "cr": Quirks(split=True, line_end="\r"),
    "pings": Quirks(ping_s=0.005, split=True, line_end="\r\n", prefill_tok_s=200),
    "silent tokens": Quirks(empty_events=5),
    "merged": Quirks(tokens_per_event=4),
    "merged, tgi": Quirks(tokens_per_event=4, dialect="tgi"),
    "merged by 7, split": Quirks(tokens_per_event=7, split=True),
    "fast": Quirks(decode_s=0.001, prefill_tok_s=50_000),
    "slow": Quirks(decode_s=0.4, prefill_tok_s=20),
    "cold and timed": Quirks(cold_s=3.0, says_timings=True),
    "queue": Quirks(queue_s=1.0),
}


@pytest.mark.parametrize("name", QUIRKS)
@pytest.mark.parametrize("seed", range(3))
def test_the_true_times_are_found(name, seed):
    found, server = ask(Quirks(**{**vars(QUIRKS[name]), "seed": seed}))
    (truth,) = server.truths
    assert near([token.at_s for token in found.tokens], truth.sent_s) or QUIRKS[name].dialect == "tgi"
    assert near([token.made_s for token in found.tokens], truth.made_s) or name == "merged, tgi"
    assert found.text == truth.text
    assert found.complete


def test_a_broken_connection_keeps_what_came():
    found, server = ask(Quirks(drop_after=10))
    assert len(found.tokens) == 10
    assert near([t.at_s for t in found.tokens], server.truths[0].sent_s)
    assert not found.complete


def test_an_error_under_200():
    found, _ = ask(Quirks(error_after=10))
    assert (len(found.tokens), found.complete) == (10, False)
    assert "told to" in (found.error or "")


def test_a_buffer_moves_the_first_token_and_leaves_the_last():
    plain, _ = ask(Quirks(jitter=0))
    held, server = ask(Quirks(jitter=0, buffer_bytes=4096))
    assert near([t.at_s for t in held.tokens], server.truths[0].sent_s)
    assert (held.first_token_s or 0) > 3 * (plain.first_token_s or 0)
    assert held.last_token_s == pytest.approx(plain.last_token_s, rel=0.01)
    assert len(held.bursts) <= 4 < len(plain.bursts)


def test_a_slow_reader_is_seen_in_its_own_time():
    slow, _ = ask(Quirks(client_s=0.05))
    quick, _ = ask(Quirks())
    assert (slow.client_share or 0) > 0.9
    assert quick.client_share == 0


def test_a_repeated_prompt_is_cached_and_says_so():
    server = SimulatedServer(Quirks(prefix_cache=True, prefill_tok_s=500, jitter=0))
    fresh, again = (read_stream(server.record(Ask(PROMPT, 4))) for _ in range(2))
    assert (fresh.cached_tokens, again.cached_tokens) == (0, 96)
    assert (again.first_token_s or 0) < 0.3 * (fresh.first_token_s or 0)


def test_slots_make_others_wait():
    server = SimulatedServer(Quirks(n_slots=2, jitter=0, says_timings=True))
    found = [read_stream(each) for each in server.record_all([Ask(f"{n} {PROMPT}", 20) for n in range(6)])]
    first = sorted(each.first_token_s or 0 for each in found)
    assert first[2] > first[1] + 0.3  # the third waits for somebody's whole answer
    assert max(each.timings["queue_ms"] for each in found) > 300


def test_a_setting_out_of_range():
    with pytest.raises(ValueError, match="must be at least 1"):
        Quirks(n_slots=0)
