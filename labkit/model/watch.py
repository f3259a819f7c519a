"""Watch inside: attention maps, hidden states and the logit lens, from the forward pass that the model makes anyway.

A ``Watch`` is handed to ``Transformer.forward``, which shows it named activations as they come by. There is no
second forward path, and a step without a watch pays nothing for it.

>>> inside = look_inside(model, "The cat sat on the mat")           # doctest: +SKIP
>>> inside.attention[3][0]               # layer 3, head 0: who looked at whom, (T, S)        # doctest: +SKIP
>>> inside.logit_lens()[12][0]           # the guess after layer 12       # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from labkit.kernels import ops
from labkit.kvcache import KVCache
from labkit.kvcache.none import NoCache
from labkit.model.model import Model, check_prompt

MAX_MAP_BYTES = 256 * 2**20


@dataclass
class Watch:
    """Collects what one forward call shows it. ``attention_layers``: whose maps to keep; maps are large."""

    attention_layers: frozenset[int] = frozenset()
    maps: dict[int, Tensor] = field(default_factory=dict)
    """Layer to attention weights (H, T, S), float32."""
    states: list[Tensor] = field(default_factory=list)
    """Hidden states (T, M): after the embedding, then after each layer."""

    def hidden(self, layer_idx: int, x: Tensor) -> None:
        """The hidden states after layer ``layer_idx``; -1 is the embedding."""
        self.states.append(x)

    def attention(self, layer_idx: int, q: Tensor, cache: KVCache, *, scale: float, softcap: float | None) -> None:
        """The queries (T, H, D) of a layer whose keys ``cache`` has just stored: their softmax, recomputed here,
        because the fast kernels never write it down."""
        if layer_idx not in self.attention_layers:
            return
        (segment,) = cache.segments
        k, _, k_positions = cache.dense(layer_idx, segment)
        layer = cache.layers[layer_idx]
        stored = torch.arange(k.shape[1], device=q.device) if k_positions is None else k_positions
        asking = torch.arange(segment.n_past, segment.n_total, device=q.device)
        mask = ops.visible(asking, stored, window=layer.window, n_sinks=layer.n_sinks)
        self.maps[layer_idx] = ops.attention_weights(q, k, mask=mask, scale=scale, softcap=softcap)


@dataclass(frozen=True)
class Guess:
    """A token that the head would choose if the model ended here, and how sure it would be."""

    token_id: int
    text: str
    probability: float


@dataclass(frozen=True)
class Inside:
    """What a model did with one text. L layers, T tokens, H heads, M model width."""

    model: Model
    token_ids: list[int]
    tokens: list[str]
    """Each token's text."""
    attention: dict[int, Tensor]
    """Layer to (H, T, T) float32: row t says how token t shared its attention among the tokens up to itself."""
    hidden: list[Tensor]
    """L + 1 times (T, M): after the embedding, then after each layer."""
    logits: Tensor
    """(T, V) float32."""

    @property
    def norms(self) -> Tensor:
        """Root mean square of the hidden states, (L + 1, T) float32: how the river swells from layer to layer."""
        return torch.stack([x.float().square().mean(-1).sqrt() for x in self.hidden])

    @torch.inference_mode()
    def logit_lens(self, *, position: int = -1, top: int = 5) -> list[list[Guess]]:
        """What each layer's hidden state would say if it went straight to the final norm and the head: for the
        embedding and each layer, the ``top`` guesses (nostalgebraist, "interpreting GPT: the logit lens", 2020)."""
        transformer, tokenizer = self.model.transformer, self.model.tokenizer
        rows = torch.stack([x[position] for x in self.hidden])  # (L + 1, M)
        chances = transformer.logits(transformer.final_norm(rows)).float().softmax(-1)
        best = chances.topk(top, dim=-1)
        return [
            [Guess(i, tokenizer.decode([i]), p) for i, p in zip(ids, ps, strict=True)]
            for ids, ps in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]


@torch.inference_mode()
def look_inside(model: Model, prompt: str | Sequence[int], *, layers: Sequence[int] | None = None) -> Inside:
    """Run ``prompt`` (text, or token ids) through ``model`` once, and keep what it did.

    ``layers``: whose attention maps to keep; None keeps all. Raises ValueError for an empty or too long prompt, for
    a layer that does not exist, and when the maps would take more than 256 MiB (it says how many would fit).
    """
    token_ids = model.tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else [int(i) for i in prompt]
    config = model.config
    ids = torch.tensor(token_ids, dtype=torch.int64, device=model.device)
    check_prompt(ids, config)
    wanted = range(config.n_layers) if layers is None else layers
    if any(not 0 <= i < config.n_layers for i in wanted):
        raise ValueError(f"layers={list(wanted)}: this model has layers 0 to {config.n_layers - 1}.")
    map_bytes = 4 * config.n_heads * len(token_ids) ** 2
    if map_bytes * len(wanted) > MAX_MAP_BYTES:
        raise ValueError(
            f"the attention maps of {len(wanted)} layers over {len(token_ids)} tokens take "
            f"{map_bytes * len(wanted) / 2**20:.0f} MiB: choose at most {MAX_MAP_BYTES // map_bytes} layers, "
            "or a shorter prompt."
        )
    transformer = model.transformer
    watch = Watch(frozenset(wanted))
    cache = NoCache(transformer.cache_entries, capacity_tokens=len(token_ids), device=model.device, dtype=model.dtype)
    logits = transformer(ids, cache, watch=watch).float()
    tokens = [model.tokenizer.decode([i]) for i in token_ids]
    return Inside(model, token_ids, tokens, dict(sorted(watch.maps.items())), watch.states, logits)
