"""The panels of lessons 02, 03 and 05 on a tiny random model: what they compute, not how fast."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import labkit
from labkit.checkpoint.random_weights import byte_vocabulary
from labkit.model import Model, ModelConfig, Transformer
from labkit.model.config import DenseFFN, GroupedAttention, Rope, uniform
from labkit.pipeline import Pipeline
from labkit.tokenizer import Tokenizer
from labkit.ui.panels import attention, inside, rope, sampling

SMOLLM2 = ModelConfig(
    "llama", 49_152, 576, 8192, uniform(30, GroupedAttention(9, 3, 64, rope=Rope(100_000.0)), DenseFFN(1536))
)


class Lab:
    """What ``lesson.setup()`` gives, with a model that needs no file."""

    def __init__(self) -> None:
        attention = GroupedAttention(4, 2, 8, rope=Rope())
        config = ModelConfig("llama", 300, 32, 4096, uniform(3, attention, DenseFFN(48)))
        transformer = Transformer(config)
        generator = torch.Generator().manual_seed(1)
        for name, weight in transformer.named_parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3 + ("norm" in name))
        self.model = Model(transformer, Tokenizer.from_gguf(byte_vocabulary(300)), name="tiny")
        self.tokenizer = self.model.tokenizer

    def pipeline(self, **switches) -> Pipeline:
        return Pipeline(self.model, **switches)


class Job(SimpleNamespace):
    """Remembers what was shown."""

    def __init__(self) -> None:
        super().__init__(shown=[], guess=2.0, history=[], stopped=False, stop_event=_Event())

    def progress(self, fraction: float, message: str = "") -> None:
        assert fraction <= 1

    def check(self) -> None:
        pass

    def show(self, result) -> None:
        self.shown.append(result)


class _Event:
    def wait(self, seconds: float) -> bool:
        return False


@pytest.fixture(scope="module")
def lab() -> Lab:
    return Lab()


def test_shift_both_and_the_score_stays(lab):
    exact = rope.measure(lab, Job(), layer=1, head=3, furthest=2000, precision="float32")
    coarse = rope.measure(lab, Job(), layer=1, head=3, furthest=2000, precision="bfloat16")
    assert exact.data["drift"] < 1e-3 * exact.data["moved"]
    assert coarse.data["drift"] > 10 * exact.data["drift"]
    assert exact.rows[0]["shift"] == 0


def test_the_score_is_the_models_own(lab):
    """q and k at their own positions give the weight that the attention map shows."""
    from labkit.model.watch import look_inside

    layer, head = 2, 1
    q, k, at_q, at_k = rope.query_and_key(lab.model, layer=layer, head=head)
    own = lab.model.config.layers[layer].attention.rope
    with torch.inference_mode():
        score = rope.rotated_score(own, q, k, torch.tensor([float(at_q)]), torch.tensor([float(at_k)]))
    weights = look_inside(lab.model, rope.SENTENCE, layers=[layer]).attention[layer][head, at_q]
    other_q, other_k, _, _ = rope.query_and_key(lab.model, layer=layer, head=head - 1)
    assert torch.equal(k, other_k)  # two query heads share it
    assert not torch.equal(q, other_q)
    logs = weights.log()
    assert float(score) - float(logs[at_k]) == pytest.approx(_normaliser(lab.model, layer, head, at_q), abs=1e-4)


def _normaliser(model: Model, layer: int, head: int, at: int) -> float:
    """log of the softmax's denominator, from every key of the sentence."""
    from labkit.model.watch import look_inside

    found = look_inside(model, rope.SENTENCE, layers=[])
    block, own = model.transformer.layers[layer], model.config.layers[layer].attention
    x = block.attention_norm(found.hidden[layer])
    q = block.attention.q_proj(x).view(-1, own.n_heads, own.d_head)[at, head]
    k = block.attention.k_proj(x).view(-1, own.n_kv_heads, own.d_head)[: at + 1, head // 2]
    positions = torch.arange(at + 1.0)
    scores = [
        rope.rotated_score(own.rope, q[None, None], k[i][None, None], torch.tensor([float(at)]), p[None])
        for i, p in enumerate(positions)
    ]
    return float(torch.cat(scores).logsumexp(0))


@pytest.mark.parametrize("name", ["tiny-deepseek-v3", "tiny-hybrid", "tiny-qwen3"])
def test_a_score_moves_with_one_token_alone_whatever_the_attention(name):
    other = SimpleNamespace(model=labkit.load(f"random:{name}"))
    layer = other.model.config.n_layers - 1
    found = rope.measure(other, Job(), layer=layer, head=3, furthest=200, precision="float32").data
    assert found["drift"] < 1e-3 * found["moved"]


def test_attention_without_a_map_is_told_so():
    latent = SimpleNamespace(model=labkit.load("random:tiny-deepseek-v3"))
    latent.tokenizer = latent.model.tokenizer
    with pytest.raises(ValueError, match="no map is kept"):
        inside.measure(latent, Job(), prompt="Hello", layer=1, head=0, show="attention map")


def test_a_model_that_turns_nothing_is_told_so():
    gpt2 = SimpleNamespace(model=labkit.load("random:tiny-gpt2"))
    with pytest.raises(ValueError, match="turns no query and no key"):
        rope.measure(gpt2, Job(), layer=0, head=0, furthest=200, precision="float32")


def test_neighbours_are_by_cosine(lab):
    rows = rope.neighbours(lab.model, "a", n=3)
    table = lab.model.transformer.embedding.weight
    own = table[lab.tokenizer.encode("a")[0]]
    for row in rows:
        other = table[row["id"]]
        assert row["cosine"] == pytest.approx(float(own @ other / own.norm() / other.norm()), abs=1e-3)
    with pytest.raises(ValueError, match="'ab' is 2 tokens"):
        rope.neighbours(lab.model, "ab")


def test_the_crossings_solve_their_equations():
    """By hand: attention has 884,736 weights a layer, the FFN 2,654,208; scores cost 4 * 576 FLOPs a position seen,
    a cached token 768 bytes in bfloat16."""
    attention_weights, ffn_weights = 576 * 576 * 2 + 2 * 576 * 192, 3 * 576 * 1536
    gap = 2 * (ffn_weights - attention_weights)  # FLOPs a token, or bytes a step
    found = [row["crossing (tokens)"] for row in attention.three_crossings(SMOLLM2)]
    assert found[0] == 2 * (gap // (4 * 576)) - 1  # a prefill's token sees (n + 1) / 2 on average
    assert found[1] == gap // (4 * 576) - 1  # a decode step sees its own token too
    assert found[2] == pytest.approx(gap / 768, abs=2)


def test_a_window_never_crosses_and_sharing_heads_moves_bytes_alone():
    rows = {row["attention"]: row for row in attention.by_kind(SMOLLM2)}
    assert rows["window of 512"]["FLOPs cross, prefill"] == rows["window of 512"]["bytes cross, decode"] == "never"
    read = {name: row["cache read at 32,768 tokens, MB"] for name, row in rows.items()}
    assert read["mha"] == pytest.approx(3 * read["as it is"], rel=0.01)
    assert read["window of 512"] < read["mqa"] < read["as it is"]


def test_crossing_between_two_lengths():
    assert attention.crossing([1.0, 2.0, 4.0], [0.1, 0.4, 0.8]) == pytest.approx(2.5)
    assert attention.crossing([1.0, 2.0], [0.1, 0.4]) is None
    assert attention.crossing([1.0, 2.0], [0.6, 0.7]) == 1.0


def test_the_crossing_is_measured_at_every_length(lab, known_machine):
    job = Job()
    result = attention.measure_crossing(lab, job, longest=1024, n_repeats=2)
    assert result.data["lengths"] == [128, 512, 1024]
    assert all(0 < share < 100 for share in result.data["share"])
    assert result.data["counted"] == sorted(result.data["counted"])
    assert len(job.shown) >= 2
    assert len(result.figure.data) == 3


@pytest.mark.parametrize("show", inside.VIEWS)
def test_views_of_a_prompt(lab, show):
    result = inside.measure(lab, Job(), prompt="Hello there", layer=2, head=3, show=show)
    assert result.summary
    assert len(result.rows) > 0
    if show == "attention map":
        weights = result.data["weights"]
        assert weights.shape == (11, 11)
        assert int(weights.triu(1).count_nonzero()) == 0


def test_a_long_prompt_is_shown_in_part(lab):
    result = inside.measure(lab, Job(), prompt="x" * 300, layer=0, head=0, show="attention map")
    assert len(result.data["tokens"]) == inside.MAX_SHOWN_TOKENS


def test_the_climb_counts_what_is_recomputed(lab, known_machine):
    result = sampling.measure_climb(lab, Job(), prompt="Once", n_tokens=12)
    assert result.data["n_tokens"] == len(result.data["token_ids"]) == 12
    assert len(result.data["times_ms"]) == 11
    assert result.data["work"] == sorted(result.data["work"])
    per_token = (result.data["work"][-1] - result.data["work"][0]) / 10
    assert per_token > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_draws_come_from_what_was_kept(lab, temperature):
    result = sampling.measure_choice(lab, Job(), prompt="Hi", temperature=temperature, top_p=0.5, n_draws=100)
    counts, after = result.data["counts"], result.data["after"]
    assert counts.sum() == 100
    assert counts[after == 0].sum() == 0
    assert result.data["kept"] == int((after > 0).sum())
    assert (result.data["kept"] == 1) == (temperature == 0)


def test_survivors_of_each_cut(lab):
    rows = sampling.survivors(lab.model, "Hi")
    assert [row["temperature"] for row in rows] == [0.5, 1.0, 1.5, 2.0]
    assert all(row["top-k 40"] == 40 for row in rows)
    assert [row["top-p 0.9"] for row in rows] == sorted(row["top-p 0.9"] for row in rows)


def test_panels_have_at_most_four_controls(lab):
    lab = SimpleNamespace(model=SimpleNamespace(config=replace(SMOLLM2), dtype=torch.float32))
    for made in (
        rope.panel(lab),
        attention.panel(lab),
        inside.panel(lab),
        sampling.climb_panel(lab),
        sampling.choice_panel(lab),
    ):
        assert 1 <= len(made.fields) <= 4
