"""What a backend is, and what it gives: a step, the one call that computes tokens.

Prefill, decode, a chunk, a batch and the check of a draft are this call with other counts::

    name, step = backends.bind("auto", transformer=model.transformer, cache=cache)
    logits = step(ids, timer=timer, should_stop=stop)                       # (1, V), after the last of sequence 0
    logits = step(ids, counts={0: 5, 3: 1}, rows="all", timer=timer, should_stop=stop)      # (6, V), after each
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

Rows = Literal["last", "all"]
Counts = Mapping[int, int] | None


class Step(Protocol):
    """Computes tokens of one model on one cache."""

    @property
    def computed_by(self) -> str:
        """The backend that computed the last call (before the first: that will)."""
        ...

    @property
    def reason(self) -> str:
        """Why that is not the backend that was asked for, or what else there is to say of it; "" for nothing."""
        ...

    @property
    def hidden(self) -> Tensor | None:
        """Of the last call, the residual stream after the last block, before the final norm: float32, the rows of its
        logits. None unless the step was bound with ``keep_hidden``."""
        ...

    def __call__(
        self,
        token_ids: Tensor,
        *,
        counts: Counts = None,
        rows: Rows = "last",
        timer: Any,
        should_stop: Callable[[], bool],
    ) -> Tensor:
        """Logits, float32, of the next token after ``token_ids`` (T,): after each sequence's last, (n_sequences, V), or
        after all, (T, V).

        ``counts`` {sequence id: tokens} says which sequence each run of tokens extends; None: all of sequence 0.
        Raises IndexError for an id that is not in the vocabulary, ValueError when the cache or the context is full, and
        ``model.step.Cancelled`` soon after ``should_stop()`` has become true; the cache is then as it was."""
        ...

    def choose_next(
        self, token_id: int, *, more: bool, timer: Any, should_stop: Callable[[], bool]
    ) -> Callable[[], int] | None:
        """One token of sequence 0 through the model: the most likely next one, when called (-1 where the logits are no
        numbers). The step may be ahead of the host. None, and nothing is done, where this step gives logits only.

        ``more``: another will probably be asked for."""
        ...


class Backend(ABC):
    """One way to compute steps. What it lacks on this machine is its registry entry's ``why_not``."""

    name: ClassVar[str]
    no_forecast: ClassVar[str | None] = None
    """Why its speed is not forecast from stand-ins; None when it is."""

    def __init__(self, config: None = None) -> None:
        if config is not None:
            raise ValueError(f"backend {self.name!r} has no options; got {config!r}.")

    def why_not(self, transformer: Any, cache: Any) -> str | None:
        """Why this model on this cache is left to the reference; None when it is not."""
        return None

    def why_unpack(self, config: Any, *, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why a file's own blocks had better be unpacked for a model of this ``config``; None: they are computed from
        as they are (those that ``quant.block_groups`` knows)."""
        return f"the {self.name} backend has no product of them"

    def prepare(self, timeout_s: float | None = 0.0) -> bool:
        """Begin in the background what must be done before the first step, wait for it at most ``timeout_s`` (None: as
        long as it takes); whether it is done."""
        return True

    def warm_up(self, transformer: Any) -> None:  # noqa: B027 - most have nothing to find out
        """Find out about a model what its first run would otherwise be timed at."""

    def wake(self) -> None:  # noqa: B027 - most have no threads of their own
        """Wake the threads, as they are within a run: before a step that is timed alone."""

    def bind_given(self, transformer: Any, cache: Any, given: Any) -> Step | None:
        """The step of a model whose inputs are not its tokens' embeddings but what ``given`` (``lookup.Given``) holds,
        with its hidden states; None where such a model is left to plain PyTorch."""
        return None

    @abstractmethod
    def bind(self, transformer: Any, cache: Any, *, keep_hidden: bool = False) -> Step:
        """The step of a model on a cache for which ``why_not`` found nothing."""


def pick(rows: Rows, cache: Any, x: Tensor) -> Tensor:
    """Of x (T, M), the open step's rows that are asked for."""
    return x if rows == "all" else x[cache.last_rows()]


def as_hidden(x: Tensor) -> Tensor:
    """A copy of hidden states for ``Step.hidden``."""
    return x.detach().to(torch.float32, copy=True)
