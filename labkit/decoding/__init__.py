"""Choosing the next token, and knowing when to stop."""

from labkit.decoding.sampler import Sampler
from labkit.decoding.sampling import Sampling
from labkit.decoding.stopping import StopStrings

__all__ = ["Sampler", "Sampling", "StopStrings"]
