"""Rotary positions: against transformers' frequencies, against complex numbers, and the property they exist for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit.checkpoint.random_weights import byte_vocabulary
from labkit.checkpoint.rope_settings import rope_from
from labkit.checkpoint.settings import Settings
from labkit.engine import Engine
from labkit.kernels import ops
from labkit.kvcache.contiguous import ContiguousCache
from labkit.model import Model
from labkit.model import rope as rotary
from labkit.model.config import Rope, RopeScaling
from labkit.perf.timer import Timer
from labkit.sequence import Sequence
from labkit.tokenizer import Tokenizer
from tests.model.families import LLAMA3, LONGROPE, YARN, close, pair, token_ids

CONTEXT = 64
SCALED: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": YARN,
    "yarn-untruncated": {**YARN, "truncate": False},
    "yarn-mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9},
    "yarn-given": {**YARN, "attention_factor": 1.25},
    "llama3": {**LLAMA3, "original_max_position_embeddings": 16},
    "longrope": LONGROPE,
    "longrope-given": {**LONGROPE, "attention_factor": 1.5, "factor": 8.0},
}


@pytest.mark.parametrize("length", [8, 16, 17, 64, 200])
@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("name", SCALED)
def test_frequencies_and_factor_equal_transformers(name, share, length):
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    n_pairs = int(8 * share) // 2
    spec = {**SCALED[name], "rope_theta": 10_000.0, "partial_rotary_factor": share}
    for key in ("short_factor", "long_factor"):
        if key in spec:
            spec[key] = spec[key][:n_pairs]
    config = transformers.LlamaConfig(
        hidden_size=32, num_attention_heads=4, max_position_embeddings=CONTEXT, rope_parameters=dict(spec)
    )
    want, factor = ROPE_INIT_FUNCTIONS[spec["rope_type"]](config, torch.device("cpu"), seq_len=length)
    rope = rope_from(Settings(config.to_dict()), d_head=8)
    got = rotary.inverse_frequencies(rope, 8, length)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    assert rotary.attention_factor(rope) == pytest.approx(factor)


@given(m=st.integers(0, 500), n=st.integers(0, 500), shift=st.integers(1, 500), seed=st.integers(0, 99))
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_scores_depend_on_the_distance_alone(layout, m, n, shift, seed):
    q, k = torch.randn(2, 1, 1, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rope = Rope(layout=layout)

    def score(q_position: int, k_position: int) -> float:
        frequencies = rotary.inverse_frequencies(rope, 16).double()
        turned = [
            ops.rotate(x, *((p * frequencies[None]).cos(), (p * frequencies[None]).sin()), layout=layout)
            for x, p in ((q, q_position), (k, k_position))
        ]
        return float((turned[0] * turned[1]).sum())

    assert score(m, n) == pytest.approx(score(m + shift, n + shift), abs=1e-9)
    assert score(m, m) == pytest.approx(float((q * k).sum()), abs=1e-9)


@pytest.mark.parametrize("rotary_dims", [16, 6])
def test_interleaved_is_a_product_of_complex_numbers(rotary_dims):
    x = torch.randn(5, 3, 16)
    cos, sin = rotary.angles(Rope(rotary_dims=rotary_dims), 16, torch.arange(5) * 7, torch.float32)
    got = ops.rotate(x, cos, sin, layout="interleaved")
    numbers = torch.view_as_complex(x[..., :rotary_dims].unflatten(-1, (-1, 2)).contiguous())
    turned = torch.view_as_real(numbers * torch.complex(cos, sin)[:, None]).flatten(-2)
    torch.testing.assert_close(got, torch.cat((turned, x[..., rotary_dims:]), dim=-1))


def test_half_is_interleaved_with_the_dims_in_another_order():
    x = torch.randn(4, 2, 12)
    cos, sin = rotary.angles(Rope(), 12, torch.arange(4), torch.float32)
    order = torch.arange(12).view(2, 6).T.flatten()  # 0 6 1 7 2 8 ...
    want = ops.rotate(x[..., order], cos, sin, layout="interleaved")
    torch.testing.assert_close(ops.rotate(x, cos, sin, layout="half")[..., order], want)


def test_angles_are_exact_where_bfloat16_has_no_such_position():
    cos, sin = rotary.angles(Rope(), 8, torch.tensor([4097]), torch.bfloat16)
    assert cos[0, 0] == torch.tensor(4097.0).cos().bfloat16()
    assert sin[0, 0] == torch.tensor(4097.0).sin().bfloat16()


def test_positions_are_explicit_and_need_no_order():
    rope, positions = Rope(), torch.tensor([5, 0, 3, 5])
    cos, _ = rotary.angles(rope, 8, positions, torch.float32)
    in_order, _ = rotary.angles(rope, 8, torch.arange(6), torch.float32)
    torch.testing.assert_close(cos, in_order[positions])


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_that_go_by_length_are_fixed_for_a_sequence(kind):
    """A short prompt in a cache that may grow long is turned as the long sequence is: every logit equals what
    transformers makes of the whole text at once."""
    theirs, ours = pair("phi3-longrope" if kind == "longrope" else "llama-dynamic")
    n = 24 if kind == "longrope" else 80
    ids = token_ids(n)
    with torch.inference_mode():
        cache = ContiguousCache(ours.cache_entries, capacity_tokens=n)
        got = torch.cat([ours(chunk, cache) for chunk in ids.split(5)])
        close(got, theirs(ids[None], use_cache=False).logits[0])
        short = ContiguousCache(ours.cache_entries, capacity_tokens=12)
        close(ours(ids[:12], short), theirs(ids[None, :12], use_cache=False).logits[0])


@pytest.mark.parametrize("name", ["phi3-longrope", "llama-dynamic"])
def test_an_answer_does_not_depend_on_its_room(name):
    """Text that outgrows the trained context (16 and 64 tokens) while it is written: transformers, reading the whole
    text anew for each token, chooses LongRoPE's divisors by its length. labkit does, whatever may follow."""
    theirs, ours = pair(name)
    n_prompt, n_new = (10, 14) if name == "phi3-longrope" else (58, 14)
    ids = token_ids(n_prompt).tolist()
    model = Model(ours, Tokenizer.from_gguf(byte_vocabulary(256)), name="tiny")
    answers, timer = [], Timer()
    for n_room in (n_new, 3 * n_new):
        timer = Timer()
        timer.begin()
        sequence = Sequence(model, ids, timer=timer, max_new_tokens=n_room, ignore_eos=True)
        engine = Engine(model, timer=timer, capacity_tokens=n_prompt + n_room, backend="reference")
        with torch.inference_mode():
            while sequence.n_new < n_new:
                timer.begin_step("decode")
                engine.step([sequence])
        answers.append(sequence.ids[:])
    assert answers[0] == answers[1]
    if name == "phi3-longrope":
        with torch.inference_mode():  # its divisors may have been made so: a buffer that it then writes in place
            want = theirs.generate(torch.tensor([ids]), max_new_tokens=n_new, do_sample=False, use_cache=False,
                                   eos_token_id=None)  # fmt: skip
        assert answers[0] == want[0].tolist()
    n_read = sum(step.n_tokens for step in timer.steps)
    assert n_read > n_prompt + n_new  # the text was read again where it had outgrown what its keys were turned for


def test_only_those_scalings_depend_on_length():
    def kind(name: Any) -> bool:
        return rotary.depends_on_length(Rope(scaling=RopeScaling(name)))

    assert {name for name in rotary.SCALINGS if kind(name)} == {"dynamic", "longrope"}
    assert not rotary.depends_on_length(None)
    assert not rotary.depends_on_length(Rope())
