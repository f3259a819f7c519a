"""The compiled pieces equal the reference on every family and cache. Dynamo traces them here; one test compiles."""

from __future__ import annotations

import shutil

import pytest
import torch

from labkit import backends
from labkit.backends import compiled
from labkit.quant import Int8
from tests.kernels.caches import build_cache
from tests.kernels.compare import cache_for, quantize, run
from tests.kernels.families import FAMILIES, NOT_COMPILED, random_model

CHUNKS = (5, 1, 1, 1, 4, *[1] * 10)
TRACED = "aot_eager"
"""Dynamo and autograd's tracer as in a real compilation, without the code at its end: seconds instead of minutes."""


@pytest.fixture(autouse=True)
def forget():
    yield
    torch._dynamo.reset()


def traced(transformer, compiler=TRACED):
    pieces = compiled.pieces_of(transformer, compiler)
    assert pieces.ready(None), pieces.reason
    return pieces


DENSE = [family for family in FAMILIES if "mixture" not in family]


@pytest.mark.parametrize("family", DENSE)
def test_pieces_equal_the_reference(family):
    transformer = random_model(FAMILIES[family])
    traced(transformer)
    ids = torch.arange(sum(CHUNKS)) * 7 % 101
    with torch.inference_mode():
        step = compiled.CompiledStep(transformer, cache_for(transformer))
        got = run(step, ids, CHUNKS)
        wanted = run(backends.ReferenceStep(transformer, cache_for(transformer)), ids, CHUNKS)
    assert step.computed_by == "compiled"
    assert (got - wanted).abs().max() <= 2e-5 * wanted.abs().max()


@pytest.mark.parametrize("cache", ["none", "paged", "int8", "sliding"])
def test_every_cache_stores_and_attends_as_always(cache):
    transformer = random_model(FAMILIES["llama"])
    traced(transformer)
    ids = torch.arange(sum(CHUNKS)) % 101
    with torch.inference_mode():
        steps = [
            kind(transformer, build_cache(cache, transformer))
            for kind in (compiled.CompiledStep, backends.ReferenceStep)
        ]
        got, wanted = (run(step, ids, CHUNKS) for step in steps)
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)


def test_layers_of_one_kind_are_traced_once_and_share_the_weights():
    transformer = random_model(FAMILIES["llama"])
    torch._dynamo.utils.counters.clear()
    pieces = traced(transformer)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2, "enter and leave, however many layers"
    assert pieces.blocks[0].ffn.up_proj.weight is transformer.layers[0].ffn.up_proj.weight


def test_the_reference_serves_until_the_pieces_are_ready(monkeypatch):
    transformer = random_model(FAMILIES["llama"])
    pieces = traced(transformer)
    waiting = {"now": True}
    monkeypatch.setattr(pieces, "ready", lambda timeout_s=0.0: not waiting["now"])
    with torch.inference_mode():
        step = compiled.CompiledStep(transformer, cache_for(transformer))
        first = run(step, torch.arange(4), (3, 1))
        assert step.computed_by == "reference"
        waiting["now"] = False
        then = run(step, torch.tensor([4]), (1,))
        wanted = run(backends.ReferenceStep(transformer, cache_for(transformer)), torch.arange(5), (3, 1, 1))
    assert step.computed_by == "compiled"
    assert "the first 2 steps were plain PyTorch" in step.reason
    torch.testing.assert_close(torch.cat((first, then)), wanted, rtol=1e-4, atol=1e-4)


def test_replaced_weights_are_compiled_anew():
    transformer = random_model(FAMILIES["llama"])
    before = traced(transformer)
    assert traced(transformer) is before
    transformer.layers[1].ffn.up_proj.weight = torch.nn.Parameter(
        torch.randn_like(transformer.layers[1].ffn.up_proj.weight), requires_grad=False
    )
    assert traced(transformer) is not before
    ids = torch.arange(6)
    with torch.inference_mode():
        got = run(compiled.CompiledStep(transformer, cache_for(transformer)), ids, (5, 1))
        wanted = run(backends.ReferenceStep(transformer, cache_for(transformer)), ids, (5, 1))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_a_failed_compilation_is_told_and_the_reference_serves():
    transformer = random_model(FAMILIES["llama"])
    with torch.inference_mode():
        step = compiled.CompiledStep(transformer, cache_for(transformer), "no such compiler")
        assert not compiled.pieces_of(transformer).ready(None)
        run(step, torch.arange(4), (3, 1))
    assert step.reason.startswith("compiling failed: ")
    assert step.computed_by == "reference"


@pytest.mark.parametrize(("model", "weights"), [("mixture", None), ("llama", Int8())], ids=str)
def test_what_is_not_compiled_goes_to_the_reference_with_a_reason(model, weights):
    transformer = quantize(random_model((NOT_COMPILED | FAMILIES)[model]), weights)
    step = backends.bind("compiled", transformer=transformer, cache=cache_for(transformer))[1]
    assert isinstance(step, backends.ReferenceStep)
    assert step.reason.endswith(".")


def test_it_is_not_offered_without_a_cpp_compiler(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "C++ compiler" in compiled.why_not()


@pytest.mark.skipif(compiled.why_not() is not None, reason="no C++ compiler here")
def test_really_compiled():
    transformer = random_model(FAMILIES["llama"])
    traced(transformer, "inductor")
    ids = torch.arange(12)
    with torch.inference_mode():
        step = compiled.CompiledStep(transformer, cache_for(transformer))
        got = run(step, ids, (6, 1, 1, 1, 1, 1, 1))
        wanted = run(backends.ReferenceStep(transformer, cache_for(transformer)), ids, (6, 1, 1, 1, 1, 1, 1))
    assert step.computed_by == "compiled"
    assert (got - wanted).abs().max() <= 2e-5 * wanted.abs().max()
