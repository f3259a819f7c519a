"""The ``compiled`` backend: PyTorch's own compiler makes one kernel of what stands between a layer's products.

    enter(block, x)        norm, queries, keys and values, turned         x (1, M) -> q (1, H, D), k and v (1, G, D)
    leave(block, x, out)   output projection, norms, FFN, additions       x, out -> x

Between the two the cache stores and attends as it always does, so every kind works. Only single tokens are compiled: a
prompt's time lies in its products, and each other number of tokens would be compiled anew.

Compiling takes half a minute the first time (seconds when PyTorch finds its own files again) and needs a C++ compiler.
It happens in the background, once a model; the reference serves meanwhile.
"""

from __future__ import annotations

import copy
import shutil
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from labkit.backends.reference import ReferenceStep
from labkit.backends.step import Backend, Counts, Rows, Step, as_hidden
from labkit.model.config import GroupedAttention, MoEFFN
from labkit.model.embedding import check_token_ids
from labkit.perf.workers import begin
from labkit.registry import register

CPP_COMPILERS = ("g++", "clang++", "cl")


def why_not() -> str | None:
    """Why PyTorch's compiler cannot make kernels here; None when it can."""
    if any(shutil.which(name) for name in CPP_COMPILERS):
        return None
    return "it needs a C++ compiler (g++, clang++ or cl), which this machine lacks: install one, or use fused."


def reason_for(transformer: Any) -> str | None:
    """Why this model's steps are left to the reference; None when they are not."""
    if transformer.device.type != "cpu":
        return f"the model is on {transformer.device}, where cuda-graph does this without compiling for each model."
    if any(isinstance(layer.ffn, MoEFFN) for layer in transformer.config.layers):
        return "which experts a token takes is known only as it runs: mixtures are not compiled."
    if any(not isinstance(layer.attention, GroupedAttention) for layer in transformer.config.layers):
        return "only grouped attention is compiled."
    if transformer.config.streams is not None or any(layer.ffn.limit for layer in transformer.config.layers):
        return "residual streams and an FFN with a limit are not compiled."
    if not isinstance(transformer.layers[0].ffn.up_proj, nn.Linear):
        return "a product with packed weights is one operation to PyTorch's compiler, and no faster: fused computes it."
    return None


class _Angles:
    """What attention asks of a step."""

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self.pair = cos, sin

    def angles(self, rope: Any, d_head: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return self.pair


def enter(block: Any, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """From the hidden states to what is stored and what asks."""
    normed = x if block.norms == "post" else block.attention_norm(x)
    return block.attention.project(normed, _Angles(cos, sin))


def leave(block: Any, x: Tensor, attended: Tensor) -> Tensor:
    """From what the heads gathered to the next layer's hidden states; where the norms stand is ``model.block``'s."""
    added = block.attention.o_proj(attended.flatten(1))
    if block.norms == "pre":
        x = x + added
        return x + block.ffn(block.ffn_norm(x))
    if block.norms == "post":
        x = x + block.attention_norm(added)
        return x + block.ffn_norm(block.ffn(x))
    x = x + block.attention_post_norm(added)
    return x + block.ffn_post_norm(block.ffn(block.ffn_norm(x)))


class RowSums(nn.Module):
    """A linear layer whose product is written as what it is for one token, a sum for each row: the compiler makes one
    loop of it, with the weights' widening inside and the additions around it. The weights are the layer's own."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        sums = (self.weight.float() * x.float()).sum(-1)[None]  # (1, N)
        if self.bias is not None:
            sums = sums + self.bias
        return sums.to(x.dtype)


def as_row_sums(block: nn.Module) -> nn.Module:
    """The block with ``RowSums`` for its linears, on the same tensors."""
    held = {id(t): t for t in [*block.parameters(), *block.buffers()]}
    twin = copy.deepcopy(block, held)
    for parent in list(twin.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, RowSums(child))
    return twin


class Pieces:
    """One model's compiled pieces: ``state`` is compiling, ready or failed."""

    def __init__(self, transformer: Any, compiler: str) -> None:
        self.state, self.reason = "compiling", ""
        self._transformer = weakref.ref(transformer)
        self._compiler = compiler
        self._done = threading.Event()
        self.enter: Callable[..., Any] = enter
        self.leave: Callable[..., Any] = leave
        self.blocks: list[Any] = []
        self.weights = _weights(transformer)
        begin(self._work, name="labkit-compile")

    def ready(self, timeout_s: float | None = 0.0) -> bool:
        """Whether they can run, after waiting at most ``timeout_s`` (None: until they can)."""
        self._done.wait(timeout_s)
        return self.state == "ready"

    def _work(self) -> None:
        try:
            with torch.inference_mode():
                self._compile()
            self.state = "ready"
        except Exception as error:  # noqa: BLE001 - whatever the compiler says is shown, and the reference serves on
            self.reason, self.state = f"{type(error).__name__}: {error}".splitlines()[0], "failed"
        finally:
            self._done.set()

    def _compile(self) -> None:
        """Each piece once for each kind of layer; layers of one kind share the code."""
        transformer = self._transformer()
        if transformer is None:
            return
        self.blocks = [as_row_sums(block) for block in transformer.layers]
        # No "dynamic": a token more in the cache changes no size here.
        self.enter, self.leave = (
            torch.compile(piece, dynamic=False, fullgraph=True, backend=self._compiler) for piece in (enter, leave)
        )
        x = torch.zeros(1, transformer.config.d_model, dtype=transformer.dtype, device=transformer.device)
        for block, layer in zip(self.blocks, transformer.config.layers, strict=True):
            kind = layer.attention
            n = 0 if kind.rope is None else (kind.rope.rotary_dims or kind.d_head) // 2
            angles = (x.new_ones(1, n), x.new_zeros(1, n))
            q, _, _ = self.enter(block, x, *angles)
            self.leave(block, x, q)


def _weights(transformer: Any) -> list[int]:
    """Which tensors the layers hold."""
    return [id(parameter) for parameter in transformer.layers.parameters()]


_pieces: weakref.WeakKeyDictionary[Any, Pieces] = weakref.WeakKeyDictionary()


def pieces_of(transformer: Any, compiler: str = "inductor") -> Pieces:
    """The model's pieces; compiling begins with the first call, and again when its weights were replaced."""
    found = _pieces.get(transformer)
    if found is None or found.weights != _weights(transformer):
        found = _pieces[transformer] = Pieces(transformer, compiler)
    return found


class CompiledStep:
    """Single tokens through the compiled pieces, the others through the reference."""

    def __init__(self, transformer: Any, cache: Any, compiler: str = "inductor", *, keep_hidden: bool = False) -> None:
        self.transformer, self.cache = transformer, cache
        self._pieces = pieces_of(transformer, compiler)
        self._reference = ReferenceStep(transformer, cache, keep_hidden=keep_hidden)
        self._keep_hidden = keep_hidden
        self.hidden: Tensor | None = None
        self._n_waited = 0
        self.computed_by = "compiled" if self._pieces.ready() else "reference"

    @property
    def reason(self) -> str:
        if self._pieces.state == "failed":
            return f"compiling failed: {self._pieces.reason}"
        if self._pieces.state == "compiling":
            return "PyTorch is compiling the model's layers in the background (about half a minute)"
        waited = f"; the first {self._n_waited} steps were plain PyTorch, while it compiled" if self._n_waited else ""
        return f"prompts are plain PyTorch, single tokens are compiled; a layer's norms count as what follows{waited}"

    def __call__(
        self,
        token_ids: Tensor,
        *,
        counts: Counts = None,
        rows: Rows = "last",
        timer: Any,
        should_stop: Callable[[], bool],
    ) -> Tensor:
        ready = self._pieces.ready()
        self._n_waited += not ready
        if not ready or len(token_ids) != 1:
            logits = self._reference(token_ids, counts=counts, rows=rows, timer=timer, should_stop=should_stop)
            self.hidden = self._reference.hidden
            return logits
        self.computed_by = "compiled"
        check_token_ids(token_ids, self.transformer.config.vocab_size)
        return self._one(token_ids, counts, timer, should_stop)

    def choose_next(
        self, token_id: int, *, more: bool, timer: Any, should_stop: Callable[[], bool]
    ) -> Callable[[], int] | None:
        return None

    def _one(self, token_ids: Tensor, counts: Counts, timer: Any, should_stop: Callable[[], bool]) -> Tensor:
        """Logits (1, V) after one token."""
        pieces, transformer, cache = self._pieces, self.transformer, self.cache
        with timer("embed"):
            step = transformer.open(cache, 1 if counts is None else counts, timer, should_stop)
            x = transformer.embed(token_ids, step)
            nothing = x.new_ones(1, 0)
        for idx, block in enumerate(pieces.blocks):
            timer.layer = idx
            step.check()
            kind = block.attention.config
            with timer("attention"):
                cos, sin = (nothing, nothing) if kind.rope is None else step.angles(kind.rope, kind.d_head, x.dtype)
                q, k, v = pieces.enter(block, x, cos, sin)
                with timer("kv_cache"):
                    cache.append(idx, k=k, v=v)
                attended = cache.attend(idx, q, scale=block.attention.scale, softcap=kind.softcap)
            with timer("ffn"):
                x = pieces.leave(block, x, attended)
        timer.layer = -1
        cache.commit()
        if self._keep_hidden:
            self.hidden = as_hidden(x)
        return transformer.predict(x, timer).float()


@register(
    "backend",
    "compiled",
    summary="torch.compile on a layer's pieces: single tokens, plain weights, half a minute to compile",
    why_not=why_not,
)
class Compiled(Backend):
    name = "compiled"
    no_forecast = "each of the stand-ins that are timed would be compiled for half a minute: no forecast."

    def why_not(self, transformer: Any, cache: Any) -> str | None:
        return reason_for(transformer)

    def bind(self, transformer: Any, cache: Any, *, keep_hidden: bool = False) -> Step:
        cache.read_by_kernel()
        return CompiledStep(transformer, cache, keep_hidden=keep_hidden)
