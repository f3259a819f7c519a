"""labkit: every stage of LLM inference as real code on a real model, with a plot of where the time goes.

>>> import labkit
>>> model = labkit.load()                                      # doctest: +SKIP
>>> labkit.Pipeline(model).generate("Once upon a time").text   # doctest: +SKIP
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labkit.checkpoint.catalogue import models
    from labkit.checkpoint.load import load
    from labkit.decoding import Sampling
    from labkit.model import Model
    from labkit.perf.trace import Trace
    from labkit.pipeline import Completion, Pipeline, Run
    from labkit.registry import ComponentInfo, components
    from labkit.serving.remote import Remote

__version__ = "0.1.0"

__all__ = [
    "Completion",
    "ComponentInfo",
    "Model",
    "Pipeline",
    "Remote",
    "Run",
    "Sampling",
    "Trace",
    "components",
    "load",
    "models",
]

_ROOMS = {
    "labkit.checkpoint.catalogue": ("models",),
    "labkit.checkpoint.load": ("load",),
    "labkit.decoding": ("Sampling",),
    "labkit.quant": (),
    "labkit.model": ("Model",),
    "labkit.perf.trace": ("Trace",),
    "labkit.pipeline": ("Completion", "Pipeline", "Run"),
    "labkit.registry": ("ComponentInfo", "components"),
    "labkit.serving": (),
}
_ON_DEMAND = {"Remote": "labkit.serving.remote"}
"""What only those need who talk to a server: it brings an HTTP client, which takes longer to import than the rest."""


def __getattr__(name: str) -> Any:
    """Bring in every room when the first name of the face is asked for, so that all components are registered.

    Not at ``import labkit``: the command line answers before torch is read, and ``labkit doctor`` where it is broken.
    """
    if name == "diagnose":
        return import_module("labkit.diagnose")
    if name not in __all__:
        raise AttributeError(f"module 'labkit' has no attribute {name!r}")
    if name in _ON_DEMAND:
        return getattr(import_module(_ON_DEMAND[name]), name)
    for room, names in _ROOMS.items():
        module = import_module(room)
        globals().update({each: getattr(module, each) for each in names})
    return globals()[name]


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
