"""The automatic draft length on simulated runs whose acceptance and costs are known."""

from __future__ import annotations

import random

import pytest

from labkit.decoding.draft_length import AutomaticLength, FixedLength, expected_tokens, speedup


def simulate(acceptance: float, row: float, guess: float, *, n_tokens: int, seed: int, later: float = 0.0) -> float:
    """Speed-up over plain decoding of a run in which a plain step takes 1, more or less. ``later``: what each row after
    the first costs on top."""
    rng, length = random.Random(seed), AutomaticLength()
    took, made = 0.0, 0
    while made < n_tokens:
        n = length.choose(n_tokens - made - 1)
        n_accepted = next((i for i in range(n) if rng.random() >= acceptance), n)
        draft_s, verify_s = n * guess, (1 + n * row + max(0, n - 1) * later) * rng.uniform(0.95, 1.05)
        length.learn(n, n_accepted, draft_s=draft_s, verify_s=verify_s)
        took, made = took + draft_s + verify_s, made + n_accepted + 1
    return made / took


COSTS = [(0.09, 0.06), (0.1, 0.2), (0.45, 0.06), (1.0, 0.1)]


@pytest.mark.parametrize(("row", "guess"), COSTS)
@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.6])
def test_it_never_loses_more_than_five_percent(row, guess, acceptance):
    for seed in range(10):
        assert simulate(acceptance, row, guess, n_tokens=128, seed=seed) > 0.95


@pytest.mark.parametrize(("row", "guess"), COSTS)
@pytest.mark.parametrize("acceptance", [0.5, 0.7, 0.9])
def test_it_finds_nearly_what_the_best_fixed_length_gives(row, guess, acceptance):
    best = max(speedup(acceptance, n, draft_cost=guess, verify_cost=1 + n * row) for n in range(9))
    reached = [simulate(acceptance, row, guess, n_tokens=400, seed=seed) for seed in range(10)]
    assert sum(reached) / 10 > 0.93 * best


@pytest.mark.parametrize("acceptance", [0.2, 0.4, 0.7])
def test_a_second_row_that_costs_much_does_not_spoil_the_first(acceptance):
    costs = [1.0, 1.08, 1.56, 2.04]
    best = max(speedup(acceptance, n, draft_cost=0.1, verify_cost=v) for n, v in enumerate(costs))
    reached = [simulate(acceptance, 0.08, 0.1, n_tokens=400, seed=seed, later=0.4) for seed in range(10)]
    assert sum(reached) / 10 > 0.94 * best


def test_it_notices_that_a_text_has_become_easy():
    length = AutomaticLength()
    for _ in range(60):
        n = length.choose(100)
        length.learn(n, 0, draft_s=0.05 * n, verify_s=1 + 0.1 * n)
    for _ in range(200):
        n = length.choose(100)
        length.learn(n, n, draft_s=0.05 * n, verify_s=1 + 0.1 * n)
    assert length.choose(100) >= 6


def test_the_room_is_kept():
    assert FixedLength(8).choose(3) == 3
    assert AutomaticLength().choose(0) == 0


def test_the_paper_s_own_examples():
    """arXiv 2211.17192, table of expected speed-ups; the bonus token counts."""
    assert speedup(0.8, 5, draft_cost=0.05, verify_cost=1.0) == pytest.approx(2.95, abs=0.01)
    assert speedup(0.5, 5, draft_cost=0.2, verify_cost=1.0) == pytest.approx(0.98, abs=0.01)
    assert expected_tokens(0.8, 3) == pytest.approx(1 + 0.8 + 0.64 + 0.512)
