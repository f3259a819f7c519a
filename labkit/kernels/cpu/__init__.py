"""The compiled step on a CPU: machine code that numba writes.

Read in this order: ``step`` (any number of tokens through the model), ``matmul`` and what it calls (its products),
``attention`` and the two that compute it (``attention_few``, ``attention_run``), ``tiles`` and ``simd`` (their inner
loops), ``plan`` (what it knows of a model), ``team`` (who runs it).
"""
