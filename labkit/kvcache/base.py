"""The contract between attention and its memory.

Attention decides *what* is stored and who attends; the cache decides *how* it is stored. A layer declares its entries
(``LayerEntries``); a cache appends them and answers ``attend(q)``. Which sequence a token belongs to and what it may
see is the cache's business, so prefill, decode, chunked prefill, ragged batches and the check of a draft are one and
the same call with other token counts::

    positions = cache.begin({0: 7, 3: 1})     # 7 new tokens of sequence 0, one of sequence 3
    for each layer:
        cache.append(layer_idx, k=k, v=v)     # (T, G, D), T = 8
        out = cache.attend(layer_idx, q, scale=d_head**-0.5)
    cache.commit()                            # only now do the new tokens count

A step that is interrupted before ``commit`` leaves the cache as it was. Layers that keep other entries than one key and
one value a token use ``rows`` and ``attend_rows``.
Shapes: T new tokens of the step, S stored tokens of one sequence, H query heads, G KV heads, D head width.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from labkit.kernels import ops
from labkit.kernels.selected import Keys, attend
from labkit.kvcache.parts import CacheFull, LayerEntries, Segment, check_pairs
from labkit.kvcache.usage import Usage


class KVCache(ABC):
    """Keys and values of the tokens so far, for one or more sequences.

    ``capacity_tokens`` is the longest a sequence may grow. All is allocated here, so ``nbytes`` is a
    constant of the kind and its sizes unless the kind says otherwise.
    """

    kind: ClassVar[str]
    lossless: ClassVar[bool] = True
    keeps_history: ClassVar[bool] = True
    """False: the caller passes the whole sequence at each step."""
    pairs_only: ClassVar[bool] = True
    """Whether it stores nothing but one key and one value a token; False: any entries (``rows``)."""
    rollback_tokens: int = 1 << 30  # of a step, which ``truncate`` can take back without a trace
    rollback_note: str = ""  # what a draft that is taken back changes in this kind all the same
    in_place_tokens: ClassVar[int] = 0
    """New tokens of a sequence that may all be stored before any of them is attended to: what a compiled step does,
    where ``rows_at`` (rows beside each other) or ``spec`` (blocks) tells it. 0: this kind is not read in place."""

    def __init__(
        self,
        layers: Sequence[LayerEntries],
        *,
        capacity_tokens: int,
        n_sequences: int = 1,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if capacity_tokens < 1 or n_sequences < 1:
            raise ValueError(f"{capacity_tokens=} and {n_sequences=}: both must be at least 1.")
        self.layers = tuple(layers)
        self.capacity_tokens = capacity_tokens
        self.turned_for = 0
        """The length of text that a rotation goes by which depends on one (``model.rope.length_for``); 0: the room."""
        self.n_sequences = n_sequences
        self.device = torch.device(device)
        self.dtype = dtype
        self.segments: tuple[Segment, ...] = ()
        self._lengths: dict[int, int] = {}
        self._stepping: threading.Thread | None = None
        self._check_fit()

    # --- one step -------------------------------------------------------------------------------------

    def begin(self, counts: int | Mapping[int, int]) -> Tensor:
        """``open`` a step and return its ``positions``."""
        self.open(counts)
        return self.positions()

    def open(self, counts: int | Mapping[int, int]) -> None:
        """Open a step: ``counts`` new tokens for each sequence id (an int means sequence 0). Raises CacheFull, a
        ValueError, when they do not fit, and RuntimeError when another thread is in the middle of a step."""
        counts = {0: counts} if isinstance(counts, int) else counts
        self._claim()
        segments, row = [], 0
        n_known = len(self._lengths)
        for sequence_id, n_new in counts.items():
            n_past = self.n_tokens(sequence_id)
            if n_new < 1:
                raise ValueError(f"sequence {sequence_id}: a step needs at least one token, got {n_new}.")
            if n_past + n_new > self.capacity_tokens:
                raise CacheFull(
                    f"the {self.kind} cache holds {self.capacity_tokens} tokens a sequence; sequence {sequence_id} "
                    f"has {n_past} and {n_new} more do not fit. Build it with a larger capacity_tokens."
                )
            n_known += sequence_id not in self._lengths
            if n_known > self.n_sequences:
                raise CacheFull(
                    f"the {self.kind} cache holds {self.n_sequences} sequences, all in use: free() one first."
                )
            segments.append(Segment(sequence_id, row, n_new, n_past))
            row += n_new
        self.segments = tuple(segments)
        try:
            self._reserve()
        except CacheFull:
            self._abandon()
            raise
        self._stepping = threading.current_thread()

    def positions(self) -> Tensor:
        """The positions of the open step's tokens in their sequences, (T,) int64."""
        positions = [torch.arange(s.n_past, s.n_total, device=self.device) for s in self.segments]
        return positions[0] if len(positions) == 1 else torch.cat(positions)

    @abstractmethod
    def append(self, layer_idx: int, **entries: Tensor) -> None:
        """Store this step's rows of one layer, each (T, *shape); with a rate, those of the blocks that the step closes
        (``Segment.closed``), sequence after sequence."""

    def attend(self, layer_idx: int, q: Tensor, *, scale: float, softcap: float | None = None) -> Tensor:
        """softmax(scale q K^T) V over what each row may see: q (T, H, D) -> (T, H, Dv)."""
        layer = self.layers[layer_idx]
        outs = []
        for segment in self.segments:
            k, v, k_positions = self.dense(layer_idx, segment)
            outs.append(
                ops.attend(
                    q[segment.rows],
                    k,
                    v,
                    n_past=segment.n_past,
                    k_positions=k_positions,
                    scale=scale,
                    window=layer.window,
                    n_sinks=layer.n_sinks,
                    softcap=softcap,
                )
            )
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    @abstractmethod
    def dense(self, layer_idx: int, segment: Segment) -> tuple[Tensor, Tensor, Tensor | None]:
        """K and V of one sequence, this step's tokens included, (G, S, D) each, and the positions they hold
        (None: 0 ... S-1). A kind that stores another form may return copies; it then overrides ``attend``."""

    def rows(self, layer_idx: int, name: str, segment: Segment) -> tuple[Tensor, int]:
        """One entry's rows of a sequence, this step's included, (S, *shape), and the number of the first: more than 0
        where a window has let older ones go. Kinds that store any entries answer it."""
        raise NotImplementedError(f"the {self.kind} cache keeps pairs of a key and a value only")

    def attend_rows(
        self,
        layer_idx: int,
        q: Tensor,
        *,
        scale: float,
        chosen: Mapping[str, list[Tensor | None]] | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention over all the keys of a layer at once, whatever their rates: q (T, H, D) -> (T, H, d_value).

        ``chosen`` {entry: for each segment, (T, n) numbers of rows, -1 for none; None for all that are closed}: which
        rows each query sees. ``sinks`` (H,): a score a head that takes its share of the weights and gives nothing."""
        outs, entries = [], [entry for entry in self.layers[layer_idx].entries if entry.d_value is not None]
        for i, segment in enumerate(self.segments):
            keys = []
            for entry in entries:
                rows, first = self.rows(layer_idx, entry.name, segment)
                mine = chosen[entry.name][i] if chosen and entry.name in chosen else None
                keys.append(Keys(rows, entry.d_value or 0, first, entry.rate, entry.window, mine))
            outs.append(attend(q[segment.rows], keys, n_past=segment.n_past, scale=scale, sinks=sinks))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def commit(self) -> None:
        """Close the step: its tokens now belong to the history."""
        for segment in self.segments:
            self._lengths[segment.sequence_id] = segment.n_total
        self.segments = ()
        self._stepping = None

    # --- between steps --------------------------------------------------------------------------------

    def n_tokens(self, sequence_id: int = 0) -> int:
        """Tokens of one sequence that are committed."""
        return self._lengths.get(sequence_id, 0)

    def truncate(self, n_tokens: int, sequence_id: int = 0) -> None:
        """Forget all but the first ``n_tokens`` of a sequence (a rejected draft). Raises ValueError when that would
        invent history or bring back what was evicted."""
        self._claim()
        have = self.n_tokens(sequence_id)
        if not 0 <= n_tokens <= have:
            raise ValueError(f"cannot truncate sequence {sequence_id} to {n_tokens} tokens: it has {have}.")
        self._lengths[sequence_id] = n_tokens

    def free(self, sequence_id: int = 0) -> None:
        """Drop a sequence, so that another may take its place."""
        self._lengths.pop(sequence_id, None)

    def reset(self) -> None:
        """Drop every sequence."""
        self._claim()
        for sequence_id in list(self._lengths):
            self.free(sequence_id)

    def fork(self, source: int, target: int) -> None:
        """Start sequence ``target`` with the history of ``source``: shared where the kind can share, else copied.

        Raises ValueError when ``target`` exists or ``source`` does not, CacheFull when there is no room."""
        raise ValueError(f"the {self.kind} cache cannot fork a sequence: use contiguous (a copy) or paged (shared).")

    def adopt(self, token_ids: Sequence[int], sequence_id: int = 0) -> int:
        """Start a sequence that will hold ``token_ids``; returns how many of its first tokens are stored already.

        Pass the rest to ``begin``. Kinds that do not share return 0; at least one token is always left to compute."""
        return 0

    def note(self, token_ids: Sequence[int], sequence_id: int = 0) -> None:  # noqa: B027
        """Say what the tokens after those of ``adopt`` will be, so that they can be found by content later."""

    def usage(self) -> Usage:
        """How many of the bytes hold tokens, and how many are set aside without holding any."""
        held = sum(list(self._lengths.values()))
        a_token = self.nbytes / (self.capacity_tokens * self.n_sequences)
        set_aside = len(self._lengths) * self.capacity_tokens
        return Usage(self.nbytes, held, round(set_aside * a_token), round(held * a_token))

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the tensors this cache holds, exactly."""

    @classmethod
    @abstractmethod
    def predict_nbytes(
        cls,
        layers: Sequence[LayerEntries],
        *,
        capacity_tokens: int,
        n_sequences: int = 1,
        dtype: torch.dtype = torch.float32,
        config: Any = None,
    ) -> int:
        """What ``nbytes`` will be, before anything is allocated."""

    def read_by_kernel(self) -> None:  # noqa: B027 - most kinds are read as tensors
        """From now on let a kernel attend to steps of few tokens, where the kind and the device have one."""

    def last_rows(self) -> list[int]:
        """The row of each sequence's last token in the open step."""
        return [segment.row + segment.n_new - 1 for segment in self.segments]

    # --- for compiled steps ---------------------------------------------------------------------------

    def sight(self, layer_idx: int) -> LayerEntries:
        """How far back a layer's tokens see in this cache."""
        return self.layers[layer_idx]

    def slot_of(self, sequence_id: int) -> int:
        """Which of the ``n_sequences`` places a sequence has."""
        raise NotImplementedError(f"the {self.kind} cache is not read in place")

    def rows_at(self, layer_idx: int) -> dict[str, int]:
        """Addresses of ``k`` and ``v``, (n_sequences, G, rows, D); ``slot_stride`` and ``head_stride`` in bytes; a
        position lies in its own row, or, where ``ring`` is not 0, at ``ring_sinks`` + (p - ring_sinks) mod ring."""
        raise NotImplementedError(f"the {self.kind} cache keeps no rows beside each other")

    # --- for the kinds --------------------------------------------------------------------------------

    def _reserve(self) -> None:  # noqa: B027 - not every kind needs to
        """Hook: find room for the open step's tokens. Raises CacheFull."""

    def _abandon(self) -> None:
        """Hook: undo what ``begin`` did for a step that was never committed."""
        for segment in self.segments:
            if segment.sequence_id not in self._lengths:
                self.free(segment.sequence_id)
        self.segments = ()
        self._stepping = None

    def _claim(self) -> None:
        """Make sure that nobody else is inside a step, and drop one of our own that was interrupted."""
        owner = self._stepping
        if owner is not None and owner is not threading.current_thread() and owner.is_alive():
            raise RuntimeError(
                f"this {self.kind} cache is in the middle of a step of another run ({owner.name}): give each run a "
                "cache of its own, or wait for that run to end."
            )
        if self.segments:
            self._abandon()

    def _check_fit(self) -> None:
        """Raise ValueError unless this kind can store what every layer keeps."""
        if self.pairs_only:
            check_pairs(self.layers, self.kind)
