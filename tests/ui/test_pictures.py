"""Pictures of mechanisms: what they draw is what labkit computes, and they follow their controls."""

from __future__ import annotations

import math
import re

import pytest
import torch

from labkit.kvcache import Sliding
from labkit.model.attention import entries_of
from labkit.model.config import GroupedAttention, Rope
from labkit.model.rope import turn
from labkit.perf.attention_cost import reach
from labkit.perf.cost import step_cost
from labkit.ui import words
from labkit.ui.controls import slider
from labkit.ui.experiment import Result
from labkit.ui.live import Live
from labkit.ui.panels import attention_lines, cache_grid, embedding_map, layer_way, rope_hands
from tests.ui.test_model_panels import SMOLLM2, Lab

PANELS = (rope_hands, layer_way, attention_lines, cache_grid)


@pytest.fixture(scope="module")
def lab() -> Lab:
    return Lab()


@pytest.fixture(autouse=True)
def _back_to_english():
    yield
    words.choose(None)


@pytest.mark.parametrize("language", ["en", "zh-CN"])
@pytest.mark.parametrize("module", PANELS, ids=lambda module: module.__name__.rsplit(".", 1)[1])
def test_a_picture_is_drawn_at_once_with_its_words(lab, module, language):
    words.choose(language)
    picture = module.panel(lab)
    assert picture.error.value == ""
    assert picture.result is not None
    assert picture.result.summary
    assert len(picture.result.rows)
    assert picture.below.value.count("<table") == 1
    labelled = re.findall(r'role="img" aria-label="([^"]+)"', picture.picture.value)
    assert labelled or "<ol" in picture.picture.value
    assert not re.search(r"<(script|animate)", picture.picture.value)


def test_a_picture_follows_its_control_and_keeps_its_last_good_one(monkeypatch):
    monkeypatch.setenv("LABKIT_TEST", "0")

    def draw(n):
        if n == 3:
            raise ValueError("three is too many")
        return Result(None, [{"n": n}], f"n is {n}", extra=f"<b>{n}</b>")

    picture = Live("How many?", draw, {"n": slider("n", 0, 9, 1)})
    assert picture.fields["n"].control.continuous_update
    picture.fields["n"].value = 2
    assert picture.picture.value == "<b>2</b>"
    picture.fields["n"].value = 3
    assert "three is too many" in picture.error.value
    assert picture.picture.value == "<b>2</b>"
    picture.fields["n"].value = 4
    assert picture.error.value == ""
    with pytest.raises(ValueError, match="at most 4"):
        Live("x", draw, {str(n): slider("n", 0, 9, 1) for n in range(5)})


# --- hands


def test_hands_stand_where_the_model_turns_them():
    rope = Rope(100_000.0)
    for pair, frequency in rope_hands.frequencies(rope, 64).items():
        cos, sin = turn(torch.tensor([frequency]), torch.tensor([37]), torch.float32)
        query, _, _ = rope_hands.angles(frequency, 37, 5)
        assert math.cos(math.radians(query)) == pytest.approx(float(cos), abs=1e-4), pair
        assert math.sin(math.radians(query)) == pytest.approx(float(sin), abs=1e-4), pair


def test_moved_together_no_angle_between_hands_changes():
    dials = rope_hands.frequencies(Rope(100_000.0), 64)
    here, there, other = (
        rope_hands.draw(dials, at_query=q, at_key=2, moved=moved) for q, moved in ((14, 0), (14, 300), (15, 0))
    )

    def between(result):
        return [row["between them, °"] for row in result.rows]

    assert between(here) == between(there)
    assert between(here)[0] != between(other)[0]
    assert [row["query's hand, °"] for row in here.rows] != [row["query's hand, °"] for row in there.rows]
    assert "12 tokens apart" in here.summary


# --- a layer


@pytest.mark.parametrize(("n_past", "n_new"), [(0, 1), (255, 1), (100, 16)])
@pytest.mark.parametrize("weights", [None, "int8"])
def test_the_stops_add_up_to_the_layer(n_past, n_new, weights):
    found = layer_way.stops(SMOLLM2, n_past=n_past, n_new=n_new, dtype="bf16", weights=weights)
    whole = step_cost(SMOLLM2, n_past=n_past, n_new=n_new, dtype="bf16", weights=weights).layers[0]
    assert sum(stop.flops for stop in found) == pytest.approx(whole.flops)
    assert sum(stop.weight_bytes for stop in found) == pytest.approx(whole.weight_bytes)
    assert sum(stop.cache_bytes for stop in found) == pytest.approx(whole.kv_read_bytes + whole.kv_write_bytes)


def test_a_longer_text_moves_the_bytes_into_the_cache_and_not_into_the_ffn(lab):
    picture = layer_way.panel(lab)

    def bytes_of(name):
        return sum(stop.bytes for stop in picture.result.data if stop.name == name)

    before = bytes_of("compare"), bytes_of("down")
    picture.fields["n_past"].value = 4000
    assert bytes_of("compare") > 30 * before[0]
    assert bytes_of("down") == before[1]
    picture.fields["stop"].value = 5
    assert "Stop 5 of 13" in picture.result.summary
    assert picture.picture.value.count("aria-current") == 1


# --- attention lines


def test_lines_are_the_models_own_shares(lab):
    picture = attention_lines.panel(lab)
    weights = picture.result.data
    assert [sum(row) for row in weights] == pytest.approx([1.0] * len(weights), abs=1e-4)
    n_lines = picture.picture.value.count("<line")
    assert n_lines == sum(share >= attention_lines.FAINT for q, row in enumerate(weights) for share in row[: q + 1])
    picture.fields["looking"].value = 2
    assert 1 <= picture.picture.value.count("<line") <= 2


def test_the_model_runs_for_another_sentence_only(lab, monkeypatch):
    runs = []
    real = attention_lines.look_inside
    monkeypatch.setattr(attention_lines, "look_inside", lambda *a, **k: runs.append(a) or real(*a, **k))
    picture = attention_lines.panel(lab)
    picture.fields["layer"].value = 2
    picture.fields["head"].value = 1
    assert len(runs) == 1
    picture.fields["sentence"].value = "<b>你好</b> & more"
    assert len(runs) == 2
    assert "<b>" not in picture.picture.value
    assert "part of a character" in picture.picture.value


# --- the cache's grid


def test_the_grid_fills_by_a_prompt_and_then_by_one():
    assert cache_grid.columns("contiguous", 6, 0).count("free") == 6 + 31
    first = cache_grid.columns("contiguous", 6, 1)
    assert first[:7] == ["new"] * 6 + ["free"]
    later = cache_grid.columns("contiguous", 6, 5)
    assert (later.count("kept"), later.count("new")) == (9, 1)
    assert cache_grid.columns("none", 6, 5).count("again") == 10


def test_pages_are_taken_as_they_are_needed():
    for step in range(1, 33):
        found = cache_grid.columns("paged", 6, step)
        taken = sum(bool(state) for state in found)
        assert taken % cache_grid.BLOCK == 0
        assert 0 <= found.count("free") < cache_grid.BLOCK


def test_a_window_forgets_what_the_sliding_cache_forgets():
    sight = Sliding(window=cache_grid.WINDOW, n_sinks=cache_grid.N_SINKS).layer(entries_of(GroupedAttention(4, 2, 8)))
    found = cache_grid.columns("sliding", 10, 25)  # 34 tokens
    visible = [at for at, state in enumerate(found) if state in ("kept", "new")]
    assert len(visible) == reach(sight, 1, 33)
    assert visible == [at for at in range(34) if at < sight.n_sinks or at >= 34 - sight.window]


def test_bytes_are_those_of_a_real_cache(lab):
    import labkit

    run = labkit.Pipeline(lab.model, backend="reference").generate("abcdef", max_new_tokens=5, ignore_eos=True)
    picture = cache_grid.panel(lab)
    picture.fields["n_prompt"].value = run.trace.n_prompt_tokens
    picture.fields["n_steps"].value = 5
    last = picture.result.rows[-1]
    assert last["tokens kept"] == run.trace.n_prompt_tokens + 4
    assert last["kept, bytes"] == run.trace.meta["kv_cache_bytes"]


# --- the map


class Words:
    """A tokenizer of four words, and a model whose table is known."""

    def __init__(self) -> None:
        from types import SimpleNamespace

        self.device = torch.device("cpu")
        self.tokenizer = SimpleNamespace(encode=self.encode)
        table = torch.tensor([[1.0, 0.1, 0], [1.0, -0.1, 0], [-1.0, 0, 0.1], [-1.0, 0, -0.1]])
        self.transformer = SimpleNamespace(embedding=lambda ids: table[ids])

    @staticmethod
    def encode(text):
        known = [" cat", " dog", " one", " two"]
        return [known.index(text)] if text in known else [0, 1]


def test_a_map_puts_like_beside_like():
    result = embedding_map.draw(Words(), words="cat dog\none, two hippopotamus")
    assert result.data["same"] == 4
    assert "4 of 4" in result.summary
    assert "hippopotamus" in result.summary
    cats, numbers = result.figure.data
    assert min(abs(a - b) for a in cats.x for b in numbers.x) > 5 * abs(cats.x[0] - cats.x[1])
    with pytest.raises(ValueError, match="needs three"):
        embedding_map.draw(Words(), words="cat dog")


def test_a_map_keeps_the_two_widest_axes():
    rows = torch.randn(30, 12, generator=torch.Generator().manual_seed(0)) * torch.tensor([9.0, 5.0] + [0.1] * 10)
    places, share = embedding_map.flat(rows)
    assert places.shape == (30, 2)
    assert share > 0.95
    assert torch.equal(places, embedding_map.flat(rows)[0])
