"""The verdict against known truths: 200 random servers on a clock of their own, each made to have one fault.

A setting's fault is what it was drawn for; the limits are the definitions in ``labkit.perf.verdict``: a wait beyond its
target by what makes it. Nothing is read back from the code under test.
"""

from __future__ import annotations

import random
from collections import Counter

from labkit.diagnose.measured import measure
from labkit.diagnose.probes import Workload, carry_out, plan
from labkit.diagnose.quirks import Quirks
from labkit.diagnose.simulated import SimulatedServer
from labkit.diagnose.verdict import Targets, judge
from labkit.perf.verdict import Finding

WORKLOAD, TARGETS = Workload(256, 128, 4), Targets(0.45, 0.04)
N_TRIALS = 200


def draw(fault: str, dice: random.Random) -> Quirks:
    """A server with this fault and nothing else beyond its target."""
    fine = {
        "prefill_tok_s": dice.uniform(4000, 40_000),
        "decode_s": dice.uniform(0.004, 0.025),
        "context_s": dice.uniform(0.0, 0.002),
        "sequence_s": dice.uniform(0.0, 0.0008),
        "fixed_s": dice.uniform(0.001, 0.08),
        "n_slots": dice.choice([16, 32, 64]),
        "jitter": dice.uniform(0.0, 0.08),
        "prefix_cache": dice.random() < 0.5,
        "says_timings": dice.random() < 0.5,
        "says_usage": dice.random() < 0.8,
        "dialect": dice.choice(["openai-chat", "openai-chat", "openai-completions", "tgi", "triton"]),
        "split": dice.random() < 0.3,
        "line_end": dice.choice(["\n", "\r\n"]),
        "tokens_per_event": dice.choice([1, 1, 1, 2, 4]),
        "ping_s": dice.choice([0.0, 0.05]),
        "seed": dice.randrange(10**6),
    }
    slow_prompt = dice.uniform(40, 300)  # 256 + 8 tokens take 0.9 to 6.6 s, and 0.45 are allowed
    changes = {
        "healthy": {},
        "prefill-bound": {"prefill_tok_s": slow_prompt, "prefix_cache": False},
        "cached": {"prefill_tok_s": slow_prompt, "prefix_cache": True},
        "decode-bound": {"decode_s": dice.uniform(0.06, 0.4)},
        "queue-bound": dice.choice(
            [{"n_slots": 1, "decode_s": dice.uniform(0.02, 0.03)}, {"queue_s": dice.uniform(1.5, 6)}]
        ),
        "cold": {"cold_s": dice.uniform(2, 60)},
        "client-bound": {"client_s": dice.uniform(0.05, 0.2), "tokens_per_event": 1},
        "buffered": {"buffer_bytes": dice.choice([4096, 8192, 65_536]), "tokens_per_event": 1},
    }
    return Quirks(**{**fine, **changes[fault]})


FAULTS = ["healthy", "prefill-bound", "cached", "decode-bound", "queue-bound", "cold", "client-bound", "buffered"]


def diagnose(quirks: Quirks, seed: int = 0) -> tuple[Finding, ...]:
    run = carry_out(SimulatedServer(quirks), plan(WORKLOAD, budget="normal", seed=seed))
    return judge(measure(run, WORKLOAD), TARGETS)


def test_95_of_100_random_servers_are_judged_right():
    dice = random.Random(20261201)
    wrong = []
    for trial in range(N_TRIALS):
        fault = FAULTS[trial % len(FAULTS)]
        quirks = draw(fault, dice)
        found = diagnose(quirks, trial)
        if found[0].cause != fault:
            wrong.append((fault, found[0].cause, quirks))
    shown = "\n".join(map(str, wrong))
    assert len(wrong) <= 0.05 * N_TRIALS, f"{Counter(w[:2] for w in wrong)}\n{shown}"
