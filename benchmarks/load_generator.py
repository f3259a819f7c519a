"""What a public load generator, guidellm, finds at ``labkit serve``: requests answered, and the times that it saw.

    python -m venv /tmp/guidellm && /tmp/guidellm/bin/pip install guidellm        once: it brings a PyTorch of its own
    python benchmarks/load_generator.py --guidellm /tmp/guidellm/bin/guidellm [--url http://127.0.0.1:8000]
                                        [--requests 24] [--streams 1 4] [--max-tokens 64] [--json FILE]

Without ``--url`` a server with the default model is started on this machine and ended. The ready-made prompts, by chat
and by plain completions, streamed; then the same not streamed, at chance arrivals. Ends with 1 when a request failed.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.diagnose import labkit_serve
from labkit.perf.busy import BusyWatch
from labkit.prompts import ready_prompts

MAX_CHARS = 2000
"""Of a prompt: it and its answer fit a server's 2,048 tokens."""


def write_prompts(path: Path, n: int) -> None:
    """The ready-made prompts, in turn: guidellm asks each line once, and stops early where lines run out."""
    texts = [prompt.text for prompt in ready_prompts() if len(prompt.text) < MAX_CHARS]
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["prompt"], *([text] for text in itertools.islice(itertools.cycle(texts), n))])


def run(options: argparse.Namespace, folder: Path, url: str, backend: str, profile: str) -> dict[str, Any]:
    """One run of guidellm's: its own report. Raises CalledProcessError with what it printed when it ends badly."""
    command = [
        options.guidellm, "run", "--disable-progress",
        "--backend", f"kind=openai_http,target={url},max_tokens={options.max_tokens},{backend}",
        "--profile", profile,
        "--constraint", f"kind=max_requests,count={options.requests}",
        "--data", f"kind=csv_file,path={folder / 'prompts.csv'}",
        "--output", f"kind=json,path={folder / 'benchmarks.json'}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(done.stdout[-2000:], done.stderr[-2000:], sep="\n", file=sys.stderr)
        done.check_returncode()
    return json.loads((folder / "benchmarks.json").read_text(encoding="utf-8"))["benchmarks"][0]["metrics"]


def line(metrics: dict[str, Any]) -> str:
    """Counts, then guidellm's medians and 95th percentiles in milliseconds."""
    totals = metrics["request_totals"]
    words = [f"{totals['successful']} answered, {totals['errored']} failed, {totals['incomplete']} not ended"]
    for name, key in (("TTFT", "time_to_first_token_ms"), ("ITL", "inter_token_latency_ms")):
        found = metrics[key]["successful"]
        if found and found["median"]:  # none where an answer came in one piece
            words.append(f"{name} {found['median']:.0f} (p95 {found['percentiles']['p95']:.0f}) ms")
    rate = metrics["output_tokens_per_second"]["successful"]
    return ", ".join([*words, f"{rate['mean']:.1f} tokens/s"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--guidellm", default="guidellm", help="the program, if it is not on the path")
    parser.add_argument("--url", help="a server that is running")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4], help="requests under way together")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    chat, plain = "request_format=/v1/chat/completions", "request_format=/v1/completions"
    cases = [(form, f"kind=concurrent,streams={n}") for form in (chat, plain) for n in options.streams]
    cases.append((f"{chat},stream=false", "kind=poisson,rate=2"))
    found, failed = [], 0
    server = nullcontext(options.url) if options.url else labkit_serve()
    with tempfile.TemporaryDirectory() as folder, server as url:
        write_prompts(Path(folder) / "prompts.csv", 4 * options.requests)
        for backend, profile in cases:
            with BusyWatch() as watch:
                metrics = run(options, Path(folder), url, backend, profile)
            totals = metrics["request_totals"]
            failed += totals["errored"] + max(0, options.requests - totals["total"])
            found.append({"backend": backend, "profile": profile, "busy": watch.share, "metrics": metrics})
            print(f"{backend}, {profile}: {line(metrics)}; other programs took {watch.share:.0%}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
