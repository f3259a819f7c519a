"""The ``cuda-graph`` backend: a decode step of static shapes, captured once and replayed as one launch.

A layer is five launches: the normed projections to q, k and v; attention, which turns, stores and merges on the way;
the output projection added to x; gate and up; and the down projection added to x.

Everything that changes from step to step is read on the device: the token and its position. The step itself chooses
the next token greedily, writes it where the next replay reads it and moves the position on. So ``decode_many`` replays
without the host waiting once, and ``choose_next`` queues a step before the host has read the token of the one before:
the device has work while the host writes text. A sampler that needs the logits still can look at each step's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from labkit.backends.graph_prefill import prefill
from labkit.backends.reference import ReferenceStep
from labkit.backends.step import Counts, Rows, as_hidden
from labkit.kernels.triton import attention, product, sampling
from labkit.kernels.triton.product import Matrix
from labkit.model.config import DenseFFN, GroupedAttention
from labkit.model.embedding import check_token_ids


def why_not(transformer: Any, cache: Any) -> str | None:
    """Why the captured step cannot run this model on this cache; None when it can."""
    for module in transformer.modules():
        if getattr(module, "gpu_kind", 16) is None:
            return f"{module.kind} weights have no GPU kernel: plain PyTorch unpacks them for each step."
    if cache.kind != "contiguous":
        return f"the {cache.kind} cache has no captured step."
    return why_not_config(transformer.config)


def why_not_config(config: Any) -> str | None:
    """Why the captured step does not know a model of this shape; None when it does."""
    for layer in config.layers:
        if not isinstance(layer.attention, GroupedAttention):
            return "only grouped attention has a captured step."
        plain = layer.norms == "pre" and isinstance(layer.ffn, DenseFFN) and layer.ffn.limit is None
        if not plain or not layer.ffn.gated or layer.ffn.activation != "silu":
            return "only layers with norms before and a SiLU-gated FFN have a captured step."
        if layer.attention.qk_norm == "full" or layer.attention.rope is None:
            return "query and key norms over all heads, and attention without rotary positions, have no captured step."
    if config.norm.kind != "rms" or config.learned_positions:
        return "only RMSNorm and rotary positions have a captured step."
    return None


class GraphStep:
    """Single tokens of one sequence are captured; on a CPU (for tests) the same step runs without a graph."""

    def __init__(self, transformer: Any, cache: Any, *, keep_hidden: bool = False) -> None:
        self.transformer, self.cache = transformer, cache
        self.computed_by, self.reason = "cuda-graph", ""
        self.hidden: Tensor | None = None
        self._keep_hidden = keep_hidden
        self._reference = ReferenceStep(transformer, cache, keep_hidden=keep_hidden)
        config, device = transformer.config, transformer.device
        head = transformer.head or getattr(transformer.embedding, "head", None)
        self.table = _table(transformer.embedding)
        self.head = self.table if head is None else Matrix.of(head)
        self.layers = [_Layer(block, layer) for block, layer in zip(transformer.layers, config.layers, strict=True)]
        self.token, self.position = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2))
        self.history = torch.zeros(cache.capacity_tokens + 1, dtype=torch.int64, device=device)

        def room(n_values: int) -> Tensor:
            return torch.empty(n_values, dtype=transformer.dtype, device=device)

        self.x = room(config.d_model)
        self.qkv = room(max(sum(m.n_out for m in layer.qkv) for layer in self.layers))
        self.attended = room(max(layer.o.n_in for layer in self.layers))
        self.gated = room(max(layer.gate.n_out for layer in self.layers))
        self.logits = room(config.vocab_size)
        self._scratch: dict[Any, attention.Scratch] = {}
        for layer in config.layers:
            sizes = layer.attention.n_heads, layer.attention.n_kv_heads, layer.attention.d_head
            if sizes not in self._scratch:
                self._scratch[sizes] = attention.Scratch(*sizes, cache.capacity_tokens, device)
        self._choose = sampling.Chooser(config.vocab_size, device)
        self._tables: dict[Any, tuple[Tensor, Tensor]] = {}
        self._slot = -1
        self._graph: Any = None
        self._queued = -1
        """The position of a step that the device was given ahead of its time; its token is ``_given``."""
        self._given = -1
        self._read = _Reader(self.history)

    def __call__(
        self,
        token_ids: Tensor,
        *,
        counts: Counts = None,
        rows: Rows = "last",
        timer: Any,
        should_stop: Callable[[], bool],
    ) -> Tensor:
        self._queued = -1
        if counts is not None:
            self.computed_by, self.reason = "reference", "steps of several sequences are not captured"
            logits = self._reference(token_ids, counts=counts, rows=rows, timer=timer, should_stop=should_stop)
            self.hidden = self._reference.hidden
            return logits
        self.computed_by, self.reason = "cuda-graph", ""
        check_token_ids(token_ids, self.transformer.config.vocab_size)
        token_ids = token_ids.to(self.transformer.device)
        if len(token_ids) > 1:
            x = prefill(self.transformer, self.cache, token_ids, rows=rows, timer=timer, should_stop=should_stop)
            if self._keep_hidden:
                self.hidden = as_hidden(x)
            return self.transformer.predict(x, timer).float()
        with timer("embed"):
            opened = self.transformer.open(self.cache, 1, timer, should_stop)
            opened.check()
        with timer("schedule"):
            self._bind(opened)
            self._place(token_ids)
            self._replay()
            self.cache.commit()
        self._keep()
        return self.logits[None].to(torch.float32, copy=True)

    def _keep(self) -> None:
        """The last step's hidden states, where they are wanted."""
        if self._keep_hidden:
            self.hidden = as_hidden(self.x[None])

    def choose_next(
        self, token_id: int, *, more: bool, timer: Any, should_stop: Callable[[], bool]
    ) -> Callable[[], int] | None:
        """The most likely token after ``token_id`` (the one that this gave last, or any other), when called: it waits
        for the device. -1 where the logits are no numbers.

        ``more``: another will probably be asked for. Its step is queued before the host waits for this one's token, so
        a step's time on the device is charged where it was queued; should nobody ask, its entry in the cache is beyond
        the last token."""
        check_token_ids(token_id, self.transformer.config.vocab_size)
        self.computed_by, self.reason = "cuda-graph", ""
        with timer("embed"):
            opened = self.transformer.open(self.cache, 1, timer, should_stop)
            opened.check()
        with timer("schedule"):
            self._bind(opened)
            at = self.cache.segments[0].n_past
            if self._queued != at or self._given != token_id:
                self._place(torch.tensor([token_id]))
                self._replay()
                self._read.ask(at + 1)
            self._queued = -1
            self._keep()
            if more and not self._keep_hidden and at + 1 < self.cache.capacity_tokens:
                self._replay()
                self._read.ask(at + 2)
                self._queued = at + 1
            self.cache.commit()
        return partial(self._take, at + 1)

    def _take(self, position: int) -> int:
        self._given = self._read(position)
        return self._given

    def decode_many(self, token_ids: Tensor, n_new: int) -> Tensor:
        """Greedy ids of ``n_new`` steps that start from one token, without the host waiting between them."""
        opened = self.transformer.open(self.cache, n_new)
        first = self.cache.segments[0].n_past
        self._bind(opened)
        self._place(token_ids)
        for _ in range(n_new):
            self._replay()
        self.cache.commit()
        return self.history[first + 1 : first + 1 + n_new]

    def _place(self, token_ids: Tensor) -> None:
        self._queued = -1
        self.token.copy_(token_ids)
        self.position.fill_(self.cache.segments[0].n_past)

    def _replay(self) -> None:
        if self.transformer.device.type != "cuda":
            self._compute()
            return
        if self._graph is None:
            self._graph = self._capture()
        self._graph.replay()

    def _capture(self) -> Any:
        """Compile and warm up on a side stream, as CUDA asks, then record; token and position are put back."""
        kept = self.token.clone(), self.position.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())

        def put_back() -> None:
            self.token.copy_(kept[0])
            self.position.copy_(kept[1])

        with torch.cuda.stream(side):
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
        slot = self.cache.slot_of(self.cache.segments[0].sequence_id)
        if slot != self._slot:
            self._slot, self._graph, self._queued = slot, None, -1
        if self._tables:
            return
        positions = torch.arange(self.cache.capacity_tokens, device=self.transformer.device)
        for layer in self.transformer.config.layers:
            key = layer.attention.rope, layer.attention.d_head
            if key not in self._tables:
                cos, sin = opened.angles_at(positions, *key)
                self._tables[key] = cos.contiguous(), sin.contiguous()

    def _compute(self) -> None:
        """One step, from the token's row of the embedding to the next token. No size or branch depends on data."""
        config = self.transformer.config
        sampling.lookup(self.table, self.token, self.x, config.embedding_scale)
        for idx, layer in enumerate(self.layers):
            kind, norms = layer.kind, layer.norms
            product.project_mixed(self.x, layer.qkv, self.qkv, norm=norms[0])
            keys, values = (self.cache.store[idx][name][self._slot] for name in ("k", "v"))
            attention.attend_one(
                self.qkv, *self._tables[kind.rope, kind.d_head], self.position, keys, values, self.attended,
                self._scratch[kind.n_heads, kind.n_kv_heads, kind.d_head], n_heads=kind.n_heads, scale=layer.scale,
                layout=kind.rope.layout, window=kind.window, n_sinks=kind.n_sinks, softcap=kind.softcap,
                q_norm=layer.head_norms[0], k_norm=layer.head_norms[1],
            )  # fmt: skip
            product.project(self.attended[: layer.o.n_in], [layer.o], self.x, residual=self.x)
            product.gated_mixed(self.x, layer.gate, layer.up, self.gated[: layer.gate.n_out], norm=norms[1])
            product.project(self.gated[: layer.down.n_in], [layer.down], self.x, residual=self.x)
        product.project(self.x, [self.head], self.logits, norm=self.transformer.final_norm)
        if config.logit_softcap is not None:
            self.logits.copy_(config.logit_softcap * torch.tanh(self.logits / config.logit_softcap))
        self._choose(self.logits, self.token, self.position, self.history)


class _Reader:
    """Reads chosen tokens behind the device, which goes on: copied to the host as soon as they are there, two at most
    on their way."""

    def __init__(self, history: Tensor) -> None:
        self._history, self._on_gpu = history, history.is_cuda
        self._copies = torch.zeros(2, dtype=torch.int64, pin_memory=self._on_gpu)
        self._there = [torch.cuda.Event() for _ in range(2)] if self._on_gpu else []

    def ask(self, position: int) -> None:
        """For the token at ``position``, which the step that was queued last chooses."""
        if self._on_gpu:
            self._copies[position % 2].copy_(self._history[position], non_blocking=True)
            self._there[position % 2].record()

    def __call__(self, position: int) -> int:
        """The token, when it is there."""
        if not self._on_gpu:
            return int(self._history[position])
        self._there[position % 2].synchronize()
        return int(self._copies[position % 2])


class _Layer:
    """One layer's weights as the kernels take them."""

    def __init__(self, block: Any, layer: Any) -> None:
        part, ffn = block.attention, block.ffn
        self.kind, self.scale = layer.attention, part.scale
        self.norms = block.attention_norm, block.ffn_norm
        self.head_norms = (part.q_norm, part.k_norm) if self.kind.qk_norm else (None, None)
        self.qkv = [Matrix.of(linear) for linear in (part.q_proj, part.k_proj, part.v_proj)]
        self.o = Matrix.of(part.o_proj)
        self.gate, self.up, self.down = (Matrix.of(linear) for linear in (ffn.gate_proj, ffn.up_proj, ffn.down_proj))


def _table(embedding: Any) -> Matrix:
    """The embedding as a matrix: its own weights, or those of the packed head that it shares."""
    if hasattr(embedding, "head"):
        return Matrix.of(embedding.head)
    weight = embedding.weight
    n_out, n_in = weight.shape
    return Matrix(16, weight, weight, None, None, n_out, n_in, 64)
