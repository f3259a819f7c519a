"""A draft head in the compiled step: a guess has to cost a tenth of the target's step, and PyTorch alone takes a whole.

    x = W_h h + (W_e e)[token]         W cut in two; the second product is computed once, for all of the draft's ids
    g = norm(layer(x)), E g            the compiled step, on one byte a weight

A rounded guess is still a guess: the check makes up for it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from labkit import backends
from labkit.backends.lookup import Given
from labkit.backends.unpacked import apart
from labkit.decoding.draft_head import DraftHead, embeddings, of_one_size
from labkit.model.norm import LayerNorm
from labkit.quant import Int8
from labkit.quant.format import linears_of, replace, replace_head

FEW = 8
"""States that numpy multiplies on this thread; for more, PyTorch's threads are worth waking."""


class CompiledHead:
    """A head's weights for the compiled step, beside the target's own. Made once a drafter."""

    def __init__(self, head: DraftHead, target: Any) -> None:
        self._target = target.transformer
        self.trunk = apart(head.trunk)
        for name, linear in linears_of(self.trunk.layers):
            replace(self.trunk.layers, name, Int8().layer(name, linear))
        replace_head(self.trunk, Int8().top)
        of_hidden, of_token = head.fuse.weight.detach().split(target.config.d_model, dim=1)
        self._of_hidden, self._of_token = of_hidden.contiguous().numpy(), of_token.contiguous()
        self._tokens = (of_one_size(head.trunk.embedding.weight.detach()) @ self._of_token.T).to(torch.float16).numpy()
        self._at = np.full(target.config.vocab_size, -1, np.int64)
        self._at[head.token_ids.numpy()] = np.arange(len(head.token_ids))
        own = self._of_hidden.nbytes + self._of_token.nbytes + self._tokens.nbytes + self._at.nbytes
        self.nbytes = own + self.trunk.nbytes

    def inputs(self, states: np.ndarray, token_ids: list[int]) -> np.ndarray:
        """The target's or the head's states (T, M), normed, and the tokens after them: x (T, M) float32."""
        few = len(states) <= FEW
        x = np.einsum("tj,ij->ti", states, self._of_hidden) if few else states @ self._of_hidden.T
        at = self._at[token_ids]
        x += self._tokens[at]  # of a token that is not among them another's, put right below
        for t in np.flatnonzero(at < 0):
            row = of_one_size(embeddings(self._target, torch.tensor(token_ids[t : t + 1]))) @ self._of_token.T
            x[t] += row.numpy()[0] - self._tokens[-1]
        return x

    def normed(self, hidden: np.ndarray) -> np.ndarray:
        """The target's final norm, (T, M): PyTorch's takes forty times as long right after a step."""
        return normed(hidden, self._target.final_norm)


def normed(x: np.ndarray, norm: Any) -> np.ndarray:
    """What the module ``norm`` makes of x (T, M) float32."""
    is_layer = isinstance(norm, LayerNorm)
    if is_layer:
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + np.float32(norm.eps))
    x = x * _numbers(norm.weight) if is_layer or not norm.unit_offset else x * (1.0 + _numbers(norm.weight))
    return x + _numbers(norm.bias) if getattr(norm, "bias", None) is not None else x


def _numbers(parameter: nn.Parameter) -> np.ndarray:
    return parameter.detach().float().numpy()


class CompiledSteps:
    """One run's steps of the head."""

    def __init__(self, made: CompiledHead, step: backends.Step, given: Given) -> None:
        self._made, self._step, self._given = made, step, given
        self._states = np.empty((0, 0), np.float32)

    def start(self, hidden: Tensor) -> None:
        """Go on from the target's hidden states (T, M), before its final norm."""
        self._states = self._made.normed(hidden.numpy())

    def __call__(self, token_ids: list[int], *, timer: Any, should_stop: Any) -> Tensor:
        """Logits (N,) of the draft's ids after ``token_ids`` (T,), the tokens after each of the states."""
        self._given.x = self._made.inputs(self._states, token_ids)
        ids = torch.zeros(len(token_ids), dtype=torch.long)
        logits = self._step(ids, timer=timer, should_stop=should_stop)[0]
        assert self._step.hidden is not None
        self._states = normed(self._step.hidden[-1:].numpy(), self._made.trunk.final_norm)
        return logits


def bind(made: CompiledHead, cache: Any, backend: Any) -> CompiledSteps | None:
    """The head's steps on ``cache``, where the run's ``backend`` has them; None where PyTorch is to serve."""
    given = Given()
    step = backends.bind_given(backend, transformer=made.trunk, cache=cache, given=given)
    return None if step is None else CompiledSteps(made, step, given)
