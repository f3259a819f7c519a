"""The ``fused`` backend on a CPU: a decode step is one call of a compiled function.

Compiling takes seconds the first time on a machine and is kept on disk; it happens in a background thread, and the
reference serves until it is done (``labkit.kernels.backends.status`` says so).
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from labkit.kernels.cpu import heed, lookup

MIN_CHUNK, MAX_CHUNK = 16, 256
"""Tokens of a prompt that go through the model together: weights are read once for all of them."""
LAYER_S = 0.1
"""How long a chunk should be in one layer: a run can be stopped between two layers, not within one."""
FIRST_RATE = 25e9
"""Products a second that the first chunk's size counts on; from then on the machine's own speed is known."""


FEW = 8
"""Fewer tokens than this (a draft to verify) stay in the compiled step even where PyTorch's products are faster."""


class Compilation:
    """The compiled functions' state: cold, compiling, ready, or failed with a reason."""

    def __init__(self) -> None:
        self.state = "cold"
        self.reason = ""
        self.seconds = 0.0
        self._lock = threading.Lock()
        self._done = threading.Event()

    def start(self) -> None:
        """Begin in the background, once."""
        with self._lock:
            if self.state == "cold":
                self.state = "compiling"
                threading.Thread(target=self._work, name="labkit-compile", daemon=True).start()

    def ready(self, timeout_s: float | None = 0.0) -> bool:
        """Whether the compiled step can run now, after waiting at most ``timeout_s`` (None: until it can)."""
        self.start()
        if not self._done.is_set() and (timeout_s is None or timeout_s > 0):
            self._done.wait(timeout_s)
        return self.state == "ready"

    def describe(self) -> str:
        """The state, as a sentence."""
        return {
            "cold": "Fast path: compiled in the background at the first run.",
            "compiling": "Fast path: compiling in the background (seconds, once on this machine); "
            "plain PyTorch serves until it is done.",
            "ready": f"Fast path: ready (took {self.seconds:.1f} s).",
            "failed": f"Fast path: not available ({self.reason}); plain PyTorch serves.",
        }[self.state]

    def _work(self) -> None:
        began = time.perf_counter()
        try:
            from labkit.kernels.cpu.team import compile_all

            compile_all()
            self.seconds = time.perf_counter() - began
            self.state = "ready"
        except Exception as error:  # noqa: BLE001 - whatever the compiler says is shown, and the reference serves on
            self.reason = f"{type(error).__name__}: {error}".splitlines()[0]
            self.state = "failed"
        finally:
            self._done.set()


@lru_cache(maxsize=1)
def compilation() -> Compilation:
    """The process's one compilation."""
    return Compilation()


def why_not(transformer: Any) -> str | None:
    """Why the compiled step cannot run this model; None when it can."""
    if transformer.device.type != "cpu":
        return f"the model is on {transformer.device}: the compiled step is for the CPU."
    config = transformer.config
    for layer in config.layers:
        if hasattr(layer.ffn, "n_experts"):
            return "mixtures of experts are not compiled."
        if not hasattr(layer.attention, "n_kv_heads"):
            return f"{type(layer.attention).__name__} is not compiled: only grouped attention is."
        if layer.attention.d_head % 8 or layer.ffn.d_ff % 8 or config.d_model % 8:
            return "d_model, d_ff and d_head must be multiples of 8, the vector's lanes."
        if layer.attention.qk_norm and config.norm.bias:
            return "query and key norms with a bias are not compiled."
    for module in transformer.modules():
        if isinstance(module, nn.Linear) and module.weight.dtype not in (torch.float32, torch.bfloat16):
            return f"{module.weight.dtype} weights are not compiled: load with dtype='fp32' or 'bf16'."
    return None


def why_not_cache(cache: Any) -> str | None:
    """Why the compiled step cannot work on this cache; None when it can."""
    if cache.kind != "contiguous":
        return f"the {cache.kind} cache has no compiled step."
    if cache.dtype not in (torch.float32, torch.bfloat16):
        return f"a {cache.dtype} cache has no compiled step."
    return None


def weights_a_layer(transformer: Any) -> int:
    """In the linear layers of one block."""
    linears = [m for m in transformer.layers[0].modules() if hasattr(m, "in_features")]
    return sum(int(m.in_features) * int(m.out_features) for m in linears)


def _clamp(n_tokens: float) -> int:
    return int(min(max(n_tokens, MIN_CHUNK), MAX_CHUNK))


class FusedStep:
    """``step(token_ids, timer=..., should_stop=...)`` of one run: one token, or a prompt in chunks."""

    computed_by = "fused"

    def __init__(self, transformer: Any, cache: Any, n_threads: int) -> None:
        from labkit.kernels.cpu import choice, plan, step, team

        self.transformer, self.cache = transformer, cache
        self._prompt_by_torch = choice.torch_is_faster(transformer, n_threads)
        self._cells = step
        self._decode, self._prefill = team.compiled("decode"), team.compiled("prefill")
        self._plan = made = plan.plan(transformer)
        self._team = team.team(n_threads)
        self._turnout = made.turnout
        self._layers = made.layers.copy()
        self._slot = -1
        self._first_chunk = _clamp(LAYER_S * FIRST_RATE / max(1, weights_a_layer(transformer)))
        self._kept: list[Tensor] = []
        self._bound = False
        n_att = max(int(row[plan.N_HEADS] * (row[plan.D_HEAD] + 2)) for row in self._layers)
        _, _, cells = step.room(made.widest, n_att, self._team.n_threads)
        self._work = torch.zeros(cells + 16, dtype=torch.float32)
        self._phases = np.zeros(8, np.int64)
        self._sizes = np.zeros(step.N_SIZES, np.int64)
        s = self._sizes
        s[[step.N_LAYERS, step.D_MODEL]] = len(self._layers), made.d_model
        s[[step.LAYER_NORM, step.FINAL_W, step.FINAL_B]] = made.layer_norm, *made.final_norm
        s[[step.WIDEST, step.N_ATT, step.N_PARTS]] = made.widest, n_att, self._team.n_threads
        s.view(np.float32)[[2 * step.EPS_BITS, 2 * step.CAP_BITS]] = made.eps, made.logit_softcap
        self._job = np.zeros(12, np.int64)
        job = self._job
        job[step.LINEARS], job[step.LAYERS] = made.linears.ctypes.data, self._layers.ctypes.data
        job[step.FLOATS], job[step.SIZES] = made.floats.ctypes.data, s.ctypes.data
        job[step.PHASES] = self._phases.ctypes.data

    @property
    def reason(self) -> str:
        notes = [self._turnout.note(self._team.n_threads)]
        if self._prompt_by_torch:
            notes.append("prompts go through PyTorch's own products: faster on this processor")
        return "; ".join(note for note in notes if note)

    def __call__(self, token_ids: Tensor, *, timer: Any, should_stop: Callable[[], bool]) -> Tensor:
        if self._prompt_by_torch and len(token_ids) >= FEW:
            return self.transformer(token_ids, self.cache, last_only=True, timer=timer, should_stop=should_stop)
        at, size, n = 0, self._first_chunk, len(token_ids)
        while True:
            # One token left over would go through decode's step, which rounds differently: how a prompt is cut must
            # not show in its result.
            end = n if at + size >= n - 1 else at + size
            began = time.perf_counter()
            logits = self._run(token_ids[at:end], timer, should_stop, wanted=end == n)
            if end == n:
                return logits
            fitting = (end - at) * LAYER_S * len(self._layers) / (time.perf_counter() - began)
            at, size = end, _clamp(fitting)

    def _run(self, token_ids: Tensor, timer: Any, should_stop: Callable[[], bool], *, wanted: bool) -> Tensor:
        """The tokens through the model: logits after the last, (1, V) float32, when ``wanted``."""
        transformer, n_new = self.transformer, len(token_ids)
        with timer("embed"):
            opened = transformer.begin(self.cache, n_new, timer, should_stop)
            opened.check()
            scale = transformer.config.embedding_scale
            if scale == 1.0 and transformer.positions is None:
                x = lookup.rows(transformer.embedding, token_ids)
            else:
                x = transformer.embedding(token_ids)
                if scale != 1.0:
                    x = x * torch.tensor(scale, dtype=x.dtype).item()
                if transformer.positions is not None:
                    x = x + transformer.positions(opened.positions)
                x = x.float().contiguous()
        with timer("schedule"):
            self._bind_cache()
            self._bind_rotary(opened)
            n_vocab = self._plan.vocab_size
            logits = torch.empty(n_vocab + -n_vocab % 4, dtype=torch.float32)
            job, sizes, cell = self._job, self._sizes, self._cells
            job[[cell.X, cell.LOGITS]] = x.data_ptr(), logits.data_ptr()
            sizes[[cell.POSITION, cell.N_NEW, cell.WANTED]] = self.cache.segments[0].n_past, n_new, wanted
            job[cell.FUNCTION] = self._decode if n_new == 1 else self._prefill
            work = self._room(n_new)
            job[cell.WORK] = (work.data_ptr() + 63) // 64 * 64
            self._phases[:] = 0
            if n_new == 1:
                self._turnout.run(self._team, job, alone=True)
            else:
                with heed.heeding(should_stop, self._phases, cell.ASKED):
                    self._turnout.run(self._team, job, alone=False)
            tick = self._team.system.tick_s
            spent = zip(cell.PHASE_NAMES, self._phases.tolist(), strict=False)
            timer.charge({name: ticks * tick for name, ticks in spent if ticks})
            if self._phases[cell.STOPPED]:
                raise opened.cancelled()
            self.cache.commit()
        return logits[None, :n_vocab]

    def _room(self, n_new: int) -> Tensor:
        """Working memory for a step of this many tokens. A prompt's is the model's own: jobs take turns, and memory
        that was touched before costs nothing. Inputs that do not fill whole blocks count on zeros behind them."""
        from labkit.kernels.cpu import prefill

        n_threads, sizes, cell = self._team.n_threads, self._sizes, self._cells
        if n_new == 1:
            return self._work
        n_bytes = prefill.work_bytes(n_new, int(sizes[cell.WIDEST]), int(sizes[cell.N_ATT]), n_threads)
        n_cells, spare = n_bytes // 4 + 32, self._plan.spare
        if spare is None or spare.numel() < n_cells or not self._plan.fills_blocks:
            spare = self._plan.spare = torch.zeros(n_cells, dtype=torch.float32)
        return spare

    def _bind_cache(self) -> None:
        """Where this sequence's keys and values lie: looked up when its slot changes."""
        from labkit.kernels.cpu import plan

        slot = self.cache.slot_of(self.cache.segments[0].sequence_id)
        if slot == self._slot:
            return
        self._slot = slot
        number = plan.FP32 if self.cache.dtype == torch.float32 else plan.BF16
        for row, store in zip(self._layers, self.cache.store, strict=True):
            k, v = store["k"][slot], store["v"][slot]
            row[[plan.CACHE_FORMAT, plan.K_CACHE, plan.V_CACHE]] = number, k.data_ptr(), v.data_ptr()
            row[plan.HEAD_STRIDE] = k.stride(0) * k.itemsize

    def _bind_rotary(self, opened: Any) -> None:
        """Tables of cos and sin for every position the cache may hold, shared by layers that turn alike."""
        from labkit.kernels.cpu import plan

        if self._bound:
            return
        self._bound = True
        everywhere = dataclasses.replace(opened, positions=torch.arange(self.cache.capacity_tokens), _angles={})
        for row, layer in zip(self._layers, self.transformer.config.layers, strict=True):
            rope = layer.attention.rope
            if rope is not None:
                cos, sin = everywhere.angles(rope, layer.attention.d_head, torch.float32)
                self._kept += [cos, sin]
                row[[plan.COS, plan.SIN, plan.N_TURNED]] = cos.data_ptr(), sin.data_ptr(), cos.shape[1]
                row[plan.INTERLEAVED] = rope.layout == "interleaved"
