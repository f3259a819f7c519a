"""The ``fused`` backend's step: one call of a compiled function, on whichever cache."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from labkit.backends import lookup, storage
from labkit.backends.step import Counts, Rows
from labkit.kernels.cpu import cancellation, cells, machine_code, memory, plan, team
from labkit.model.embedding import check_token_ids

MIN_CHUNK, MAX_CHUNK = 16, 256
"""Tokens that go through the model together: weights are read once for all of them."""
LAYER_S = 0.1
"""How long a chunk should be in one layer: a run can be stopped between two layers, not within one."""
FIRST_RATE = 25e9
"""Products a second that the first chunk's size counts on; from then on the machine's own speed is known."""


def find(transformer: Any, cache: Any) -> tuple[plan.Plan | None, str | None]:
    """The model's tables, and why the compiled step cannot run it on this cache; None when it can."""
    made, reason = plan.find(transformer)
    return made, reason or storage.why_not(cache)


def weights_a_layer(transformer: Any) -> int:
    """In the linear layers of one block."""
    linears = [m for m in transformer.layers[0].modules() if hasattr(m, "in_features")]
    return sum(int(m.in_features) * int(m.out_features) for m in linears)


def _clamp(n_tokens: float) -> int:
    return int(min(max(n_tokens, MIN_CHUNK), MAX_CHUNK))


def _never() -> bool:
    return False


class FusedStep:
    """Any number of tokens of any number of sequences, a chunk at a time; a token's logits are the same bits in
    whatever company. ``made`` is what ``find`` found; raises ValueError when that has a reason. ``given`` stands in for
    the embedding of a model that has none."""

    computed_by = "fused"

    def __init__(
        self,
        transformer: Any,
        cache: Any,
        n_threads: int,
        made: plan.Plan | None = None,
        *,
        keep_hidden: bool = False,
        given: lookup.Given | None = None,
    ) -> None:
        if made is None:
            made, reason = find(transformer, cache)
            if made is None or reason:
                raise ValueError(f"the compiled step cannot serve here: {reason}")
        self.transformer, self.cache = transformer, cache
        self.hidden: Tensor | None = None
        self._keep_hidden = keep_hidden
        self._plan = made
        self._team = team.team(n_threads)
        self._active, self._active_of_many = made.active, made.active_of_many
        self._storages: dict[Any, Any] = {}
        self._rotary: list[tuple[Tensor, Tensor]] = []
        self._first_chunk = _clamp(LAYER_S * FIRST_RATE / max(1, weights_a_layer(transformer)))
        self._table = given or lookup.Table(transformer)
        self._pieces, self._piece_sizes = torch.empty(16), {}
        self._phases = np.zeros(cells.N_PHASES, np.int64)
        self._sizes = np.zeros(cells.N_SIZES, np.int64)
        s = self._sizes
        s[[cells.N_LAYERS, cells.D_MODEL]] = len(made.layers), made.d_model
        s[[cells.LAYER_NORM, cells.FINAL_W, cells.FINAL_B]] = made.layer_norm, *made.final_norm
        s[[cells.WIDEST, cells.N_PARTS]] = made.widest, self._team.n_threads
        s.view(np.float32)[[2 * cells.EPS_BITS, 2 * cells.CAP_BITS]] = made.eps, made.logit_softcap
        self._job = np.zeros(cells.N_CELLS, np.int64)
        job = self._job
        job[cells.FUNCTION] = machine_code.address("step")
        job[[cells.LINEARS, cells.FLOATS]] = made.linears.ctypes.data, made.floats.ctypes.data
        job[[cells.SIZES, cells.PHASES]] = s.ctypes.data, self._phases.ctypes.data
        self._token = np.zeros(1, np.int64)
        self._one: np.ndarray | None = None

    @property
    def reason(self) -> str:
        n_threads = self._team.n_threads
        return self._active.note(n_threads) or self._active_of_many.note(n_threads)

    def __call__(
        self,
        token_ids: Tensor,
        *,
        counts: Counts = None,
        rows: Rows = "last",
        timer: Any,
        should_stop: Callable[[], bool],
    ) -> Tensor:
        check_token_ids(token_ids, self._plan.vocab_size)
        n = len(token_ids)
        if n == 1 and counts is None and self.cache.in_place_tokens:
            self._advance(int(token_ids.numpy()[0]), timer, should_stop)
            # By numpy: PyTorch copies a vocabulary with threads that then linger where the next step is to run.
            return torch.from_numpy(self._own_logits.numpy()[None, : self._plan.vocab_size].copy())
        with timer("embed"):
            opened = self.transformer.open(self.cache, n if counts is None else counts, timer, should_stop)
            opened.check()
            segments = self.cache.segments
            in_place = all(segment.n_new <= self.cache.in_place_tokens for segment in segments)
        if not in_place and len(segments) > 1:
            return self._in_turn(token_ids, rows, timer, should_stop)
        with timer("embed"):
            x = self._table.rows(token_ids.numpy(), opened)
        with timer("schedule"):
            where = self._storage(storage.InPlace if in_place else storage.Staging, opened)
            with timer("kv_cache"):
                where.begin(opened)
            found, hidden, at, size = [], [], 0, self._first_chunk
            while at < n:
                end = min(n, at + size)
                began = time.perf_counter()
                logits = self._run(x[at:end], at, where, opened, rows)
                found.append(logits)
                if self._keep_hidden:
                    hidden.append(torch.from_numpy(x[at:end][where.lasts]))
                with timer("kv_cache"):
                    where.close(at, end - at, opened)
                if end < n:
                    size = _clamp((end - at) * LAYER_S * len(self._plan.layers) / (time.perf_counter() - began))
                    opened.check()
                at = end
            with timer("kv_cache"):
                self.cache.commit()
        if hidden:
            self.hidden = torch.cat(hidden)
        found = [logits for logits in found if len(logits)]
        return found[0] if len(found) == 1 else torch.cat(found)

    def _in_turn(self, token_ids: Tensor, rows: Rows, timer: Any, should_stop: Callable[[], bool]) -> Tensor:
        """A step of several sequences, some of which this kind of cache stores only when they have passed all layers:
        one of these after the other, then the rest together. Company does not show in a token's logits.

        The cache has found room for all. After the first of them nothing is asked whether to stop, so that all of the
        step counts or nothing."""
        segments = self.cache.segments
        long = [[s] for s in segments if s.n_new > self.cache.in_place_tokens]
        short = [s for s in segments if s.n_new <= self.cache.in_place_tokens]
        logits, hidden = {}, {}
        for which in [*long, *([short] if short else [])]:
            counts = {s.sequence_id: s.n_new for s in which}
            ids = torch.cat([token_ids[s.rows] for s in which])
            stop = _never if logits else should_stop
            found = self(ids, counts=counts, rows=rows, timer=timer, should_stop=stop)
            sizes = [n if rows == "all" else 1 for n in counts.values()]
            logits.update(zip(counts, found.split(sizes), strict=True))
            if self.hidden is not None:
                hidden.update(zip(counts, self.hidden.split(sizes), strict=True))
        order = [s.sequence_id for s in segments]
        if hidden:
            self.hidden = torch.cat([hidden[sequence_id] for sequence_id in order])
        return torch.cat([logits[sequence_id] for sequence_id in order])

    def choose_next(
        self, token_id: int, *, more: bool, timer: Any, should_stop: Callable[[], bool]
    ) -> Callable[[], int] | None:
        if not self.cache.in_place_tokens:
            return None
        check_token_ids(token_id, self._plan.vocab_size)
        chosen = self._advance(token_id, timer, should_stop)
        return lambda: chosen

    def _advance(self, token_id: int, timer: Any, should_stop: Callable[[], bool]) -> int:
        """One token of the one sequence: the most likely next one; the logits are then in ``_own_logits``.

        The compiled step looks the one up and finds the other. After it has swept the weights through the processor's
        caches everything that Python does is cold, so this does little: a tenth of a step's time is at stake."""
        with timer("schedule"):
            opened = self.transformer.open(self.cache, 1, timer, should_stop)
            opened.check()
            where = self._storage(storage.InPlace, opened)
            with timer("kv_cache"):
                where.open(0, 1, "last")
            job = self._job_of_one(where)
            if not job[cells.TABLE]:
                with timer("embed"):
                    row = self._table.rows(np.array([token_id]), opened)
                job[cells.X] = row.ctypes.data
            self._token[0] = token_id
            self._own_sizes[cells.PIECES] = self._room_for_pieces(where)
            self._launch(job, opened, alone=True)
            with timer("kv_cache"):
                self.cache.commit()
            if self._keep_hidden:
                self.hidden = torch.from_numpy(self._own_hidden.copy())
            return int(self._token[0])

    def _job_of_one(self, where: Any) -> np.ndarray:
        """The job of one token of one sequence: made once a run, since it has one storage."""
        if self._one is not None:
            return self._one
        job = self._job.copy()
        n_vocab = self._plan.vocab_size
        self._own_logits = torch.empty(n_vocab + -n_vocab % 4, dtype=torch.float32)
        self._own_table, self._own_sizes = self._table.cells(), self._sizes.copy()
        job[cells.LAYERS], job[cells.LOGITS] = where.layers_at, self._own_logits.data_ptr()
        job[[cells.SIZES, cells.TOKEN]] = self._own_sizes.ctypes.data, self._token.ctypes.data
        job[cells.TABLE] = 0 if self._own_table is None else self._own_table.ctypes.data
        if self._keep_hidden:
            self._own_hidden = np.empty((1, self._plan.d_model), np.float32)
            job[cells.HIDDEN] = self._own_hidden.ctypes.data
        self._own_sizes[[cells.N_NEW, cells.HELD, cells.OWN]] = 1, where.held_at, where.own_floats
        self._work = torch.zeros(self._n_bytes(1, where, self._own_sizes) // 4 + 32)
        job[cells.WORK] = _aligned(self._work)
        self._one = job
        return job

    def _storage(self, kind: Any, opened: Any) -> Any:
        """Where the step's keys and values lie: looked up when first asked for."""
        found = self._storages.get(kind)
        if found is None:
            layers = self._plan.layers.copy()
            for row, layer in zip(layers, self.transformer.config.layers, strict=True):
                rope = layer.attention.rope
                if rope is not None:
                    cos, sin = pair = self._plan.rotary_of(opened, layer)
                    self._rotary.append(pair)
                    row[[plan.COS, plan.SIN, plan.N_TURNED]] = cos.data_ptr(), sin.data_ptr(), cos.shape[1]
                    row[plan.INTERLEAVED] = rope.layout == "interleaved"
            found = self._storages[kind] = kind(self.cache, layers)
        return found

    def _run(self, x: np.ndarray, first: int, where: Any, opened: Any, rows: Rows) -> Tensor:
        """x (T, M), tokens ``first`` ... of the open step, through the model: logits float32 of the rows that are asked
        for. x is then the hidden states, where they are wanted."""
        n_new, n_vocab = len(x), self._plan.vocab_size
        where.open(first, n_new, rows)
        job, sizes = self._job, self._sizes
        logits = torch.empty((int(where.held[cells.N_LASTS]), n_vocab + -n_vocab % 4), dtype=torch.float32)
        job[cells.LAYERS], job[cells.X], job[cells.LOGITS] = where.layers_at, x.ctypes.data, logits.data_ptr()
        job[cells.HIDDEN] = x.ctypes.data if self._keep_hidden else 0
        sizes[[cells.N_NEW, cells.HELD, cells.OWN]] = n_new, where.held_at, where.own_floats
        sizes[cells.PIECES] = self._room_for_pieces(where)
        room = self._room(n_new, where)  # ours until the job is done: another run may meanwhile give the model more
        job[cells.WORK] = _aligned(room)
        self._launch(job, opened, alone=n_new <= memory.ALONE)
        return logits[:, :n_vocab]

    def _launch(self, job: np.ndarray, opened: Any, *, alone: bool) -> None:
        """Run the job and charge its phases. ``alone``: few tokens, which are not stopped on their way."""
        phases = self._phases
        phases.fill(0)
        if alone:
            self._active.run(self._team, job)
        else:
            with cancellation.cancellable(opened.should_stop, phases, cells.ASKED):
                n_tokens = int(self._sizes[cells.N_NEW])
                self._active_of_many.run(self._team, job, n_tokens=n_tokens)
        tick, ticks = self._team.system.tick_s, phases.data.tolist()
        opened.timer.charge({name: n * tick for name, n in zip(cells.PHASE_NAMES, ticks, strict=False) if n})
        if ticks[cells.STOPPED]:
            raise opened.cancelled()

    def _n_bytes(self, n_new: int, where: Any, sizes: np.ndarray) -> int:
        panels = memory.panel_bytes(where.layers, where.n_keys) if where.n_keys else 0
        n_threads = self._team.n_threads
        return memory.step_bytes(n_new, int(sizes[cells.WIDEST]), int(sizes[cells.OWN]), panels, n_threads)

    def _room(self, n_new: int, where: Any) -> Tensor:
        """Working memory for so many tokens: the model's own, since jobs take turns, and memory that was touched before
        costs nothing. Inputs that do not fill whole blocks count on zeros behind them."""
        n_cells, spare = self._n_bytes(n_new, where, self._sizes) // 4 + 32, self._plan.spare
        if spare is None or spare.numel() < n_cells or not self._plan.fills_blocks:
            spare = self._plan.spare = torch.zeros(n_cells, dtype=torch.float32)
        return spare

    def _room_for_pieces(self, where: Any) -> int:
        """The address of memory for a few tokens' attention in pieces."""
        key = where, int(where.held[cells.N_FEW]), int(where.held[cells.N_TILES])
        n = self._piece_sizes.get(key)
        if n is None:
            n = self._piece_sizes[key] = memory.piece_floats(where.layers, *key[1:], self._team.n_threads)
        if self._pieces.numel() < n + 16:
            self._pieces = torch.empty(2 * n + 16)
        return _aligned(self._pieces)


def _aligned(memory_of: Tensor) -> int:
    """The first address in it that begins a cache line."""
    return (memory_of.data_ptr() + 63) // 64 * 64
