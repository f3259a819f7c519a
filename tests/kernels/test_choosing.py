"""A compiled step that looks its token up and chooses the next one: the same tokens as from its logits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from labkit.backends import fused as fused_backend
from labkit.backends import fused_step as fused
from labkit.perf.timer import NULL_TIMER, Timer
from labkit.quant import W8A8, Int4, Int8
from tests.kernels.caches import CACHES, build_cache
from tests.kernels.compare import cache_for, quantize, run
from tests.kernels.families import FAMILIES, random_model

WEIGHTS = [None, Int8(), W8A8(), Int4(group_size=32), Int4(group_size=32, head="int4")]


def never():
    return False


def choose(step, token_id, timer=NULL_TIMER):
    return step.choose_next(token_id, more=True, timer=timer, should_stop=never)()


def both(transformer, make_cache, n_threads=2, n_new=12):
    """Tokens that a step chose, and those from the logits of another."""
    with torch.inference_mode():
        steps = [fused.FusedStep(transformer, make_cache(), n_threads) for _ in range(2)]
        prompt = torch.arange(5)
        tokens = [int(run(step, prompt, (5,)).argmax()) for step in steps]
        got, wanted = [tokens[0]], [tokens[1]]
        for _ in range(n_new):
            got.append(choose(steps[0], got[-1]))
            wanted.append(int(run(steps[1], torch.tensor([wanted[-1]]), (1,)).argmax()))
    assert steps[0].cache.n_tokens() == steps[1].cache.n_tokens() == 5 + n_new
    return got, wanted


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_the_largest_logit(family, weights):
    if isinstance(weights, Int4) and family == "long":
        pytest.skip("int4 groups of 32 do not divide its widths")
    transformer = quantize(random_model(FAMILIES[family]), weights)
    got, wanted = both(transformer, lambda: cache_for(transformer))
    assert got == wanted


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_in_bf16_the_looked_up_row_is_rounded_as_the_models_own(weights):
    transformer = quantize(random_model(FAMILIES["llama"]).to(torch.bfloat16), weights)
    got, wanted = both(transformer, lambda: cache_for(transformer, torch.bfloat16))
    assert got == wanted


@pytest.mark.parametrize("form", [name for name in CACHES if name != "none"])
def test_on_every_cache_that_remembers(form):
    transformer = random_model(FAMILIES["llama"])
    got, wanted = both(transformer, lambda: build_cache(form, transformer), n_new=30)
    assert got == wanted


@pytest.mark.parametrize("n_threads", [1, 2, 3])
def test_shares_of_the_vocabulary_are_put_together(n_threads):
    """Each token in turn is the largest, tied with one that comes later: in every thread's share, and at its ends."""
    config = replace(FAMILIES["untied, multi-query"], head_bias=True)
    transformer = random_model(config)
    transformer.head.weight.data.zero_()
    with torch.inference_mode():
        for token_id in range(config.vocab_size):
            bias = torch.full((config.vocab_size,), -1.0)
            bias[token_id] = bias[(token_id + config.vocab_size) // 2] = -0.5
            transformer.head.bias = torch.nn.Parameter(bias, requires_grad=False)  # in place would not be noticed
            step = fused.FusedStep(transformer, cache_for(transformer), n_threads)
            run(step, torch.arange(5), (5,))
            assert choose(step, 1) == token_id


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("nan")])
@pytest.mark.parametrize("at", [0, 50, 100])
def test_no_token_where_a_logit_is_not_finite(value, at):
    transformer = random_model(FAMILIES["untied, multi-query"])
    transformer.head.weight.data[at] = value
    with torch.inference_mode():
        step = fused.FusedStep(transformer, cache_for(transformer), 2)
        run(step, torch.arange(5), (5,))
        assert choose(step, 1) == -1


def test_its_phases_are_the_steps_and_cover_it():
    transformer = random_model(FAMILIES["llama"])
    timer = Timer()
    with torch.inference_mode():
        step = fused.FusedStep(transformer, cache_for(transformer), 2)
        run(step, torch.arange(5), (5,))
        timer.begin()
        for _ in range(5):
            timer.begin_step("decode")
            choose(step, 1, timer)
        timer.end_step()
    for record in timer.steps:
        assert {"embed", "attention", "ffn", "norm", "lm_head", "sample", "schedule"} <= set(record.phases)
        assert all(seconds >= 0 for seconds in record.phases.values())
        assert sum(record.phases.values()) <= record.end_s - record.start_s + 1e-6


def test_while_it_is_compiled_there_are_logits_only(monkeypatch):
    class Slow:
        state, reason, is_ready = "compiling", "", False

        def ready(self, timeout_s=0.0):
            return self.is_ready

    slow = Slow()
    monkeypatch.setattr(fused_backend, "compilation", lambda: slow)
    transformer = random_model(FAMILIES["llama"])
    cache = cache_for(transformer)
    waiting = fused_backend.WaitingStep(transformer, cache, lambda: fused.FusedStep(transformer, cache, 2))
    options = {"more": True, "timer": NULL_TIMER, "should_stop": never}
    with torch.inference_mode():
        run(waiting, torch.arange(5), (5,))
        assert waiting.choose_next(1, **options) is None
        assert cache.n_tokens() == 5
        wanted = int(run(waiting, torch.tensor([1]), (1,)).argmax())
        cache.truncate(5)
        slow.is_ready = True
        assert choose(waiting, 1) == wanted


@pytest.mark.parametrize("token_id", [-1, 101, 2**40])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_token_outside_the_vocabulary_is_refused_and_nothing_lost(family, token_id):
    transformer = random_model(FAMILIES[family])
    with torch.inference_mode():
        step = fused.FusedStep(transformer, cache_for(transformer), 2)
        run(step, torch.arange(5), (5,))
        with pytest.raises(IndexError, match="not in the vocabulary of 101"):
            choose(step, token_id)
        with pytest.raises(IndexError, match="not in the vocabulary of 101"):
            run(step, torch.tensor([token_id]), (1,))
        assert step.cache.n_tokens() == 5
        choose(step, 1)


NO_WORK = ("empty", "detach", "lift_fresh")


def test_a_step_asks_pytorch_for_nothing_large():
    """PyTorch works on a vocabulary with threads of its own, which then look for more work where the next step's are:
    a copy of the logits alone doubled a step's time."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            if isinstance(made, torch.Tensor) and not made._is_view():
                seen.append((str(func), made.numel()))
            return made

    config = replace(FAMILIES["llama"], vocab_size=50_000)
    transformer = random_model(config)
    step = fused.FusedStep(transformer, cache_for(transformer), 2)
    with torch.no_grad():
        run(step, torch.arange(5), (5,))
        run(step, torch.tensor([7]), (1,))
        with Sizes():
            logits = step(torch.tensor([8]), timer=NULL_TIMER, should_stop=never)
            step.choose_next(9, more=True, timer=NULL_TIMER, should_stop=never)()
    assert logits.shape == (1, 50_000)
    assert [made for made in seen if made[1] > 10_000 and made[0].split(".")[1] not in NO_WORK] == []
