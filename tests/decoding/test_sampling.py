"""Sampling against transformers' logits processors, against the distribution it promises, and against its seed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit import registry
from labkit.decoding import Sampler, Sampling
from labkit.decoding.on_cpu import candidates
from labkit.decoding.sampling import shape_logits

V = 40


def logits_of(seed: int, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(V, generator=torch.Generator().manual_seed(seed)) * spread


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([0.2, 0.7, 1.0, 1.6]),
    top_k=st.sampled_from([0, 1, 5, 39, 40, 100]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    penalty=st.sampled_from([0.7, 1.0, 1.3]),
    seen=st.lists(st.integers(0, V - 1), max_size=12),
)
def test_shaped_logits_equal_transformers(seed, temperature, top_k, top_p, min_p, penalty, seen):
    process = pytest.importorskip("transformers.generation.logits_process", reason="transformers is the oracle")
    logits = logits_of(seed)
    scores, ids = logits[None].clone(), torch.tensor([seen], dtype=torch.int64)
    chain = [process.RepetitionPenaltyLogitsProcessor(penalty)] if seen else []
    chain.append(process.TemperatureLogitsWarper(temperature))
    chain += [process.TopKLogitsWarper(top_k)] if top_k else []
    chain += [process.TopPLogitsWarper(top_p)] if top_p < 1 else []
    chain += [process.MinPLogitsWarper(min_p)] if min_p else []
    for step in chain:
        scores = step(ids, scores)
    sampling = Sampling(temperature, top_k, top_p, min_p, penalty)
    got = shape_logits(logits, sampling, ids[0] if seen else None)
    assert torch.equal(got.isfinite(), scores[0].isfinite())
    torch.testing.assert_close(got, scores[0])
    torch.testing.assert_close(chances_on_cpu(logits, sampling, seen), scores[0].softmax(0))


def chances_on_cpu(logits: torch.Tensor, sampling: Sampling, seen: list[int]) -> torch.Tensor:
    """What a sampler on a CPU draws from, as probabilities of all tokens."""
    found = candidates(logits.numpy(), sampling, seen)
    assert found is not None
    chances = np.zeros(len(logits))
    chances[slice(None) if found.ids is None else found.ids] = found.weights / found.weights.sum(dtype=np.float64)
    return torch.from_numpy(chances).float()


@pytest.mark.parametrize("spread", [0.0, 0.1, 2.0, 8.0], ids=lambda spread: f"spread {spread}")
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 0.9999])
@pytest.mark.parametrize("top_k", [0, 300])
def test_a_large_vocabulary_is_cut_alike_without_sorting_it(spread, top_p, top_k):
    """Flat and peaked: the nucleus holds p, and would not without its least likely member."""
    logits = torch.randn(20_000, generator=torch.Generator().manual_seed(1)) * spread
    everything = logits if top_k == 0 else torch.where(logits >= logits.topk(top_k).values[-1], logits, -torch.inf)
    chances = everything.double().softmax(0)
    kept = chances_on_cpu(logits, Sampling(1.0, top_k, top_p), []) > 0
    assert chances[kept].min() >= chances[~kept].max()
    assert chances[kept].sum() >= top_p - 1e-6
    assert kept.sum() == 1 or chances[kept].sum() - chances[kept].min() < top_p + 1e-6


@pytest.mark.parametrize("torch_draws", [False, True], ids=["on the CPU", "by PyTorch"])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.5),
        Sampling(temperature=1.3, top_k=6),
        Sampling(temperature=1.0, top_p=0.8),
        Sampling(temperature=1.0, min_p=0.1),
    ],
    ids=str,
)
def test_draws_follow_the_distribution(sampling, torch_draws):
    """Pearson's chi-squared over 5,000 draws stays under the bound that chance passes once in a million."""
    logits = logits_of(3, spread=1.0)[:10]
    chances = shape_logits(logits, sampling).softmax(0)
    sampler, n_draws = Sampler(sampling, seed=11, device="cpu"), 5_000
    if torch_draws:  # as on every other device
        sampler._chance = torch.Generator().manual_seed(11)
    counts = torch.tensor([sampler(logits) for _ in range(n_draws)]).bincount(minlength=10)
    assert int(counts[chances == 0].sum()) == 0
    possible = chances > 0
    expected = chances[possible] * n_draws
    chi_squared = float(((counts[possible] - expected) ** 2 / expected).sum())
    assert chi_squared < 45.1  # 1 - 1e-6 quantile with 9 degrees of freedom; fewer candidates have a lower one


def test_greedy_takes_the_largest_and_no_chance():
    logits = logits_of(5)
    assert {Sampler(Sampling(), seed=s, device="cpu")(logits) for s in range(20)} == {int(logits.argmax())}


def test_a_seed_reproduces_and_another_differs():
    def draws(seed: int) -> list[int]:
        sampler = Sampler(Sampling(temperature=1.0), seed=seed, device="cpu")
        return [sampler(logits_of(i)) for i in range(30)]

    assert draws(1) == draws(1)
    assert draws(1) != draws(2)


def test_two_runs_share_no_state():
    """A sampler draws from its own generator: neither torch's global one nor another run's changes it."""
    alone = Sampler(Sampling(temperature=1.0), seed=4, device="cpu")
    want = [alone(logits_of(i)) for i in range(10)]
    one, other = (Sampler(Sampling(temperature=1.0), seed=s, device="cpu") for s in (4, 5))
    got = []
    for i in range(10):
        torch.rand(3)
        other(logits_of(i))
        got.append(one(logits_of(i)))
    assert got == want


def test_the_penalty_remembers_the_prompt_and_each_draw():
    logits = torch.tensor([2.0, 1.9, -1.0, 1.8])
    sampler = Sampler(Sampling(repetition_penalty=2.0), seed=0, device="cpu")
    sampler.remember([0])
    assert [sampler(logits) for _ in range(3)] == [1, 3, 0]  # halved one after another: 1.0, 0.95, 0.9


def test_the_most_likely_token_always_stays():
    logits = torch.tensor([0.0, 5.0, 1.0])
    for sampling in (Sampling(1.0, top_k=1), Sampling(1.0, top_p=1e-9), Sampling(1.0, min_p=1.0)):
        assert Sampler(sampling, seed=0, device="cpu")(logits) == 1


@pytest.mark.parametrize("torch_draws", [False, True], ids=["on the CPU", "by PyTorch"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "bad", [[float("nan")] * 3, [0.0, float("nan"), 1.0], [0.0, float("inf"), 1.0], [-float("inf")] * 3]
)
def test_logits_that_are_no_numbers_are_refused(temperature, bad, torch_draws):
    sampler = Sampler(Sampling(temperature=temperature), seed=0, device="cpu")
    if torch_draws:
        sampler._chance = torch.Generator().manual_seed(0)
    with pytest.raises(ValueError, match="logits are not finite"):
        sampler(torch.tensor(bad))


@pytest.mark.parametrize("temperature", [1e-300, 1e-6, 1e30])
def test_a_temperature_at_either_end_draws_a_token(temperature):
    drawn = {
        Sampler(Sampling(temperature), seed=seed, device="cpu")(torch.tensor([0.0, 5.0, 1.0])) for seed in range(9)
    }
    assert drawn == {1} if temperature < 1 else len(drawn) > 1


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        ({"temperature": -0.1}, "temperature=-0.1: must be 0 or more"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"top_k": -1}, "top_k=-1: must be a whole number, 0"),
        ({"top_p": 0.0}, r"top_p=0.0: must be above 0 and at most 1"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"min_p": -0.2}, "min_p=-0.2: must be between 0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0: must be between 1e-6 and 1e6"),
    ],
)
def test_values_out_of_range_say_the_range(wrong, rule):
    with pytest.raises(ValueError, match=rule):
        Sampling(**wrong)


def test_the_ready_made_samplers_have_the_knobs_they_name():
    knobs = {info.name: [option.name for option in info.options] for info in registry.components("sampler")}
    assert knobs["greedy"] == []
    assert knobs["top-k"] == ["temperature", "top_k"]
    assert knobs["top-p"] == ["temperature", "top_p"]
    assert knobs["min-p"] == ["temperature", "min_p"]
    for name in knobs:
        component, config = registry.find("sampler", name)
        assert isinstance(component.build(config), Sampling)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 1.5}, "top_k=1.5: must be a whole number"),
        ({"top_k": True}, "whole number"),
        ({"repetition_penalty": 1e40}, "repetition_penalty=1e"),
        ({"repetition_penalty": 1e-40}, "between 1e-6 and 1e6"),
    ],
)
def test_numbers_that_no_step_can_use_are_refused_at_once(options, message):
    with pytest.raises(ValueError, match=message):
        Sampling(temperature=1.0, **options)


def test_the_smallest_top_p_leaves_the_likeliest_token():
    logits = torch.tensor([0.0, 3.0, 1.0])
    sampling = Sampling(temperature=1.0, top_p=5e-324)
    assert shape_logits(logits, sampling).isfinite().tolist() == [False, True, False]
    assert Sampler(sampling, seed=0, device=torch.device("cpu"))(logits) == 1
