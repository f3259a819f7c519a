"""From a name to a model that runs: fetch, read, translate, check, build.

``labkit.checkpoint.load`` is the front door (``labkit.load``). Nothing is imported here, so that fetching a model
needs no torch.
"""
