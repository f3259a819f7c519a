"""Choosing the next token, guessing several ahead, and knowing when to stop."""

from labkit.decoding.draft_model import DraftModel, EarlyExit, Rounded
from labkit.decoding.drafters import PromptLookup
from labkit.decoding.sampler import Sampler
from labkit.decoding.sampling import Sampling
from labkit.decoding.speculative import Speculation
from labkit.decoding.stopping import StopStrings
from labkit.decoding.trained_head import TrainedHead

__all__ = [
    "DraftModel",
    "EarlyExit",
    "PromptLookup",
    "Rounded",
    "Sampler",
    "Sampling",
    "Speculation",
    "StopStrings",
    "TrainedHead",
]
