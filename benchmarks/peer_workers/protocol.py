"""How ``peers.py`` talks to a peer: one JSON object a line, each way. Runs in the peer's own environment.

A worker calls ``serve(load)``; ``load(options)`` returns ``generate(prompt_ids, n_new) -> {"ttft_s", "itl_s"}``, where
``itl_s`` is the mean time between tokens after the first.
"""

import json
import os
import sys
import time


def serve(load):
    """Answer requests until the input ends. Whatever the peer prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    options = json.loads(sys.stdin.readline())
    began = time.perf_counter()
    try:
        generate = load(options)
    except Exception as error:  # noqa: BLE001 - reported to the caller
        answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
        return
    answers.write(json.dumps({"load_s": time.perf_counter() - began}) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = generate(request["prompt_ids"], request["n_new"])
        except Exception as error:  # noqa: BLE001
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")


def mean_gap(times):
    """Mean seconds between consecutive stamps."""
    return (times[-1] - times[0]) / (len(times) - 1)
