"""From a name to a model that runs: fetch, read, translate, check, build."""

from labkit.checkpoint.load import load, models

__all__ = ["load", "models"]
