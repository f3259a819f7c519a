"""Does the diagnosis agree with the server's own timings? Figures for real servers on this machine, and the mock.

    python benchmarks/diagnose.py                        the mock over HTTP, in the client's process and in one of its
                                                         own; labkit serve; llama.cpp (xllamacpp)
    python benchmarks/diagnose.py http://127.0.0.1:8000  any server that is running: vLLM, transformers serve, ...

For each: the client's median TTFT and time per token beside what the server says of itself, and their ratio.
Run it on a quiet machine: a server's threads, the client and everybody else share the cores.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median

import httpx

from labkit import diagnose
from labkit.checkpoint.fetch import cached_path
from labkit.diagnose.loopback import LoopbackServer
from labkit.diagnose.quirks import Quirks
from labkit.diagnose.report import Report
from labkit.perf.busy import BusyWatch

ROOT = Path(__file__).resolve().parent.parent
WORKLOAD = diagnose.Workload(n_prompt_tokens=128, n_new_tokens=64, concurrency=2)


MOCK = Quirks(prefill_tok_s=1500, decode_s=0.01, fixed_s=0.002, says_timings=True)
APART = """
import sys
from benchmarks.diagnose import MOCK, LoopbackServer
with LoopbackServer(MOCK) as server:
    print(server.url, flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def mock_apart() -> Iterator[str]:
    """The mock in a process of its own: its threads do not wait for the client's interpreter."""
    command = [sys.executable, "-c", APART]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as it:
        assert it.stdin is not None
        assert it.stdout is not None
        yield it.stdout.readline().strip()
        it.stdin.close()
        it.wait(30)


@contextlib.contextmanager
def llama_cpp(n_threads: int) -> Iterator[str]:
    worker = ROOT / "tests" / "diagnose" / "llama_cpp_worker.py"
    command = [sys.executable, str(worker), str(cached_path()), str(n_threads), "2", "4096"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as it:
        assert it.stdin is not None
        assert it.stdout is not None
        yield next(line.split()[1] for line in it.stdout if line.startswith("listening "))
        it.stdin.close()
        it.wait(30)


@contextlib.contextmanager
def labkit_serve() -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "labkit.cli", "serve", "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as it:
        try:
            while it.poll() is None:
                with contextlib.suppress(httpx.HTTPError):
                    httpx.get(url + "/v1/models").raise_for_status()
                    break
                time.sleep(0.5)
            yield url
        finally:
            it.terminate()


def rows(name: str, report: Report, busy: float) -> str:
    """One line a figure: ours, the server's, the ratio."""
    told = [s for s in report.streams if "prompt_ms" in s.timings and s.recording.meta["probe"] in ("length", "stream")]
    lines = [f"{name}: {report.verdict.title} [{report.verdict.confidence:.0%} sure]; other programs took {busy:.0%}"]
    if told:
        ours = median(s.ttft_s or 0.0 for s in told) * 1e3
        theirs = median(s.timings["prompt_ms"] + s.timings.get("queue_ms", 0.0) for s in told)
        lines.append(f"  first token   here {ours:8.1f} ms   server {theirs:8.1f} ms   ratio {ours / theirs:.3f}")
        pace = [s for s in told if s.tpot_s and s.timings.get("predicted_n", 0) > 1]
        ours = median(s.tpot_s or 0.0 for s in pace) * 1e3
        theirs = median(s.timings["predicted_ms"] / (s.timings["predicted_n"] - 1) for s in pace)
        lines.append(f"  a token       here {ours:8.2f} ms   server {theirs:8.2f} ms   ratio {ours / theirs:.3f}")
    seen = client_means(report)
    for what, told_s in report.server_means.items():
        line = f"  its metrics   {what:9} {told_s * 1e3:9,.2f} ms in the mean over all probes"
        lines.append(
            line + (f", here {seen[what] * 1e3:9,.2f} ms, ratio {seen[what] / told_s:.3f}" if what in seen else "")
        )
    return "\n".join(lines)


def client_means(report: Report) -> dict[str, float]:
    """The client's own means over all probes, by the names of a server's metrics: seconds."""
    answered = [s for s in report.streams if s.tokens and s.ttft_s is not None]
    paced = [(s.tpot_s, len(s.tokens) - 1) for s in answered if s.tpot_s]
    found = {}
    if answered:
        found["ttft_s"] = mean(s.ttft_s or 0.0 for s in answered)
    if paced:
        found["itl_s"] = sum(gap * n for gap, n in paced) / sum(n for _, n in paced)
    return found


def measure(name: str, url: str) -> None:
    with BusyWatch() as watch:
        report = diagnose.probe(url, workload=WORKLOAD, budget="small", announce=lambda words: print(words, flush=True))
    print(rows(name, report, watch.share), flush=True)


def main() -> None:
    if sys.argv[1:]:
        for url in sys.argv[1:]:
            measure(url, url)
        return
    with LoopbackServer(MOCK) as server:
        measure("mock in the client's process (truth: 1,500 tokens/s, 10 ms a token)", server.url)
    with mock_apart() as url:
        measure("mock in a process of its own", url)
    with labkit_serve() as url:
        measure("labkit serve, SmolLM2-135M", url)
    try:
        import xllamacpp  # noqa: F401
    except ImportError:
        print("llama.cpp: pip install xllamacpp")
        return
    with llama_cpp(1) as url:
        measure("llama.cpp, SmolLM2-135M Q4_1, one thread", url)


if __name__ == "__main__":
    main()
