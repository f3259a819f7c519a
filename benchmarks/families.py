"""Every model family in labkit's reference backend beside transformers, prefill and decode, in one interleaved run.

Both hold the same random weights. Each round times one, then the other; a ratio is the median over the rounds, so
what else the machine does hits both. Above 1.00: labkit is faster.

    python benchmarks/families.py [--sizes tiny smollm2] [--families llama gpt2 ...] [--rounds 7] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from labkit.checkpoint.translate import config_from_hf, tensors_from_hf
from labkit.kvcache.contiguous import ContiguousCache
from labkit.model import Transformer

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
    },
    "smollm2": {
        "vocab_size": 49_152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 2048,
    },
}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": True}


def _gpt2(size: dict[str, Any]) -> dict[str, Any]:
    return {
        "n_embd": size["hidden_size"],
        "n_layer": size["num_hidden_layers"],
        "n_head": size["num_attention_heads"],
        "n_positions": size["max_position_embeddings"],
        "vocab_size": size["vocab_size"],
    }


def _moe(size: dict[str, Any], **names: Any) -> dict[str, Any]:
    """Eight experts, two a token, each a quarter of the dense width: about the dense model's weights, twice over."""
    width = size["intermediate_size"] // 4
    return {key: {"n": 8, "k": 2, "width": width}[value] for key, value in names.items()}


QWEN_MOE = {"num_experts": "n", "num_experts_per_tok": "k", "moe_intermediate_size": "width"}
FAMILIES: dict[str, tuple[str, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "gpt2": ("gpt2", _gpt2),
    "llama2": ("llama", lambda s: {"num_key_value_heads": s["num_attention_heads"]}),
    "llama3": (
        "llama",
        lambda s: {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 512,
            }
        },
    ),
    "smollm2": ("llama", lambda s: {}),
    "smollm3": ("smollm3", lambda s: {}),
    "mistral": ("mistral", lambda s: {"sliding_window": 128}),
    "mixtral": (
        "mixtral",
        lambda s: _moe(s, num_local_experts="n", num_experts_per_tok="k", intermediate_size="width"),
    ),
    "qwen2": ("qwen2", lambda s: {}),
    "qwen2_moe": (
        "qwen2_moe",
        lambda s: {**_moe(s, **QWEN_MOE), "shared_expert_intermediate_size": s["intermediate_size"] // 4},
    ),
    "qwen3": ("qwen3", lambda s: {}),
    "qwen3_moe": ("qwen3_moe", lambda s: _moe(s, **QWEN_MOE)),
    "gemma2": ("gemma2", lambda s: {"sliding_window": 128}),
    "gemma3": ("gemma3_text", lambda s: {"sliding_window": 128}),
    "phi3": ("phi3", lambda s: {}),
    "olmo2": ("olmo2", lambda s: {}),
}


def build(family: str, size: str) -> tuple[Any, Transformer]:
    """transformers' model and labkit's, with the same float32 weights."""
    import transformers

    model_type, changes = FAMILIES[family]
    shape = SIZES[size]
    config_class = type(transformers.AutoConfig.for_model(model_type))
    settings = {**IDS, **shape, **changes(shape)}
    if model_type == "gpt2":
        settings = {**IDS, **changes(shape)}
    if model_type in ("phi3", "qwen2", "qwen2_moe", "olmo2"):
        settings.pop("head_dim")
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config_class(**settings)).eval().requires_grad_(False)
    config = config_from_hf(theirs.config.to_dict())
    with torch.device("meta"):
        ours = Transformer(config)
    ours.load_state_dict(
        {k: t.contiguous() for k, t in tensors_from_hf(config, theirs.state_dict())}, strict=True, assign=True
    )
    return theirs, ours.eval()


class Theirs:
    """transformers: a prompt, then token after token with its own cache."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def prefill(self, ids: torch.Tensor, n_new: int) -> torch.Tensor:
        out = self.model(ids[None], use_cache=True, logits_to_keep=1)
        self.past = out.past_key_values
        return out.logits[0, -1]

    def decode(self, token: torch.Tensor) -> torch.Tensor:
        return self.model(token[None], past_key_values=self.past, use_cache=True).logits[0, -1]


class Ours:
    """labkit's reference backend, a contiguous cache."""

    def __init__(self, model: Transformer) -> None:
        self.model = model

    def prefill(self, ids: torch.Tensor, n_new: int) -> torch.Tensor:
        self.cache = ContiguousCache(self.model.cache_entries, capacity_tokens=len(ids) + n_new)
        return self.model(ids, self.cache, rows="last")[0]

    def decode(self, token: torch.Tensor) -> torch.Tensor:
        return self.model(token, self.cache, rows="last")[0]


def timed(runner: Any, ids: torch.Tensor, n_new: int) -> tuple[float, float, list[int]]:
    """Seconds of the prefill, median seconds of a decode step, and the greedy tokens."""
    start = time.perf_counter()
    logits = runner.prefill(ids, n_new)
    prefill_s = time.perf_counter() - start
    tokens, steps = [int(logits.argmax())], []
    for _ in range(n_new - 1):
        start = time.perf_counter()
        logits = runner.decode(torch.tensor(tokens[-1:]))
        steps.append(time.perf_counter() - start)
        tokens.append(int(logits.argmax()))
    return prefill_s, median(steps), tokens


@torch.inference_mode()
def compare(family: str, size: str, *, rounds: int, n_prompt: int, n_new: int) -> dict[str, Any]:
    theirs, ours = build(family, size)
    runners = {"transformers": Theirs(theirs), "labkit": Ours(ours)}
    ids = torch.arange(n_prompt) % 400 + 3
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runners}
    said: dict[str, list[int]] = {}
    for round_idx in range(rounds + 1):  # the first warms up
        for name, runner in runners.items():
            prefill_s, decode_s, said[name] = timed(runner, ids, n_new)
            if round_idx:
                times[name].append((prefill_s, decode_s))
    row: dict[str, Any] = {"family": family, "size": size, "same_tokens": said["transformers"] == said["labkit"]}
    for stage, i in (("prefill", 0), ("decode", 1)):
        pairs = list(zip(times["transformers"], times["labkit"], strict=True))
        row[f"{stage}_ratio"] = median(a[i] / b[i] for a, b in pairs)
        row[f"{stage}_ms"] = {name: median(t[i] for t in found) * 1e3 for name, found in times.items()}
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--n-prompt", type=int, default=256)
    parser.add_argument("--n-new", type=int, default=16)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(min(2, torch.get_num_threads()))
    print("transformers' time / labkit's time, medians of interleaved rounds; above 1.00 labkit is faster")
    print(f"{'size':8} {'family':11} {'prefill':>8} {'decode':>8}   {'ms: transformers / labkit':30} same tokens")
    rows = []
    for size in args.sizes:
        for family in args.families:
            row = compare(family, size, rounds=args.rounds, n_prompt=args.n_prompt, n_new=args.n_new)
            rows.append(row)
            ms = " ".join(
                f"{row[f'{stage}_ms']['transformers']:.1f}/{row[f'{stage}_ms']['labkit']:.1f}"
                for stage in ("prefill", "decode")
            )
            print(
                f"{size:8} {family:11} {row['prefill_ratio']:8.2f} {row['decode_ratio']:8.2f}   {ms:30} "
                f"{'yes' if row['same_tokens'] else 'NO'}",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    return 0 if all(row["same_tokens"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
