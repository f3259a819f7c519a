"""A small network that guesses the target's next hidden state from its last one (EAGLE, arXiv 2401.15077).

    x_t = W [ h_t ; e_{t+1} ]                   the target's state after token t, the next token's embedding
    g_{t+1} = norm(layer(x_0 ... x_t))          a guess at h_{t+1}: one layer of the target's own kind
    draft   = argmax over a few thousand ids of  E g_{t+1}

h is the target's final norm's output, so its scale is known; E are rows of the target's own head. A further token is
guessed from g in the place of h. The layer sees the answer alone and not the prompt, which the target's state has read:
so a prompt costs it nothing.

The whole head of the target is a fifth of its bytes. A draft over the ids that it really uses reads a tenth of that.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from labkit.kvcache import KVCache
from labkit.model.config import ModelConfig
from labkit.model.transformer import Transformer

FORMAT = "labkit-draft-head-1"
WORDS = "trunk.embedding.weight"
RECENT_TOKENS = 256
"""How far back its layer looks."""


class DraftHead(nn.Module):
    """``fuse`` makes x; ``trunk`` is a transformer of one layer over the ids ``token_ids`` (N,) of the target.

    It has no words of its own: the trunk's embedding, which is its head too, holds the target's rows of those ids."""

    token_ids: Tensor

    def __init__(self, target: ModelConfig, token_ids: Tensor) -> None:
        super().__init__()
        layer = target.layers[-1]
        layer = dataclasses.replace(layer, attention=dataclasses.replace(layer.attention, window=RECENT_TOKENS))
        config = ModelConfig(
            family="draft-head",
            vocab_size=len(token_ids),
            d_model=target.d_model,
            context_tokens=target.context_tokens,
            layers=(layer,),
            norm=target.norm,
        )
        self.trunk = Transformer(config)
        self.fuse = nn.Linear(2 * target.d_model, target.d_model, bias=False).requires_grad_(False)
        self.register_buffer("token_ids", token_ids)

    def inputs(self, hidden: Tensor, embeddings: Tensor) -> Tensor:
        """hidden (T, M) after tokens t, normed; embeddings (T, M) of tokens t+1 -> x (T, M)."""
        return self.fuse(self.beside(hidden, embeddings))

    @staticmethod
    def beside(hidden: Tensor, embeddings: Tensor) -> Tensor:
        """Both, (T, 2M); the embeddings brought to one size."""
        return torch.cat((hidden, of_one_size(embeddings)), dim=-1)

    def forward(self, hidden: Tensor, embeddings: Tensor, cache: KVCache, *, counts: Any = None) -> Tensor:
        """Guesses at the states after tokens t+1, normed, (T, M); ``counts`` as in ``Transformer.forward``."""
        x = self.inputs(hidden, embeddings)
        trunk = self.trunk
        step = trunk.open(cache, len(x) if counts is None else counts)
        for layer_idx, block in enumerate(trunk.layers):
            x = block(x, step, layer_idx)
        cache.commit()
        return trunk.final_norm(x)


def of_one_size(embeddings: Tensor) -> Tensor:
    """Embeddings (T, M) brought to one size, that of normed states."""
    return embeddings * embeddings.square().mean(-1, keepdim=True).add(1e-12).rsqrt()


def load(path: Path, target: Any) -> DraftHead:
    """The head in ``path``, ready to guess for ``target`` (a Model). Raises ValueError when it is no head, damaged, or
    belongs to another model."""
    from safetensors import SafetensorError, safe_open

    transformer = target.transformer
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            header = file.metadata() or {}
            if header.get("format") != FORMAT:
                raise ValueError(f"{path.name} is not a draft head ({FORMAT}).")
            made_for = json.loads(header["target"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"{path.name} is truncated or corrupted ({error}). Fetch or copy it again.") from error
    ids = tensors.pop("token_ids").long()
    same = made_for["d_model"] == target.config.d_model and int(ids.max()) < target.config.vocab_size
    if not same or not _alike(made_for["fingerprint"], fingerprint(embeddings(transformer, None))):
        raise ValueError(
            f"{path.name} was trained for {made_for['name']} and reads that model's hidden states; {target.name} has "
            "others. Train one for it (training/draft_head.py), or choose another drafter."
        )
    head = DraftHead(target.config, ids).to(transformer.device)
    wanted = {name: t.shape for name, t in head.state_dict().items() if name not in ("token_ids", WORDS)}
    if wanted != {name: t.shape for name, t in tensors.items()}:
        raise ValueError(f"{path.name} does not fit {target.name}: it has other tensors than its form asks for.")
    head.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, strict=False)
    with torch.no_grad():
        head.trunk.embedding.weight.copy_(embeddings(transformer, ids))
    return head


def embeddings(transformer: Transformer, ids: Tensor | None) -> Tensor:
    """Rows ``ids`` of a model's embedding, however it is held, float32 (n, M); None: eight of them, far apart."""
    if ids is None:
        ids = sample_ids(transformer.config.vocab_size)
    return transformer.embedding(ids.to(transformer.device)).float()


def sample_ids(n_vocab: int) -> Tensor:
    return torch.linspace(0, n_vocab - 1, 8).long()


def save(head: DraftHead, path: Path, record: dict[str, Any], target: dict[str, Any]) -> None:
    """Write the head in bfloat16, with the target that it belongs to and the record of its training.

    The target's own words are not written: they come with the target."""
    from safetensors.torch import save_file

    tensors = {
        name: tensor.to(torch.int32 if name == "token_ids" else torch.bfloat16).contiguous()
        for name, tensor in head.state_dict().items()
        if name != WORDS
    }
    header = {"format": FORMAT, "target": json.dumps(target), "record": json.dumps(record)}
    part = path.with_suffix(".part")
    save_file(tensors, part, metadata=header)
    part.replace(path)


def fingerprint(rows: Tensor) -> list[float]:
    """The sizes of a few of a model's embeddings (``embeddings``), by which a head knows its target."""
    return [round(value, 4) for value in rows.float().square().mean(-1).sqrt().tolist()]


def _alike(ours: list[float], theirs: list[float]) -> bool:
    """The same model, if perhaps in fewer bits."""
    return len(ours) == len(theirs) and all(abs(a - b) < 0.05 * max(a, b) for a, b in zip(ours, theirs, strict=True))
