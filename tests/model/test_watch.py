"""What the watch sees is what transformers reports about itself, and looking changes nothing."""

from __future__ import annotations

import pytest
import torch

from labkit.model import Model
from labkit.model.watch import look_inside
from tests.model.families import close, pair, token_ids

pytest.importorskip("transformers", reason="transformers is the oracle")


class Words:
    """A tokenizer for ids that have no text."""

    eos_ids: tuple[int, ...] = ()

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    encode_prompt = encode

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def model_of(name: str) -> tuple[object, Model]:
    theirs, ours = pair(name)
    return theirs, Model(ours, Words(), name=name)


@pytest.mark.parametrize("name", ["gpt2", "smollm2", "mistral", "qwen3", "gemma2", "gemma3", "olmo2"])
def test_maps_states_and_logits_equal_transformers(name):
    theirs, model = model_of(name)
    ids = token_ids(20)
    inside = look_inside(model, ids.tolist())
    with torch.inference_mode():
        out = theirs(ids[None], output_attentions=True, output_hidden_states=True)
    assert list(inside.attention) == list(range(model.config.n_layers))
    for layer_idx, want in enumerate(out.attentions):
        close(inside.attention[layer_idx], want[0])
    for got, want in zip(inside.hidden[:-1], out.hidden_states[:-1], strict=True):  # theirs norms the last one
        close(got, want[0])
    close(model.transformer.final_norm(inside.hidden[-1]), out.hidden_states[-1][0])
    close(inside.logits, out.logits[0])
    close(inside.norms[1], out.hidden_states[1][0].square().mean(-1).sqrt())


def test_looking_changes_nothing():
    _, model = model_of("gemma2")
    ids = token_ids(12).tolist()
    assert torch.equal(look_inside(model, ids).logits, model(ids))


def test_logit_lens_ends_with_the_models_own_answer():
    _, model = model_of("smollm2")
    inside = look_inside(model, " ".join(map(str, token_ids(9).tolist())))
    lens = inside.logit_lens(position=4, top=3)
    assert len(lens) == model.config.n_layers + 1
    chances = inside.logits[4].softmax(-1).topk(3)
    assert [guess.token_id for guess in lens[-1]] == chances.indices.tolist()
    assert [guess.probability for guess in lens[-1]] == pytest.approx(chances.values.tolist(), rel=1e-5)
    assert lens[0][0].text == str(lens[0][0].token_id)


def test_only_the_chosen_layers_keep_maps():
    _, model = model_of("smollm2")
    inside = look_inside(model, [5, 6, 7], layers=[1])
    assert list(inside.attention) == [1]
    assert inside.attention[1].shape == (8, 3, 3)
    torch.testing.assert_close(inside.attention[1].sum(-1), torch.ones(8, 3))
    assert inside.tokens == ["5", "6", "7"]


def test_bad_input(monkeypatch):
    _, model = model_of("smollm2")
    with pytest.raises(ValueError, match=r"layers=\[7\]: this model has layers 0 to 2"):
        look_inside(model, [5], layers=[7])
    with pytest.raises(ValueError, match="non-empty"):
        look_inside(model, "")
    with pytest.raises(ValueError, match="token 96 is not in the vocabulary"):
        look_inside(model, [5, 96])
    monkeypatch.setattr("labkit.model.watch.MAX_MAP_BYTES", 8 * 4 * 10**2)
    with pytest.raises(ValueError, match=r"3 layers over 10 tokens .* choose at most 1 layers"):
        look_inside(model, [5] * 10)
