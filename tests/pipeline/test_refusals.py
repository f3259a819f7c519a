"""What the pipeline refuses, and what it says."""

from __future__ import annotations

import pytest

from labkit.decoding.sampling import Sampling
from labkit.pipeline import Pipeline


@pytest.mark.parametrize("prompt", ["", None, 7])
def test_an_empty_prompt_fails_at_once(pipeline, prompt):
    for start in (pipeline.run, pipeline.generate):
        with pytest.raises(ValueError, match="the prompt is empty"):
            start(prompt)


@pytest.mark.parametrize("wrong", [0, -3, 2.5, "8"])
def test_max_new_tokens_must_be_a_count(pipeline, wrong):
    with pytest.raises(ValueError, match=rf"max_new_tokens={wrong!r}: must be a whole number, 1 or more"):
        pipeline.run("Hello", max_new_tokens=wrong)


@pytest.mark.parametrize("wrong", [1.5, "7", None])
def test_a_seed_must_be_a_whole_number(pipeline, wrong):
    with pytest.raises(ValueError, match=rf"seed={wrong!r}: must be a whole number"):
        pipeline.run("Hello", seed=wrong)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("temperature", [5e-324, 1e300])
def test_a_temperature_that_float32_does_not_hold(model, temperature):
    draws = Pipeline(model, sampling=Sampling(temperature=temperature))
    done = draws.generate("Hello", max_new_tokens=3, ignore_eos=True)
    assert len(done.token_ids) == 3


def test_too_long_a_prompt_says_by_how_much(pipeline):
    with pytest.raises(ValueError, match=r"the prompt has 207 tokens; the model's context holds 200: shorten it by 7"):
        pipeline.run("x" * 207)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"kv_cache": "pagd"}, r"unknown kv_cache 'pagd': choose one of .*none.*contiguous|contiguous.*none"),
        ({"backend": "cuda"}, r"unknown backend 'cuda': choose one of .*reference"),
        ({"drafter": "psychic"}, r"unknown drafter 'psychic': choose one of "),
        ({"sampling": "hot"}, r"unknown sampler 'hot': choose one of greedy, temperature, top-k, top-p, min-p"),
    ],
)
def test_unknown_names_list_the_choices(model, choice, message):
    with pytest.raises(ValueError, match=message):
        Pipeline(model, **choice)


def test_an_unknown_option_is_refused(pipeline):
    with pytest.raises(TypeError, match="unknown option max_tokens"):
        pipeline.generate("Hello", max_tokens=3)
    with pytest.raises(TypeError):
        pipeline.run("Hello", max_tokens=3)


def test_damaged_weights_are_reported_not_sampled(model, pipeline):
    weight = model.transformer.layers[1].ffn.down_proj.weight
    kept = weight.clone()
    try:
        weight[0, 0] = float("nan")
        with pytest.raises(ValueError, match="logits are not finite"):
            pipeline.generate("Hello")
    finally:
        weight.copy_(kept)
