"""The default model, end to end, against transformers holding the same tensors."""

from __future__ import annotations

import pytest
import torch

import labkit

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a land far away, there lived a dragon who",
    "1 2 3 4 5 6 7",
    "Die Hauptstadt von Österreich ist",
]
N_NEW = 64


@pytest.fixture(scope="module")
def expected_ids(default_model, reference_model):
    """Greedy continuations by transformers' own generate()."""
    out = {}
    for prompt in PROMPTS:
        ids = torch.tensor([default_model.tokenizer.encode(prompt)])
        with torch.inference_mode():
            made = reference_model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=N_NEW,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=2,
            )
        out[prompt] = made[0, ids.shape[1] :].tolist()
    return out


def test_logits_equal_transformers(default_model, reference_model):
    ids = default_model.tokenizer.encode("The quick brown fox jumps over 13 lazy dogs; naïve café — 你好 🙂. " * 8)
    with torch.inference_mode():
        expected = reference_model(torch.tensor([ids])).logits[0]
    assert (default_model(ids) - expected).abs().max() < 1e-3


@pytest.mark.parametrize("kv_cache", ["contiguous", "none"])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_ids_equal_transformers(default_model, expected_ids, prompt, kv_cache):
    pipeline = labkit.Pipeline(default_model, kv_cache=kv_cache, backend="reference")
    done = pipeline.generate(prompt, max_new_tokens=N_NEW)
    assert done.token_ids == expected_ids[prompt]


def test_a_seeded_sample_reproduces(default_model):
    sampling = labkit.Sampling(temperature=1.0, top_p=0.9)
    pipeline = labkit.Pipeline(default_model, sampling=sampling, backend="reference")
    first, again, other = (pipeline.generate("A poem:", max_new_tokens=16, seed=s).token_ids for s in (7, 7, 8))
    assert first == again
    assert first != other


def test_text_is_the_decoded_ids(default_model):
    run = labkit.Pipeline(default_model).run("Write a haiku about rivers, in Japanese.", chat=True, max_new_tokens=48)
    pieces = "".join(run)
    done = run.result()
    ids = [i for i in done.token_ids if i not in default_model.tokenizer.eos_ids]
    assert pieces == done.text == default_model.tokenizer.decode(ids)
