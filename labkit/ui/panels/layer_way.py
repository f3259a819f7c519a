"""Lesson 03, a token's way through a layer: what each stop makes of it, what it reads, what it computes."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Any

from labkit.model.config import DenseFFN, GroupedAttention, ModelConfig, dtype_name
from labkit.perf import formats
from labkit.perf.attention_cost import attention_work
from labkit.perf.weights import layer_weights
from labkit.ui import html
from labkit.ui.controls import slider
from labkit.ui.experiment import Result
from labkit.ui.live import Live
from labkit.ui.words import counted, say


@dataclass(frozen=True)
class Stop:
    """One stop: its name, what it does, the values that leave it for each token, and its cost for all tokens.

    ``room``: the half of the layer it belongs to; "stream" for what passes both by."""

    name: str
    does: str
    room: str
    shape: str
    weight_bytes: float = 0.0
    cache_bytes: float = 0.0
    flops: float = 0.0

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.cache_bytes


def stops(config: ModelConfig, *, n_past: int, n_new: int, dtype: str, weights: Any = None) -> list[Stop]:
    """The stops of the first layer for ``n_new`` tokens after ``n_past``; their costs add up to the layer's.

    Raises ValueError for a layer that is not grouped attention and one FFN.
    """
    layer = config.layers[0]
    attention, ffn = layer.attention, layer.ffn
    if not isinstance(attention, GroupedAttention) or not isinstance(ffn, DenseFFN):
        raise ValueError(
            f"the picture shows grouped attention and one FFN; {config.family} has others: choose SmolLM2."
        )
    held = {w.name: w for w in layer_weights(config, layer)}

    def nbytes(*parts: str) -> float:
        mine = [w for name, w in held.items() if name.startswith(parts)]
        return float(sum(formats.weight_nbytes(w, dtype=dtype, weights=weights) for w in mine))

    def flops(*parts: str) -> float:
        mine = [w for name, w in held.items() if name.startswith(parts) and w.kind == "linear"]
        return 2.0 * n_new * sum(w.n_values for w in mine)

    work = attention_work(attention, n_new=n_new, n_past=n_past, dtype=dtype)
    d, h, g, width = config.d_model, attention.n_heads, attention.n_kv_heads, attention.d_head
    qkv, up = ("attention.q_proj", "attention.k_proj", "attention.v_proj"), ("ffn.gate", "ffn.up")
    norms = ("attention_norm", "ffn_norm")
    seen = n_past + n_new
    heads = f"{h} × {width}"
    return [
        Stop("norm", "The vector is brought to a common size.", "attention", f"{d:,}", nbytes(norms[0])),
        Stop(
            "query, key, value",
            "Three products make what the token asks, what it offers, and what it hands on.",
            "attention",
            f"{heads}, {g} × {width}, {g} × {width}",
            nbytes(*qkv),
            0.0,
            flops(*qkv),
        ),
        Stop("turn", "Query and key are turned by the token's position.", "attention", f"{heads}, {g} × {width}"),
        Stop(
            "keep",
            "Key and value go into the cache, for every token that comes later.",
            "attention",
            f"{g} × {width}, {g} × {width}",
            0.0,
            work.write_bytes,
        ),
        Stop(
            "compare",
            "Each query meets every key so far: one score each.",
            "attention",
            f"{h} × {seen:,}",
            0.0,
            work.read_bytes / 2,
            work.core_flops / 2,
        ),
        Stop(
            "mix",
            "The scores become shares, and the values are mixed by them.",
            "attention",
            heads,
            0.0,
            work.read_bytes / 2,
            work.core_flops / 2,
        ),
        Stop(
            "output",
            "One more product brings the heads' findings back to the stream's width.",
            "attention",
            f"{d:,}",
            nbytes("attention.o_proj"),
            0.0,
            flops("attention.o_proj"),
        ),
        Stop("add", "What attention gathered is added to the stream, which went past it.", "stream", f"{d:,}"),
        Stop("norm", "The vector is brought to a common size.", "ffn", f"{d:,}", nbytes(norms[1])),
        Stop(
            "gate and up" if ffn.gated else "up",
            "The token is spread out wide; it sees no other token here.",
            "ffn",
            f"{ffn.d_ff:,}, {ffn.d_ff:,}" if ffn.gated else f"{ffn.d_ff:,}",
            nbytes(*up),
            0.0,
            flops(*up),
        ),
        Stop("bend", "A curve lets some values through and holds others back.", "ffn", f"{ffn.d_ff:,}"),
        Stop(
            "down",
            "The last product brings it back to the stream's width.",
            "ffn",
            f"{d:,}",
            nbytes("ffn.down"),
            0.0,
            flops("ffn.down"),
        ),
        Stop("add", "What the FFN made of it is added to the stream. The next layer begins.", "stream", f"{d:,}"),
    ]


def draw(config: ModelConfig, dtype: str, weights: Any, *, stop: int, n_past: int, n_new: int) -> Result:
    """All stops from top to bottom, the chosen one marked, each with a bar as long as what it reads and writes."""
    found = stops(config, n_past=n_past, n_new=n_new, dtype=dtype, weights=weights)
    total_bytes, total_flops = sum(s.bytes for s in found), sum(s.flops for s in found)
    items = [_item(each, n, n == stop, total_bytes) for n, each in enumerate(found, 1)]
    rooms = "".join(f'<span><i class="is-{kind}"></i>{say(words)}</span>' for kind, words in _LEGEND.items())
    extra = f'<ol class="lk-way">{"".join(items)}</ol><div class="lk-legend lk-way-legend">{rooms}</div>'
    here = found[stop - 1]
    parts = [
        say("Stop {n} of {all}, **{name}**.", n=stop, all=len(found), name=say(here.name)),
        say(here.does),
        counted(
            n_new,
            "For this token it moves {moved} and computes {flops} FLOPs: {share:.0%} of the layer's bytes, {part:.0%} "
            "of its FLOPs.",
            "For these {n} tokens together it moves {moved} and computes {flops} FLOPs: {share:.0%} of the layer's "
            "bytes, {part:.0%} of its FLOPs.",
            moved=html.size(here.bytes),
            flops=html.number(round(here.flops)),
            share=here.bytes / total_bytes,
            part=here.flops / total_flops,
        ),
    ]
    rows = [
        {
            "stop": f"{n} {say(each.name)}",
            "values a token": each.shape,
            "weights, bytes": round(each.weight_bytes),
            "cache, bytes": round(each.cache_bytes),
            "FLOPs": round(each.flops),
        }
        for n, each in enumerate(found, 1)
    ]
    caption = "One layer, counted from the model's shapes"
    return Result(None, rows, " ".join(parts), caption, extra=extra, data=found)


_LEGEND = {"weights": "bytes of weights", "cache": "bytes of keys and values"}


def _item(stop: Stop, n: int, is_here: bool, total_bytes: float) -> str:
    weights, cache = (100 * part / total_bytes for part in (stop.weight_bytes, stop.cache_bytes))
    bars = f'<i class="is-weights" style="width:{weights:.2f}%"></i><i class="is-cache" style="width:{cache:.2f}%"></i>'
    moved = html.size(stop.bytes) if stop.bytes else "–"
    current = ' aria-current="step"' if is_here else ""
    return (
        f'<li class="is-{stop.room}"{current}><b>{n} · {escape(say(stop.name))}</b><span class="lk-num">'
        f'{escape(stop.shape)}</span><span class="lk-way-bar" aria-hidden="true">{bars}</span>'
        f'<span class="lk-num">{moved}</span></li>'
    )


def panel(lab: Any) -> Live:
    """Walk the token through the layer; let the text before it grow; send more tokens along."""
    model = lab.model
    n_stops = len(stops(model.config, n_past=1, n_new=1, dtype=dtype_name(model.dtype), weights=model.weights))

    def show(**values: int) -> Result:
        return draw(model.config, dtype_name(model.dtype), model.weights, **values)

    fields = {
        "stop": slider("Stop", 1, n_stops, 1, width="220px"),
        "n_past": slider("Tokens before it", 0, 8000, 100, step=100, width="220px"),
        "n_new": slider("Tokens together", 1, 64, 1, width="220px"),
    }
    return Live("A token's way through one layer: where are the bytes, where the arithmetic?", show, fields)
