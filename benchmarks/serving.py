"""Serving: throughput by policy and by batch, who waits for a long prompt, waste, and a load that nothing is lost in.

    python benchmarks/serving.py [--only policies batch prompt waste load] [--rounds 3] [--seconds 20]
                                 [--weights int4 int8] [--clock wall] [--model NAME] [--peer URL URL] [--json FILE]

The default model, in this process, no network in between; A and B in turn, medians. ``--peer``: another server of the
same model (vLLM, llama.cpp) on the same machine, given the same batch over HTTP, in turn with labkit's over HTTP too.
``--clock processor`` reads the processor's time of this process in the place of the clock: with one thread that
computes (OMP_NUM_THREADS=1) it is what an idle machine's clock would say, nearly, when other programs take turns.
The full load of the issue is ``--only load --seconds 120 --concurrent 200``.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import psutil

import labkit
from labkit import backends
from labkit.diagnose.client import Client, Limits
from labkit.diagnose.dialects import Ask
from labkit.diagnose.endpoint import find_endpoint
from labkit.diagnose.stream import read_stream
from labkit.perf import timer
from labkit.perf.busy import BusyWatch
from labkit.perf.trace import quantile
from labkit.serving import ChunkedPrefill, Continuous, Service, Static
from labkit.serving.figures import figures_of, waste
from labkit.serving.paper import n_steps
from labkit.serving.request import Request

WORDS = "The committee met on Tuesday and wrote down what it had decided about the harbour. "


def mixed(n_requests: int, seed: int = 0) -> list[dict[str, Any]]:
    """Prompts of 12 to 160 tokens; answers mostly short, some long, as conversations are."""
    chance = random.Random(seed)
    return [
        {
            "prompt": f"{n}. " + WORDS * chance.randint(1, 9),
            "max_new_tokens": chance.choice((8, 12, 16, 24, 32, 160)),
            "ignore_eos": True,
        }
        for n in range(n_requests)
    ]


def serve(model: Any, scheduler: Any, asked: list[dict[str, Any]], **options: Any) -> tuple[list[Request], Service]:
    with Service(model, scheduler=scheduler, capacity_tokens=1024, start=False, **options) as service:
        requests = [service.submit(**one) for one in asked]
        service.start()
        for request in requests:
            request.sequence.ended.wait()
    return requests, service


def policies(model: Any, args: Any) -> dict[str, Any]:
    """Tokens a second on a mixed-length trace, all there at the start, at most 8 together."""
    asked = mixed(48)
    found: dict[str, list[float]] = {"static": [], "continuous": []}
    for _ in range(args.rounds):
        for name, scheduler in (("static", Static(max_requests=8)), ("continuous", Continuous(max_requests=8))):
            requests, _ = serve(model, scheduler, asked)
            found[name].append(figures_of(requests).tokens_per_s)
    medians = {name: median(values) for name, values in found.items()}
    answers = [one["max_new_tokens"] for one in asked]
    steps = {
        "static": n_steps(Static(max_requests=8), answers),
        "continuous": n_steps(Continuous(max_requests=8), answers),
    }
    ratio = medians["continuous"] / medians["static"]
    return {"tokens_per_s": medians, "continuous / static": ratio, "steps on paper": steps}


def batch(model: Any, args: Any) -> dict[str, Any]:
    """Decode tokens a second of all requests together, by how many there are, for each form of weights."""
    out = {"as loaded": batch_of(model, args)}
    for weights in args.weights:
        out[weights] = batch_of(labkit.load(args.model, weights=weights), args)
        print(weights, json.dumps(out[weights]), flush=True)
    return out


def batch_of(model: Any, args: Any) -> dict[str, Any]:
    rates: dict[int, list[float]] = {size: [] for size in args.sizes}
    for _ in range(args.rounds):
        for size in rates:
            asked = [
                {"prompt": f"{n} is", "max_new_tokens": args.batch_tokens, "ignore_eos": True} for n in range(size)
            ]
            _, service = serve(model, Continuous(max_requests=size), asked)
            steps = [m.end_s - m.start_s for m in service.moments if m.n_tokens == m.n_requests == size]
            rates[size].append(size / median(steps))
    medians = {str(size): median(values) for size, values in rates.items()}
    first, *_, last = medians
    return {"tokens_per_s": medians, f"{last} / {first}": medians[last] / medians[first]}


def prompt(model: Any, args: Any) -> dict[str, Any]:
    """Four write; then a prompt of 2,000 tokens comes: the writers' p99 ITL, beside that of an undisturbed run."""
    ids = model.tokenizer.encode(WORDS * 200)[:2000]
    writers = [{"prompt": f"{n} is", "max_new_tokens": args.writer_tokens, "ignore_eos": True} for n in range(4)]
    late_policies: dict[str, Any] = {
        "continuous": Continuous(max_requests=5),
        f"chunked-prefill, {args.budget} tokens": ChunkedPrefill(max_requests=5, token_budget=args.budget),
        "chunked-prefill, at most 2 times as slow": ChunkedPrefill(max_requests=5, max_slowdown=2.0),
    }
    found: dict[str, list[float]] = {name: [] for name in ("undisturbed", *late_policies)}
    ttft: dict[str, list[float]] = {name: [] for name in late_policies}
    for _ in range(args.rounds):
        for name in found:
            policy = late_policies.get(name, Continuous(max_requests=5))
            with Service(model, scheduler=policy, capacity_tokens=2048) as service:
                requests = [service.submit(**one) for one in writers]
                while requests[-1].sequence.n_new < 8:
                    requests[-1].sequence.ended.wait(0.002)
                if name != "undisturbed":
                    late = service.submit(ids, max_new_tokens=2, ignore_eos=True)
                    late.sequence.ended.wait()
                    ttft[name].append(late.sequence.token_s[0])
                for request in requests:
                    request.sequence.ended.wait()
            gaps = [b - a for request in requests for a, b in pairwise(request.sequence.token_s[4:])]
            found[name].append(quantile(gaps, 0.99))
    medians = {name: median(values) * 1e3 for name, values in found.items()}
    times = {f"{name} / undisturbed": medians[name] / medians["undisturbed"] for name in ttft}
    return {"p99_itl_ms": medians, **times, "newcomer_ttft_s": {name: median(v) for name, v in ttft.items()}}


def wasted(model: Any, args: Any) -> dict[str, Any]:
    """Token places set aside that held none, over the mixed trace."""
    out = {}
    for size in (8, 16):
        cache = labkit_paged(size)
        _, service = serve(model, Continuous(max_requests=8), mixed(16), kv_cache=cache)
        out[f"paged, blocks of {size}"] = waste(service.moments)
    _, service = serve(model, Continuous(max_requests=8), mixed(16), kv_cache="contiguous")
    return out | {"contiguous": waste(service.moments)}


def labkit_paged(size: int) -> Any:
    from labkit.kvcache import Paged

    return Paged(block_size=size)


def load(model: Any, args: Any) -> dict[str, Any]:
    """``concurrent`` requests under way for ``seconds``, one in ten cancelled: what was lost, and the memory."""
    chance, process = random.Random(1), psutil.Process()
    scheduler = ChunkedPrefill(max_requests=32, token_budget=256)
    with Service(model, scheduler=scheduler, capacity_tokens=512, max_waiting=10_000) as service:
        alive: list[Request] = []
        n_tokens: list[int] = []
        service.on_end.append(lambda request: n_tokens.append(request.sequence.n_new))
        n_sent, ended, memory = 0, {"length": 0, "stop": 0, "cancelled": 0, "failed": 0}, []
        until = time.perf_counter() + args.seconds
        while time.perf_counter() < until or alive:
            while len(alive) < args.concurrent and time.perf_counter() < until:
                n_new = chance.randint(2, 24)
                words = WORDS * chance.randint(1, 3)
                alive.append(service.submit(f"{n_sent}. {words}", max_new_tokens=n_new, ignore_eos=True))
                n_sent += 1
                if chance.random() < 0.1:
                    chance.choice(alive).sequence.stop_event.set()
            alive[0].sequence.ended.wait(0.05)
            for request in [r for r in alive if r.sequence.ended.is_set()]:
                alive.remove(request)
                ended["failed" if request.sequence.error else str(request.sequence.finish_reason)] += 1
            memory.append(process.memory_info().rss)
        used = service.engine.cache.allocator.n_used
    early = memory[len(memory) // 4]
    return {
        "sent": n_sent,
        "ended": ended,
        "lost": n_sent - sum(ended.values()),
        "blocks_still_used": used,
        "tokens_per_s": sum(n_tokens) / args.seconds,
        "rss_mb_after_a_quarter": early / 1e6,
        "rss_mb_at_the_end": memory[-1] / 1e6,
    }


def over_http(url: str, n_together: int) -> float:
    """Decode tokens a second of ``n_together`` streams, from the first token of all to the last."""
    with Client(find_endpoint(url), limits=Limits(max_s=600, idle_s=600)) as client:
        asks = [Ask(f"Write about the number {n}.", 40) for n in range(n_together)]
        streams = [read_stream(recording) for recording in client.record_all(asks)]
    begun = max(s.tokens[0].at_s + s.recording.meta["sent_s"] for s in streams)
    last = max(s.tokens[-1].at_s + s.recording.meta["sent_s"] for s in streams)
    counted = sum(t.made_s + s.recording.meta["sent_s"] > begun for s in streams for t in s.tokens)
    return counted / (last - begun)


WORK: dict[str, Callable[[Any, Any], dict[str, Any]]] = {
    "policies": policies,
    "batch": batch,
    "prompt": prompt,
    "waste": wasted,
    "load": load,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=WORK, default=list(WORK))
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--concurrent", type=int, default=200)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4, 8], help="batches to time, two at least")
    parser.add_argument("--batch-tokens", type=int, default=40)
    parser.add_argument("--weights", nargs="*", default=[], help="forms of weights to time batches with, too")
    parser.add_argument("--clock", choices=("wall", "processor"), default="wall")
    parser.add_argument("--budget", type=int, default=32, help="tokens a step of chunked prefill")
    parser.add_argument("--writer-tokens", type=int, default=120)
    parser.add_argument("--peer", nargs="+", default=[], help="addresses of servers to compare, labkit's among them")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    out: dict[str, Any] = {}
    if args.clock == "processor":
        timer.time = SimpleNamespace(perf_counter_ns=time.process_time_ns)  # pyright: ignore[reportAttributeAccessIssue]
    if args.peer:
        rates: dict[str, list[float]] = {url: [] for url in args.peer}
        for _ in range(args.rounds):
            for url in args.peer:
                rates[url].append(over_http(url, 8))
        out["peers, decode tokens/s at 8"] = {url: median(values) for url, values in rates.items()}
    else:
        backends.prepare()
        model = labkit.load(args.model)
        serve(model, Continuous(max_requests=2), [{"prompt": WORDS, "max_new_tokens": 4}] * 2)
        for name in args.only:
            with BusyWatch() as watch:
                out[name] = WORK[name](model, args)
            out[name]["other programs' share of the cores"] = watch.share
            print(name, json.dumps(out[name], indent=1), flush=True)
    if args.json:
        args.json.write_text(json.dumps(out, indent=1))
    elif args.peer:
        print(json.dumps(out, indent=1))


if __name__ == "__main__":
    main()
