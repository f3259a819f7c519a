"""The walk over a model with a calibration text: block by block, each seeing what the blocks before it, already packed,
make of the text.

For each block: run it once while every linear's input is summed up (X X^T and the mean of |x|: sizes of the matrix, not
of the text), let the format choose the integers, put the packed linears in, run it again for the next block's input.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pydoc_data import topics
from typing import Any

import torch
from torch import Tensor, nn

from labkit.kvcache.none import NoCache
from labkit.quant.calibrated import Calibrated, Site
from labkit.quant.format import linears_of, replace

WINDOW = 512
"""Tokens of a calibration sequence."""
CHUNK = 2048
"""Tokens that go through a block together: what bounds the memory of the walk."""
COLUMN_S = 4e-4
"""Seconds that GPTQ takes a column beside its products, roughly: a dozen small operations in Python."""
Progress = Callable[[float, str], Any]


def calibration_text() -> str:
    """The second half of Python's own manual, prose that every Python carries. Lessons and benchmarks measure
    perplexity on the first half: what a method was fitted to says nothing about it."""
    text = "\n".join(topics.topics.values())
    return text[len(text) // 2 :]


def evaluation_text() -> str:
    """The first half of it."""
    text = "\n".join(topics.topics.values())
    return text[: len(text) // 2]


def windows_of(tokenizer: Any, config: Calibrated, model: Any) -> list[list[int]]:
    """The calibration text as sequences of ``WINDOW`` tokens, or of the context of ``model`` (its config) where that
    is shorter. Raises ValueError when the text is too short."""
    width, vocab_size = min(WINDOW, model.context_tokens), model.vocab_size
    text = calibration_text() if config.text is None else config.text
    ids = tokenizer.encode(text[: config.n_tokens * 12])
    n = min(config.n_tokens, len(ids)) // width
    if n < 1:
        raise ValueError(
            f"the calibration text has {len(ids)} tokens: too short for a single sequence of {width}. Give a text of "
            f"some {config.n_tokens} tokens, like what the model will read, or none for the default."
        )
    if max(ids) >= vocab_size:
        raise ValueError(f"the tokenizer gave id {max(ids)}, beyond the model's vocabulary of {vocab_size}.")
    return [ids[i * width : (i + 1) * width] for i in range(n)]


@torch.no_grad()
def walk(
    transformer: Any,
    config: Calibrated,
    windows: Sequence[Sequence[int]],
    *,
    progress: Progress | None = None,
    watch: Callable[[int, Any, dict[str, nn.Linear], list[Site]], None] | None = None,
) -> None:
    """Pack every linear of the layers, in place. The model must be in float32 on the CPU.

    ``progress(share, words)`` is called before each block and may raise to cancel: the model is then half packed and
    must be dropped. ``watch(layer_idx, block, linears, sites)`` sees each block before it is packed. Raises ValueError
    when activations are not finite."""
    say = progress or (lambda share, words: None)
    n_layers, n_tokens = len(transformer.layers), sum(map(len, windows))
    a_layer = seconds_a_layer(transformer, n_tokens)
    say(
        0.0, f"{_name(config)} on {n_tokens:,} tokens: about {a_layer:.1f} s a layer, {a_layer * n_layers:.0f} s in all"
    )
    steps, xs = [], []
    for chunk in _chunks(windows):
        ids = torch.tensor([i for window in chunk for i in window])
        cache = NoCache(transformer.cache_entries, capacity_tokens=WINDOW, n_sequences=len(chunk))
        steps.append(transformer.open(cache, {n: len(window) for n, window in enumerate(chunk)}))
        xs.append(transformer.embed(ids, steps[-1]).float())
    began = time.perf_counter()
    for idx, block in enumerate(transformer.layers):
        if idx:
            a_layer = (time.perf_counter() - began) / idx
        left = a_layer * (n_layers - idx)
        say(idx / n_layers, f"layer {idx + 1} of {n_layers}: {a_layer:.1f} s each, {left:.0f} s left")
        linears = dict(linears_of(block))
        sites = _sites(block, idx, linears, steps, xs)
        if watch is not None:
            watch(idx, block, linears, sites)
        for name, linear in config.quantize(block, linears, sites).items():
            replace(block, name, linear)
        xs = [block(x, step, idx) for x, step in zip(xs, steps, strict=True)]
    say(1.0, "packing the head")


def seconds_a_layer(transformer: Any, n_tokens: int) -> float:
    """About how long a block will take: its products on this machine, timed with one that is like them."""
    linears = linears_of(transformer.layers[0])
    weights = sum(m.weight.numel() for _, m in linears)
    widths = [m.in_features for _, m in linears]
    rows = torch.randn(min(n_tokens, 512), transformer.config.d_model)
    matrix = torch.randn(transformer.config.d_model, 1024)
    took = min(_timed(lambda: rows @ matrix) for _ in range(3))
    rate = 2 * rows.numel() * 1024 / took
    flops = 2 * 2.0 * weights * n_tokens + 2.0 * n_tokens * sum(w * w for w in set(widths)) * 2
    return flops / rate + COLUMN_S * sum(widths) / 2


def _timed(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _chunks(windows: Sequence[Sequence[int]]) -> list[Sequence[Sequence[int]]]:
    n = max(1, CHUNK // max(map(len, windows)))
    return [windows[i : i + n] for i in range(0, len(windows), n)]


@dataclass
class _Sums:
    """Of one input."""

    names: list[str]
    hessian: Tensor
    total: Tensor


def _sites(block: Any, idx: int, linears: dict[str, nn.Linear], steps: list[Any], xs: list[Tensor]) -> list[Site]:
    """Run the block and sum up what goes into its linears. Linears that are given the very same tensor share a sum."""
    sums: dict[str, _Sums] = {}
    last: dict[str, Any] = {"x": None, "name": ""}

    def hook_for(name: str) -> Any:
        def hook(module: Any, args: tuple[Tensor, ...]) -> None:
            x = args[0]
            if x is last["x"]:
                if name not in sums[last["name"]].names:
                    sums[last["name"]].names.append(name)
                return
            last.update(x=x, name=name)
            flat = x.reshape(-1, x.shape[-1]).float()
            width = flat.shape[1]
            mine = sums.setdefault(name, _Sums([name], torch.zeros(width, width), torch.zeros(width)))
            mine.hessian.addmm_(flat.t(), flat)
            mine.total.add_(flat.abs().sum(0))

        return hook

    hooks = [linear.register_forward_pre_hook(hook_for(name)) for name, linear in linears.items()]
    try:
        for x, step in zip(xs, steps, strict=True):
            last.update(x=None)
            block(x, step, idx)
    finally:
        for hook in hooks:
            hook.remove()
    n_tokens = sum(map(len, xs))
    sites = [Site(tuple(s.names), s.hessian / n_tokens, s.total / n_tokens) for s in sums.values()]
    bad = [site.names[0] for site in sites if not torch.isfinite(site.hessian).all()]
    if bad:
        raise ValueError(
            f"layer {idx}: the input of {', '.join(bad)} is not finite on the calibration text (NaN or infinity). The "
            "model's weights are damaged, or too large for its dtype: load it with dtype='fp32'."
        )
    return sites


def _name(config: Calibrated) -> str:
    return f"{type(config).__name__} in {config.bits} bits"
