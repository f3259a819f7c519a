"""What a verified draft yields is distributed as the target says. The oracle is the definition of the sampler
(``shape_logits``, by PyTorch) and the multiplication of chances; the test is Pearson's chi-square."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch

from labkit.decoding import Sampler, Sampling
from labkit.decoding.drafters import Draft
from labkit.decoding.sampling import shape_logits
from labkit.decoding.speculative import verify

N = 20_000
SETTINGS = [
    Sampling(1.0),
    Sampling(0.6, top_k=4),
    Sampling(1.3, top_p=0.8),
    Sampling(1.0, min_p=0.15),
    Sampling(0.9, top_k=6, top_p=0.9, min_p=0.02, repetition_penalty=1.7),
]


def chi_square(counts: Counter, wanted: dict) -> float:
    """The statistic over the outcomes, in standard deviations from its mean (n - 1, variance 2 (n - 1))."""
    assert set(counts) <= {key for key, chance in wanted.items() if chance > 0}, "an impossible outcome came"
    likely = {key: chance for key, chance in wanted.items() if chance * N >= 5}
    rest = 1.0 - sum(likely.values())
    seen_rest = N - sum(counts[key] for key in likely)
    value = sum((counts[key] - N * chance) ** 2 / (N * chance) for key, chance in likely.items())
    n = len(likely) - 1
    if rest * N >= 5:
        value, n = value + (seen_rest - N * rest) ** 2 / (N * rest), n + 1
    return (value - n) / max(1.0, (2 * n) ** 0.5)


def distribution(logits: torch.Tensor, sampling: Sampling, seen: list[int]) -> list[float]:
    return (
        shape_logits(logits, sampling, torch.tensor(sorted(set(seen))) if seen else None).double().softmax(0).tolist()
    )


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_two_guesses_and_a_token_more(sampling):
    """A target and a draft whose logits depend on the token before; the tokens of a round, in every combination."""
    generator = torch.Generator().manual_seed(5)
    n_vocab, last = 5, 3
    target = torch.randn(n_vocab, n_vocab, generator=generator) * 1.5
    guess = target + torch.randn(n_vocab, n_vocab, generator=generator)
    sampler = Sampler(sampling, seed=1, device="cpu")
    sampler.remember([last])
    counts: Counter = Counter()
    for _ in range(N):
        before, ids, chances = last, [], []
        with sampler.aside():
            for _ in range(2):
                before, drawn_from = sampler.draw(guess[before])
                ids.append(before)
                chances.append(drawn_from)
        with sampler.aside():  # each sample begins anew
            made = verify(target[[last, *ids]], Draft(ids, chances), sampler)
            while len(made) < 3:  # a shorter round goes on as plain decoding does
                made.append(sampler(target[made[-1]]))
        counts[tuple(made)] += 1
    wanted = {}
    for path in product(range(n_vocab), repeat=3):
        chance, seen = 1.0, [last]
        for token in path:
            chance *= distribution(target[seen[-1]], sampling, seen)[token]
            seen.append(token)
        wanted[path] = chance
    assert chi_square(counts, wanted) < 5


def test_the_acceptance_is_what_the_paper_says():
    """alpha = sum of min(p, q) (arXiv 2211.17192, theorem 3.5)."""
    generator = torch.Generator().manual_seed(6)
    target, guess = torch.randn(2, 12, generator=generator)
    sampler = Sampler(Sampling(1.0), seed=2, device="cpu")
    p, q = (np.array(distribution(x, sampler.sampling, [])) for x in (target, guess))
    n_accepted = 0
    for _ in range(N):
        token, drawn_from = sampler.draw(guess)
        n_accepted += len(verify(torch.stack([target, target]), Draft([token], [drawn_from]), sampler)) == 2
    alpha = np.minimum(p, q).sum()
    assert abs(n_accepted / N - alpha) < 5 * (alpha * (1 - alpha) / N) ** 0.5


def test_a_chosen_guess_is_a_distribution_of_one_token():
    target = torch.randn(12, generator=torch.Generator().manual_seed(7))
    sampling = Sampling(1.1, top_k=7)
    sampler = Sampler(sampling, seed=3, device="cpu")
    counts = Counter(verify(torch.stack([target, target]), Draft([4]), sampler)[0] for _ in range(N))
    assert chi_square(counts, dict(enumerate(distribution(target, sampling, [])))) < 5


def test_a_guess_that_cannot_be_is_never_accepted():
    target = torch.tensor([5.0, 4.0, -3.0, -4.0])
    sampler = Sampler(Sampling(1.0, top_k=2), seed=4, device="cpu")
    proposed = np.array([0.0, 0.0, 0.5, 0.5])
    for _ in range(200):
        assert sampler.weigh(target, 2, proposed) in (0, 1)


def test_a_draft_like_the_target_is_always_accepted():
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(8))
    sampler = Sampler(Sampling(0.8), seed=5, device="cpu")
    for _ in range(200):
        drawn = [sampler.draw(row) for row in logits[:2]]
        assert len(verify(logits, Draft([t for t, _ in drawn], [q for _, q in drawn]), sampler)) == 3


def test_greedy():
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    sampler = Sampler(Sampling(), seed=0, device="cpu")
    assert verify(logits, Draft([1, 0]), sampler) == [1, 0, 2]
    assert verify(logits, Draft([1, 1]), sampler) == [1, 0]
    assert verify(logits, Draft([2, 0]), sampler) == [1]


def test_what_a_drafter_draws_is_forgotten():
    sampler = Sampler(Sampling(1.0, repetition_penalty=1e6), seed=0, device="cpu")
    logits = torch.tensor([30.0, 30.0, 30.0])  # less the penalty: as good as impossible
    sampler.remember([0])
    with sampler.aside():
        drawn = {sampler.draw(logits)[0] for _ in range(2)}
        assert drawn == {1, 2}
    chances = sampler.chances(logits)
    assert chances[0] < 0.5 * chances[1]
    assert chances[1] == pytest.approx(chances[2])


def test_logits_that_are_no_numbers_are_refused():
    sampler = Sampler(Sampling(1.0), seed=0, device="cpu")
    with pytest.raises(ValueError, match="not finite"):
        sampler.weigh(torch.tensor([float("nan"), 1.0]), 0, np.array([1.0, 0.0]))
