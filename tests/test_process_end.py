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
AT_WORK = """
import sys, time, labkit
model = labkit.load("random:tiny-llama", backend="reference")
pipeline = labkit.Pipeline(model)
options = {"max_new_tokens": 100_000, "ignore_eos": True}
if sys.argv[1] == "panel":
    from labkit.ui.runner import Runner
    runner = Runner()
    runner.start(lambda job: pipeline.run("Hello", **options).result())
elif sys.argv[1] == "service":
    service = labkit.serving.Service(model)
    next(iter(service.run("Hello", max_new_tokens=400, ignore_eos=True)))
elif sys.argv[1] == "the tokenizer's compiler":
    from labkit.tokenizer import native
    native.kernels(start=True)
else:
    from labkit.backends import compiled
    pieces = compiled.pieces_of(model.transformer)
time.sleep(0.5)
print("left", flush=True)
"""
FORK = """
import multiprocessing, os, sys, labkit, torch
from labkit import backends

torch.set_num_threads(2)  # whose threads a forked process does not have
model = labkit.load("random:tiny-llama", backend=sys.argv[1])
assert backends.prepare(sys.argv[1])
pipeline = labkit.Pipeline(model)
torch.randn(1_000_000).exp()

def answer(_=None):
    torch.randn(1_000_000).exp()
    done = pipeline.generate("Hello there " * 30, max_new_tokens=4, ignore_eos=True)
    return done.trace.meta["computed_by"], done.token_ids

before = answer()
if sys.argv[2] == "fork":
    child = os.fork()
    if not child:
        os._exit(0 if answer() == before else 1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), answer() == before)
else:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        print(0, pool.map(answer, range(2)) == [before] * 2)
"""


def run(code, *arguments):
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("how", ["end", "interrupt"])
def test_leaving_during_a_run(how):
    done = run(LEAVE, how)
    assert done.returncode in ((0,) if how == "end" else (1, 130, -2)), done.stderr
    assert "terminate called" not in done.stderr
    assert "Fatal" not in done.stderr


@pytest.mark.parametrize("who", ["panel", "service", "the tokenizer's compiler", "PyTorch's compiler"])
def test_leaving_while_somebody_else_works(who):
    done = run(AT_WORK, who)
    assert (done.returncode, done.stdout.strip()) == (0, "left"), done.stderr
    assert "terminate called" not in done.stderr
    assert "Fatal" not in done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize(("backend", "how"), [("fused", "fork"), ("reference", "fork"), ("fused", "pool")])
def test_a_forked_process_computes_the_same(backend, how):
    done = run(FORK, backend, how)
    assert done.stdout.split() == ["0", "True"], done.stderr


def test_every_thread_is_asked_and_waited_for():
    stopped = [threading.Event() for _ in range(3)]
    threads = [workers.begin(event.wait, name="test", stop=event.set) for event in stopped]
    workers.end_all()
    assert not any(thread.is_alive() for thread in threads)
    assert not workers._stops


def test_who_asks_nobody_is_ended_at_its_next_line():
    def compile_on():
        while True:
            threading.Event().wait(0.001)

    thread = workers.begin(compile_on, name="test")
    workers.end_all()
    assert not thread.is_alive()
