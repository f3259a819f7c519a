"""What the cache tests share: kinds to try, a driver, and attention written down once more, in float64."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from labkit import registry
from labkit.kvcache import Entry, Int4, Int8, LayerEntries, Paged, Sliding
from labkit.kvcache.offloaded import OffloadedCache

LOSSLESS = {
    "contiguous": "contiguous",
    "paged": "paged",
    "paged-8": Paged(block_size=8),
    "paged-64": Paged(block_size=64),
    "sliding-own": Sliding(window=0),
    "offloaded": "offloaded",
}
LOSSY = {
    "int8": "int8",
    "int8-16": Int8(group=16, recent=0),
    "int4": Int4(recent=0),
    "int4-64": Int4(group=64, recent=32),
    "paged-int8": Paged(block_size=16, dtype="int8"),
    "paged-int4": Paged(block_size=32, dtype="int4"),
}
BLOCKED = ["paged", "paged-8", "int8", "int8-16", "int4", "paged-int8", "paged-int4"]
KINDS = {**LOSSLESS, **LOSSY}


def layer(g: int = 2, d: int = 16, d_v: int | None = None, **sight: Any) -> LayerEntries:
    return LayerEntries((Entry("k", (g, d)), Entry("v", (g, d_v or d))), **sight)


def build(name: str, layers: Any, **sizes: Any) -> Any:
    sizes = {"capacity_tokens": 512, **sizes}
    if name == "offloaded":  # not offered without a GPU, but the class works on any device
        return OffloadedCache(layers, **sizes)
    component, config = registry.find("kv_cache", KINDS.get(name, name))
    return component.build(config, layers=layers, **sizes)


def attention(q, k, v, positions, *, scale, window=None, n_sinks=0, softcap=None):
    """The definition, in float64 and with every key in sight: q (T, H, D), k and v (S, G, D) -> (T, H, Dv)."""
    at, keys = torch.tensor(list(positions))[:, None], torch.arange(len(k))[None]
    seen = keys <= at
    if window is not None:
        seen &= (keys > at - window) | (keys < n_sinks)
    per_group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(per_group, dim=1) for x in (k, v))  # (S, H, D)
    scores = torch.einsum("thd,shd->hts", q.double(), k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    weights = torch.where(seen, scores, -torch.inf).softmax(-1)
    return torch.einsum("hts,shd->thd", weights, v)


@dataclass
class Driver:
    """Feeds random tokens to a cache and remembers everything, to say what each step should have given."""

    cache: Any
    n_heads: int = 4
    softcap: float | None = None
    seed: int = 0
    k: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    v: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    worst: float = 0.0

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.cache.dtype)

    def step(self, counts: int | dict[int, int], *, commit: bool = True, check: bool = True) -> None:
        counts = {0: counts} if isinstance(counts, int) else counts
        cache = self.cache
        past = {s: cache.n_tokens(s) for s in counts}
        positions = cache.begin(counts)
        assert positions.tolist() == [p for s, n in counts.items() for p in range(past[s], past[s] + n)]
        n_new = sum(counts.values())
        for layer_idx, entries in enumerate(cache.layers):
            (g, d), (_, d_v) = (entry.shape for entry in entries.entries)
            k, v, q = self.random(n_new, g, d), self.random(n_new, g, d_v), self.random(n_new, self.n_heads, d)
            cache.append(layer_idx, k=k, v=v)
            out = cache.attend(layer_idx, q, scale=d**-0.5, softcap=self.softcap)
            assert out.dtype == cache.dtype
            row = 0
            for s, n in counts.items():
                key = s, layer_idx
                old_k = self.k.get(key, k[:0])[: past[s]]
                old_v = self.v.get(key, v[:0])[: past[s]]
                all_k, all_v = torch.cat((old_k, k[row : row + n])), torch.cat((old_v, v[row : row + n]))
                if check:
                    expected = attention(
                        q[row : row + n],
                        all_k,
                        all_v,
                        range(past[s], past[s] + n),
                        scale=d**-0.5,
                        window=entries.window,
                        n_sinks=entries.n_sinks,
                        softcap=self.softcap,
                    )
                    self.worst = max(self.worst, float((out[row : row + n].double() - expected).abs().max()))
                if commit:
                    self.k[key], self.v[key] = all_k, all_v
                row += n
        if commit:
            cache.commit()
