"""labkit: every stage of LLM inference as real code on a real model, with a plot of where the time goes.

>>> import labkit
>>> model = labkit.load()                                      # doctest: +SKIP
>>> labkit.Pipeline(model).generate("Once upon a time").text   # doctest: +SKIP
"""

from labkit.checkpoint import load, models
from labkit.decoding import Sampling
from labkit.model import Model
from labkit.perf.trace import Trace
from labkit.pipeline import Completion, Pipeline, Run
from labkit.registry import ComponentInfo, components

__version__ = "0.1.0"

__all__ = [
    "Completion",
    "ComponentInfo",
    "Model",
    "Pipeline",
    "Run",
    "Sampling",
    "Trace",
    "components",
    "load",
    "models",
]
