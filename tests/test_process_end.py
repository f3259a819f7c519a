"""A process ends cleanly whatever it was doing, and a forked one computes or says that it does not."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from labkit.perf import workers

LEAVE = """
import sys, labkit
model = labkit.load("random:tiny-llama", backend="reference")
run = labkit.Pipeline(model).run("Hello", max_new_tokens=100_000, ignore_eos=True)
next(iter(run))
if sys.argv[1] == "interrupt":
    raise KeyboardInterrupt
"""
FORK = """
import os, sys, labkit
from labkit import backends

model = labkit.load("random:tiny-llama", backend="fused")
assert backends.prepare("fused")
pipeline = labkit.Pipeline(model)

def answer():
    done = pipeline.generate("Hello there", max_new_tokens=4, ignore_eos=True)
    return done.trace.meta["computed_by"], done.token_ids

before = answer()
child = os.fork()
if not child:
    os._exit(0 if answer() == before else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), answer() == before)
"""


def run(code, *arguments):
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("how", ["end", "interrupt"])
def test_leaving_during_a_run(how):
    done = run(LEAVE, how)
    assert done.returncode in ((0,) if how == "end" else (1, 130, -2)), done.stderr
    assert "terminate called" not in done.stderr
    assert "Fatal" not in done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_computes_the_same():
    done = run(FORK)
    assert done.stdout.split() == ["0", "True"], done.stderr


def test_every_thread_is_asked_and_waited_for():
    stopped = [threading.Event() for _ in range(3)]
    threads = [workers.begin(event.wait, name="test", stop=event.set) for event in stopped]
    workers.end_all()
    assert not any(thread.is_alive() for thread in threads)
    assert not workers._stops
