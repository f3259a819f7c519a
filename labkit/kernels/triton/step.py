# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""The ``cuda-graph`` backend: a decode step of static shapes, captured once and replayed as one launch.

Everything that changes from step to step is read on the device: the token, its position, the number of stored keys.
The step itself chooses the next token greedily, writes it where the next replay reads it and moves the position on, so
``decode_many`` replays without the host waiting once; a sampler that needs the logits still can look at each step's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from labkit.kernels.triton import attention, elementwise, sampling


def why_not(transformer: Any, cache: Any) -> str | None:
    """Why the captured step cannot run this model on this cache; None when it can."""
    config = transformer.config
    if cache.kind != "contiguous":
        return f"the {cache.kind} cache has no captured step."
    for layer in config.layers:
        plain = layer.norms == "pre" and hasattr(layer.ffn, "d_ff") and not hasattr(layer.ffn, "n_experts")
        if not plain or not layer.ffn.gated or layer.ffn.activation != "silu":
            return "only layers with norms before and a SiLU-gated FFN have a captured step."
        if layer.attention.qk_norm is not None or layer.attention.rope is None:
            return "query and key norms, and attention without rotary positions, have no captured step."
    if config.norm.kind != "rms" or transformer.positions is not None:
        return "only RMSNorm and rotary positions have a captured step."
    return None


class GraphStep:
    """``step(token_ids, timer=..., should_stop=...)``; on a CPU (for tests) the same step runs without a graph."""

    computed_by, reason = "cuda-graph", ""

    def __init__(self, transformer: Any, cache: Any) -> None:
        self.transformer, self.cache = transformer, cache
        device = transformer.device
        self.token = torch.zeros(1, dtype=torch.int64, device=device)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.n_stored = torch.ones(1, dtype=torch.int64, device=device)
        self.history = torch.zeros(cache.capacity_tokens + 1, dtype=torch.int64, device=device)
        self.logits: Tensor | None = None
        self._tables: dict[Any, tuple[Tensor, Tensor]] = {}
        self._slot = -1
        self._graph: Any = None

    def __call__(self, token_ids: Tensor, *, timer: Any, should_stop: Callable[[], bool]) -> Tensor:
        if len(token_ids) > 1:
            return self.transformer(token_ids, self.cache, last_only=True, timer=timer, should_stop=should_stop)
        with timer("embed"):
            opened = self.transformer.begin(self.cache, 1, timer, should_stop)
            opened.check()
        with timer("schedule"):
            self._bind(opened)
            self._place(token_ids)
            self._replay()
            self.cache.commit()
        assert self.logits is not None
        return self.logits.clone()

    def decode_many(self, token_ids: Tensor, n_new: int) -> Tensor:
        """Greedy ids of ``n_new`` steps that start from one token, without the host waiting between them."""
        opened = self.transformer.begin(self.cache, n_new)
        first = self.cache.segments[0].n_past
        self._bind(opened)
        self._place(token_ids)
        for _ in range(n_new):
            self._replay()
        self.cache.commit()
        return self.history[first + 1 : first + 1 + n_new]

    def _place(self, token_ids: Tensor) -> None:
        n_past = self.cache.segments[0].n_past
        self.token.copy_(token_ids)
        self.position.fill_(n_past)
        self.n_stored.fill_(n_past + 1)

    def _replay(self) -> None:
        if self.transformer.device.type != "cuda":
            self._compute()
            return
        if self._graph is None:
            self._graph = self._capture()
        self._graph.replay()

    def _capture(self) -> Any:
        """Warm up on a side stream, as CUDA asks, then record; the counters are put back."""
        kept = [t.clone() for t in (self.token, self.position, self.n_stored)]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())

        def put_back() -> None:
            for tensor, value in zip((self.token, self.position, self.n_stored), kept, strict=True):
                tensor.copy_(value)

        with torch.cuda.stream(side):
            for _ in range(2):
                self._compute()
                put_back()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._compute()
        put_back()
        return graph

    def _bind(self, opened: Any) -> None:
        """Rotary tables for every position, and this sequence's part of the cache; a new slot needs a new graph."""
        slot = self.cache._slots[self.cache.segments[0].sequence_id]
        if slot != self._slot:
            self._slot, self._graph = slot, None
        if self._tables:
            return
        positions = torch.arange(self.cache.capacity_tokens, device=self.transformer.device)
        everywhere = dataclasses.replace(opened, positions=positions, _angles={})
        for layer in self.transformer.config.layers:
            key = layer.attention.rope, layer.attention.d_head
            if key not in self._tables:
                self._tables[key] = everywhere.angles(*key, torch.float32)

    def _compute(self) -> None:
        """One step, from the token's row of the embedding to the next token. No size or branch depends on data."""
        transformer, config = self.transformer, self.transformer.config
        x = transformer.embedding(self.token)
        if config.embedding_scale != 1.0:
            x = x * config.embedding_scale
        angles = {key: tuple(t.index_select(0, self.position) for t in pair) for key, pair in self._tables.items()}
        for idx, (block, layer) in enumerate(zip(transformer.layers, config.layers, strict=True)):
            part, kind = block.attention, layer.attention
            normed = _norm(block.attention_norm, x)
            q = part.q_proj(normed).view(1, kind.n_heads, kind.d_head)
            k = part.k_proj(normed).view(1, kind.n_kv_heads, kind.d_head)
            v = part.v_proj(normed).view(1, kind.n_kv_heads, kind.d_head)
            cos, sin = angles[kind.rope, kind.d_head]
            keys, values = (self.cache.store[idx][name][self._slot] for name in ("k", "v"))
            q = elementwise.rotate_append(q, k, v, cos, sin, self.position, keys, values, layout=kind.rope.layout)
            attended = attention.attend_one(
                q, keys, values, self.n_stored, scale=part.scale, window=kind.window, n_sinks=kind.n_sinks,
                softcap=kind.softcap,
            )  # fmt: skip
            x = x + part.o_proj(attended.view(1, -1))
            normed = _norm(block.ffn_norm, x)
            x = x + block.ffn.down_proj(elementwise.gate(block.ffn.gate_proj(normed), block.ffn.up_proj(normed)))
        logits = transformer.logits(_norm(transformer.final_norm, x))
        if self.logits is None:
            self.logits = torch.empty_like(logits)
        self.logits.copy_(logits)
        sampling.argmax(self.logits, self.token)
        self.position.add_(1)
        self.n_stored.add_(1)
        self.history.index_copy_(0, self.position, self.token)


def _norm(module: Any, x: Tensor) -> Tensor:
    return elementwise.rms_norm(x, module.weight, module.eps, unit_offset=module.unit_offset)
