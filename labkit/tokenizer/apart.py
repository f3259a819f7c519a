"""Programs that come inside a model's files run in a process of their own, which can be ended.

A chat template and a regular expression are a stranger's program: either may run for ever, or fill the memory, and
Python cannot stop the thread that runs it. So one small process, started when it is first needed and kept, does the
work; this side watches its processor time and its memory, and ends it where a bound is passed. Requests and answers are
lines of JSON. What the process may do at all is ``apart_worker``'s and Jinja's sandbox's business.
"""

from __future__ import annotations

import atexit
import json
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

LIMIT_S = 3.0
"""Processor time for one request; published templates and patterns take milliseconds."""
MAX_MEMORY_BYTES = 256 << 20
"""What the process may grow by while it works."""
MAX_ANSWER_CHARS = 64 << 20
_WAITING_FACTOR = 20
"""Wall time for each second of processor time allowed: on a busy machine a process waits for its turn."""
_START_S = 120.0
_LOOK_S = 0.05


class TooMuch(ValueError):
    """A program inside a model's file did not stay inside its bounds."""


class _Process:
    """The process, and a thread that reads its answers."""

    def __init__(self) -> None:
        start = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
        folders = [str(Path(__file__).resolve().parents[2]), *(os.path.abspath(part) for part in sys.path if part)]
        if not sys.executable:
            raise ValueError("this Python has no executable to start: a model's template or pattern cannot be run.")
        self.popen = subprocess.Popen(
            [
                *(sys.executable, "-I", "-c"),
                start + "from labkit.tokenizer.apart_worker import main; main()",
                json.dumps(list(dict.fromkeys(folders))),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt of the one who waits is not the process's
        )
        self.answers: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.is_ready = False
        threading.Thread(target=self._read, name="labkit-apart", daemon=True).start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        try:
            while line := self.popen.stdout.readline(MAX_ANSWER_CHARS):
                self.answers.put(line)
        except (OSError, ValueError):  # closed by end()
            pass
        self.answers.put(None)

    def end(self) -> None:
        self.popen.kill()
        self.popen.wait()
        for pipe in (self.popen.stdin, self.popen.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:  # what was still to be written
                    continue


_lock = threading.Lock()
_process: _Process | None = None


def begin() -> None:
    """Start the process and do not wait for it: the first request will find it ready."""
    with _lock:
        _alive()


def ask(request: dict[str, Any], *, what: str, limit_s: float | None = None) -> Any:
    """The process's answer to one request.

    Raises TooMuch (a ValueError) that names the bound which ``what`` passed, and ValueError with the program's own
    error.
    """
    limit_s = LIMIT_S if limit_s is None else limit_s
    line = json.dumps(request).encode() + b"\n"
    with _lock:
        process = _alive()
        try:
            if not process.is_ready:
                if process.answers.get(timeout=_START_S) is None:
                    raise OSError("it ended at once")
                process.is_ready = True
            assert process.popen.stdin is not None
            process.popen.stdin.write(line)
            process.popen.stdin.flush()
        except (OSError, queue.Empty) as error:
            end()
            raise ValueError(f"{what} needs a process of its own, which could not be started ({error}).") from error
        try:
            answer = _wait(process, what, limit_s)
        except BaseException:  # whatever ends the wait, an interrupt too: the process is in the middle of something
            end()
            raise
    if "error" in answer:
        raise ValueError(answer["error"])
    return answer["result"]


def _wait(process: _Process, what: str, limit_s: float) -> Any:
    watched = _Watched(process.popen.pid)
    deadline = time.monotonic() + _WAITING_FACTOR * limit_s
    while True:
        try:
            line = process.answers.get(timeout=_LOOK_S)
            break
        except queue.Empty:
            if watched.cpu_s() > limit_s or time.monotonic() > deadline:
                raise _too_long(what, limit_s) from None
            if watched.grown_bytes() > MAX_MEMORY_BYTES:
                raise _too_large(what) from None
    if line is None:
        process.popen.wait()
        if watched.last_cpu_s > limit_s:
            raise _too_long(what, limit_s)
        raise _too_large(what)
    if not line.endswith(b"\n"):
        raise TooMuch(f"{what} was stopped: it answered with more than {MAX_ANSWER_CHARS:,} characters.")
    return json.loads(line)


def _too_long(what: str, limit_s: float) -> TooMuch:
    return TooMuch(
        f"{what} was stopped after {limit_s:g} s of work; published ones take milliseconds. The file is damaged or "
        "hostile: take another."
    )


def _too_large(what: str) -> TooMuch:
    return TooMuch(
        f"{what} was stopped: it wanted more than {MAX_MEMORY_BYTES >> 20} MB of memory. The file is damaged or "
        "hostile: take another."
    )


class _Watched:
    """Processor time and memory of the process since the request began."""

    def __init__(self, pid: int) -> None:
        import psutil

        self._errors = psutil.Error
        self._process = psutil.Process(pid)
        self.last_cpu_s = 0.0
        self._cpu_s, self._bytes = self._now()

    def _now(self) -> tuple[float, int]:
        try:
            times, memory = self._process.cpu_times(), self._process.memory_info()
        except self._errors:  # it has just ended: the reader tells
            return self.last_cpu_s, 0
        return times.user + times.system, memory.rss

    def cpu_s(self) -> float:
        self.last_cpu_s = self._now()[0] - self._cpu_s
        return self.last_cpu_s

    def grown_bytes(self) -> int:
        return self._now()[1] - self._bytes


def _alive() -> _Process:
    global _process
    if _process is not None and _process.popen.poll() is not None:
        end()
    if _process is None:
        try:
            _process = _Process()
        except OSError as error:
            raise ValueError(
                f"this system starts no process ({error}), and a model's own template or pattern is not run without one"
            ) from error
    return _process


def end() -> None:
    global _process
    process, _process = _process, None
    if process is not None:
        process.end()


def _after_fork() -> None:
    """A forked child has a process of its own: the parent's is not its child, and answers the parent."""
    global _process, _lock
    _process, _lock = None, threading.Lock()


atexit.register(end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
