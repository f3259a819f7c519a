"""The whole encoder in compiled code: split, look up, merge, in one pass over the UTF-8 bytes, on every core.

This is what ``encode_batch`` and long texts run on when numba is there. Nobody waits for the compiler: the first large
call starts it in the background and uses the Python path; once compiled (numba keeps the result on disk) later calls
are fast. Only a call so large that Python would take longer waits. ``Tokenizer.warm_up()`` waits on purpose.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from labkit.perf.workers import begin
from labkit.tokenizer import merge_table
from labkit.tokenizer.rules import class_table, rule_of
from labkit.tokenizer.words import ByteWords

if TYPE_CHECKING:
    from labkit.tokenizer.tokenizer import Tokenizer

WORTH_COMPILING_BYTES = 1 << 20  # a call with less never starts the compiler
WORTH_WAITING_BYTES = 1 << 24  # a call with more is done sooner by waiting for the compiler than in Python
WORTH_CALLING_BYTES = 1 << 13  # below this the Python path's latency is lower

_lock = threading.Lock()
_compiler: threading.Thread | None = None
_kernels: Any = None  # the compiled module, once it is ready
_failure: str | None = None


def why_not() -> str | None:
    """Why compiled encoding is not available here; None when it is, or may become so."""
    return _failure


def kernels(*, wait: bool = False, start: bool = False) -> Any:
    """The compiled kernels if they are ready; `start` compiles them in the background, `wait` waits for that."""
    global _compiler
    if _kernels is not None or _failure is not None:
        return _kernels
    with _lock:
        if _compiler is None and (start or wait):
            _compiler = begin(_compile, name="labkit-tokenizer-compiler")
    if wait and _compiler is not None:
        _compiler.join()
    return _kernels


def _compile() -> None:
    global _kernels, _failure
    try:
        from labkit.tokenizer import native_kernels

        native_kernels.compile_now()
    except Exception as error:  # noqa: BLE001 - whatever is wrong with this numba, the Python path still works
        _failure = f"numba could not compile the tokenizer: {type(error).__name__}: {error}"
    else:
        _kernels = native_kernels


class NativeEncoder:
    """One tokenizer's tables for the compiled kernels, with a word cache for each worker thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        import numpy as np

        words = tokenizer._words
        rule = rule_of(tokenizer.pretokenize)
        assert rule is not None
        assert isinstance(words, ByteWords)
        self.table = merge_table.build(words)
        self.classes = class_table(rule)
        self.rule = np.array([rule.any_prefix, rule.max_numbers, rule.numbers_end_text, rule.whole_tail], np.int64)
        self._known = self._whole_words(words) if words.ignore_merges else None
        self.n_workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._idle: list[Any] = []  # word caches that no thread is using

    @staticmethod
    def supports(tokenizer: Tokenizer) -> bool:
        words = tokenizer._words
        return isinstance(words, ByteWords) and words.unknown is None and rule_of(tokenizer.pretokenize) is not None

    def _whole_words(self, words: ByteWords) -> tuple[Any, Any, Any]:
        """The vocabulary as words that are known before any merge: the meaning of ``ignore_merges``."""
        import numpy as np

        from labkit.tokenizer.byte_level import from_symbols

        spelled = [from_symbols(token) for token in words.vocab]
        ends = np.cumsum([len(token) for token in spelled], dtype=np.int64)
        return np.frombuffer(b"".join(spelled), np.uint8), ends, np.array(list(words.vocab.values()), np.int32)

    def encode(self, kernels: Any, texts: Sequence[bytes]) -> list[tuple[Any, Any]]:
        """For runs of consecutive texts: (their ids, int32; the index in it behind each text, -1 if it must be redone).

        A text has to be redone when it holds a byte without a token: the Python path knows the policy for those.
        """
        import numpy as np

        data = np.frombuffer(b"".join(texts), np.uint8)
        ends = np.cumsum([len(text) for text in texts], dtype=np.int64)
        runs = kernels.balanced_runs(ends, self.n_workers)

        def work(run: tuple[int, int]) -> tuple[Any, Any]:
            first, last = run
            cache = self._idle.pop() if self._idle else kernels.new_cache(self._known)
            try:
                return kernels.encode_texts(data, ends, first, last, self.classes, self.rule, self.table, cache)
            finally:
                self._idle.append(cache)

        if len(runs) == 1:
            return [work(runs[0])]
        with ThreadPoolExecutor(len(runs)) as pool:
            return list(pool.map(work, runs))
