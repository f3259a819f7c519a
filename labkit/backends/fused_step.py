"""The ``fused`` backend's step: one call of a compiled function, on whichever cache."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from labkit.backends import lookup, storage
from labkit.backends.reference import ReferenceStep
from labkit.backends.step import Counts, Rows
from labkit.kernels.cpu import cells, choice, heed, machine_code, memory, plan, team
from labkit.model.embedding import check_token_ids

MIN_CHUNK, MAX_CHUNK = 16, 256
"""Tokens of a prompt that go through the model together: weights are read once for all of them."""
LAYER_S = 0.1
"""How long a chunk should be in one layer: a run can be stopped between two layers, not within one."""
FIRST_RATE = 25e9
"""Products a second that the first chunk's size counts on; from then on the machine's own speed is known."""
FEW = 8
"""Fewer tokens than this (a draft to verify) stay in the compiled step even where PyTorch's products are faster."""


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


class FusedStep:
    """A token, a prompt in chunks, or a few tokens of several sequences. ``made`` is what ``find`` found; raises
    ValueError when that has a reason."""

    def __init__(
        self,
        transformer: Any,
        cache: Any,
        n_threads: int,
        made: plan.Plan | None = None,
        *,
        keep_hidden: bool = False,
    ) -> None:
        if made is None:
            made, reason = find(transformer, cache)
            if made is None or reason:
                raise ValueError(f"the compiled step cannot serve here: {reason}")
        self.transformer, self.cache = transformer, cache
        self.computed_by = "fused"
        self.hidden: Tensor | None = None
        self._keep_hidden = keep_hidden
        self._reference = ReferenceStep(transformer, cache, keep_hidden=keep_hidden)
        self._prompt_by_torch = choice.torch_is_faster(transformer, n_threads)
        self._decode, self._prefill = machine_code.address("decode"), machine_code.address("prefill")
        self._plan = made
        self._team = team.team(n_threads)
        self._turnout = made.turnout
        self._storages: dict[Any, Any] = {}
        self._rotary: list[tuple[Tensor, Tensor]] = []
        self._first_chunk = _clamp(LAYER_S * FIRST_RATE / max(1, weights_a_layer(transformer)))
        self._table = lookup.Table(transformer)
        _, _, n_cells = memory.room(made.widest, self._team.n_threads)
        self._work = torch.zeros(n_cells + 16, dtype=torch.float32)
        self._pieces, self._piece_cells = torch.empty(0), {}
        self._phases = np.zeros(cells.N_PHASES, np.int64)
        self._sizes = np.zeros(cells.N_SIZES, np.int64)
        s = self._sizes
        s[[cells.N_LAYERS, cells.D_MODEL]] = len(made.layers), made.d_model
        s[[cells.LAYER_NORM, cells.FINAL_W, cells.FINAL_B]] = made.layer_norm, *made.final_norm
        s[[cells.WIDEST, cells.OWN, cells.N_PARTS]] = made.widest, made.attention_floats, self._team.n_threads
        s.view(np.float32)[[2 * cells.EPS_BITS, 2 * cells.CAP_BITS]] = made.eps, made.logit_softcap
        self._mixture = torch.empty(made.mixture_floats + 16)
        s[cells.MIXTURE] = (self._mixture.data_ptr() + 63) // 64 * 64
        self._job = np.zeros(cells.N_CELLS, np.int64)
        job = self._job
        job[[cells.LINEARS, cells.FLOATS]] = made.linears.ctypes.data, made.floats.ctypes.data
        job[[cells.SIZES, cells.PHASES]] = s.ctypes.data, self._phases.ctypes.data
        self._token = np.zeros(1, np.int64)
        self._one: np.ndarray | None = None

    @property
    def reason(self) -> str:
        notes = [self._turnout.note(self._team.n_threads)]
        if self._prompt_by_torch:
            notes.append("prompts go through PyTorch's own products: faster on this processor")
        return "; ".join(note for note in notes if note)

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
        self.computed_by = "fused"
        if self._prompt_by_torch and n >= FEW:
            return self._by_reference(token_ids, counts, rows, timer, should_stop)
        if n == 1 and counts is None and self.cache.in_place_tokens:
            self._advance(int(token_ids.numpy()[0]), timer, should_stop)
            # By numpy: PyTorch copies a vocabulary with threads that then linger where the next step is to run.
            return torch.from_numpy(self._own_logits.numpy()[None, : self._plan.vocab_size].copy())
        with timer("embed"):
            opened = self.transformer.open(self.cache, n if counts is None else counts, timer, should_stop)
            opened.check()
            kind = storage.serves(self.cache)
            if kind is not None:
                x = self._table.rows(token_ids.numpy(), opened)
        if kind is None:
            return self._by_reference(token_ids, counts, rows, timer, should_stop)
        with timer("schedule"):
            where = self._storage(kind, opened)
            with timer("kv_cache"):
                where.begin(opened)
            found, hidden = [], []
            at, size = 0, self._first_chunk if len(self.cache.segments) == 1 else n
            while True:
                # One token left over would go through decode's step, which rounds differently: how a prompt is cut
                # must not show in its result.
                end = n if at + size >= n - 1 else at + size
                began = time.perf_counter()
                logits = self._run(x[at:end], at, where, opened, rows=rows, wanted=rows == "all" or end == n)
                if rows == "all" or end == n:
                    found.append(logits)
                    if self._keep_hidden:
                        hidden.append(self._hidden_of(x[at:end], where, rows))
                with timer("kv_cache"):
                    where.close(at, end - at, opened)
                if end == n:
                    break
                fitting = (end - at) * LAYER_S * len(self._plan.layers) / (time.perf_counter() - began)
                at, size = end, _clamp(fitting)
                opened.check()
            with timer("kv_cache"):
                self.cache.commit()
        if hidden:
            self.hidden = torch.cat(hidden)
        return found[0] if len(found) == 1 else torch.cat(found)

    def choose_next(
        self, token_id: int, *, more: bool, timer: Any, should_stop: Callable[[], bool]
    ) -> Callable[[], int] | None:
        if not self.cache.in_place_tokens:
            return None
        check_token_ids(token_id, self._plan.vocab_size)
        self.computed_by = "fused"
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
            self._launch(job, opened, alone=True)
            with timer("kv_cache"):
                self.cache.commit()
            if self._keep_hidden:
                self.hidden = torch.from_numpy(self._own_hidden.copy())
            return int(self._token[0])

    def _job_of_one(self, where: Any) -> np.ndarray:
        """The job of one token of one sequence: made once a run, since it has one storage."""
        if self._one is None:
            job = self._job.copy()
            n_vocab = self._plan.vocab_size
            self._own_logits = torch.empty(n_vocab + -n_vocab % 4, dtype=torch.float32)
            self._own_table, self._own_sizes = self._table.cells(), self._sizes.copy()
            job[[cells.FUNCTION, cells.LAYERS]] = self._decode, where.layers_at
            job[cells.LOGITS] = self._own_logits.data_ptr()
            job[[cells.SIZES, cells.TOKEN]] = self._own_sizes.ctypes.data, self._token.ctypes.data
            job[cells.TABLE] = 0 if self._own_table is None else self._own_table.ctypes.data
            if self._keep_hidden:
                self._own_hidden = np.empty((1, self._plan.d_model), np.float32)
                job[cells.HIDDEN] = self._own_hidden.ctypes.data
            job[cells.WORK] = (self._work.data_ptr() + 63) // 64 * 64
            self._own_pieces = torch.empty(memory.piece_floats(where.layers, 1, self._team.n_threads) + 16)
            self._own_sizes[[cells.N_NEW, cells.WANTED, cells.HELD]] = 1, True, where.held_at
            self._own_sizes[cells.PIECES] = (self._own_pieces.data_ptr() + 63) // 64 * 64
            self._one = job
            return job
        return self._one

    def _by_reference(
        self, token_ids: Tensor, counts: Counts, rows: Rows, timer: Any, should_stop: Callable[[], bool]
    ) -> Tensor:
        self.computed_by = "reference"
        logits = self._reference(token_ids, counts=counts, rows=rows, timer=timer, should_stop=should_stop)
        self.hidden = self._reference.hidden
        return logits

    def _hidden_of(self, x: np.ndarray, where: Any, rows: Rows) -> Tensor:
        """What the compiled step left in its input (T, M): the residual stream after the last block."""
        return torch.from_numpy(x if rows == "all" else x[where.lasts])

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

    def _run(self, x: np.ndarray, first: int, where: Any, opened: Any, *, rows: Rows, wanted: bool) -> Tensor:
        """x (T, M), tokens ``first`` ... of the open step, through the model: logits float32 of the rows that are asked
        for, when ``wanted``. x is then the hidden states."""
        n_new, n_vocab = len(x), self._plan.vocab_size
        where.open(first, n_new, rows)
        job, sizes = self._job, self._sizes
        n_lasts = int(where.held[cells.N_LASTS])
        logits = torch.empty((n_lasts, n_vocab + -n_vocab % 4), dtype=torch.float32)
        job[cells.LAYERS], job[cells.X], job[cells.LOGITS] = where.layers_at, x.ctypes.data, logits.data_ptr()
        sizes[cells.N_NEW], sizes[cells.WANTED], sizes[cells.HELD] = n_new, wanted, where.held_at
        if n_new == 1 or where.held[cells.APART]:
            sizes[cells.PIECES] = self._room_for_pieces(where, n_new)
        job[cells.FUNCTION] = self._decode if n_new == 1 else self._prefill
        job[cells.HIDDEN] = x.ctypes.data if n_new == 1 and self._keep_hidden else 0
        work = self._room(n_new, where)
        job[cells.WORK] = (work.data_ptr() + 63) // 64 * 64
        self._launch(job, opened, alone=n_new == 1)
        return logits[:, :n_vocab]

    def _launch(self, job: np.ndarray, opened: Any, *, alone: bool) -> None:
        """Run the job and charge its phases. ``alone``: one token, which is not stopped on its way."""
        phases = self._phases
        phases.fill(0)
        if alone:
            self._turnout.run(self._team, job, alone=True)
        else:
            with heed.heeding(opened.should_stop, phases, cells.ASKED):
                self._turnout.run(self._team, job, alone=False)
        tick, ticks = self._team.system.tick_s, phases.data.tolist()
        opened.timer.charge({name: n * tick for name, n in zip(cells.PHASE_NAMES, ticks, strict=False) if n})
        if ticks[cells.STOPPED]:
            raise opened.cancelled()

    def _room(self, n_new: int, where: Any) -> Tensor:
        """Working memory for a step of this many tokens. A prompt's is the model's own: jobs take turns, and memory
        that was touched before costs nothing. Inputs that do not fill whole blocks count on zeros behind them."""
        n_threads, sizes = self._team.n_threads, self._sizes
        if n_new == 1:
            return self._work
        n_keys = 0 if where.held[cells.APART] else self.cache.segments[0].n_total
        panels = self._plan.panel_bytes(n_keys)
        n_bytes = memory.step_bytes(n_new, int(sizes[cells.WIDEST]), int(sizes[cells.OWN]), panels, n_threads)
        n_cells, spare = n_bytes // 4 + 32, self._plan.spare
        if spare is None or spare.numel() < n_cells or not self._plan.fills_blocks:
            spare = self._plan.spare = torch.zeros(n_cells, dtype=torch.float32)
        return spare

    def _room_for_pieces(self, where: Any, n_tokens: int) -> int:
        """The address of memory for this many tokens' attention in pieces."""
        key = where, n_tokens
        if key not in self._piece_cells:
            self._piece_cells[key] = memory.piece_floats(where.layers, n_tokens, self._team.n_threads) + 16
        if self._pieces.numel() < self._piece_cells[key]:
            self._pieces = torch.empty(self._piece_cells[key])
        return (self._pieces.data_ptr() + 63) // 64 * 64
