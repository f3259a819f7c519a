"""The compiled path on a CPU: numba and a little LLVM, no compiler on the user's machine.

Read in this order: ``step`` (one token through the model), ``blocks`` and ``products`` (its parts), ``dots`` and
``rowwise`` (their inner loops), ``simd`` (the vectors these are written in), ``prefill``, ``matmul`` and ``tiles``
(many tokens), ``team`` (the threads), ``plan`` (a model as tables of numbers), ``fused`` (the backend).
"""
