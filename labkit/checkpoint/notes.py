"""Notes: what a checkpoint says twice, and which of the two was taken."""

from __future__ import annotations

import warnings


class CheckpointWarning(UserWarning):
    """A model was loaded, and its files left a choice that its reader should know of."""


def note(sentence: str) -> None:
    """Tell the reader, once for a place and a sentence, as Python's warnings do."""
    warnings.warn(sentence, CheckpointWarning, stacklevel=3)
