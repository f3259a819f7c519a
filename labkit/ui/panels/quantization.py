"""Lesson 09, weights in fewer bits: bytes, error and speed apart. Where the error goes: ``quantization_layers``."""

from __future__ import annotations

import copy
import math
from statistics import median
from typing import Any

import torch
from plotly.subplots import make_subplots

import labkit
from labkit import backends
from labkit.checkpoint import calibrate
from labkit.kvcache.contiguous import ContiguousCache
from labkit.model import Model
from labkit.perf.busy import BusyWatch
from labkit.perf.cost import decode_cost, prefill_cost
from labkit.perf.memory import weights_nbytes
from labkit.perf.timer import NULL_TIMER
from labkit.perf.weights import n_parameters
from labkit.quant import Packed, format_of
from labkit.quant.format import replace_linears
from labkit.ui import theme
from labkit.ui.controls import slider
from labkit.ui.experiment import Experiment, Result
from labkit.ui.findings import takes
from labkit.ui.panels.article_claims import LLAMA_7B
from labkit.ui.panels.quantization_exercise import GROUPS, QUIZ  # noqa: F401 - with the lesson's panels
from labkit.ui.words import say

STORED = "stored"
FORMS = ("int8", "int4", "int3")
N_SKIPPED = 32
"""The first tokens of the text have too little before them to be judged by."""
N_TURNS = 3


# --- bytes, error, speed


def repacked(model: Model, weights: str) -> Model:
    """The model in another format, beside the one that it shares its norms with."""
    shared = {id(t): t for t in [*model.transformer.parameters(), *model.transformer.buffers()]}
    transformer = copy.deepcopy(model.transformer, shared)
    form = format_of(weights)
    replace_linears(transformer, form.layer, form.top)
    return Model(transformer, model.tokenizer, name=model.name, weights=weights, backend=model.backend)


def as_packed(model: Model) -> Model:
    """The same file with its own blocks kept: nothing is rounded a second time."""
    return labkit.load(model.name, device=model.device, dtype=model.dtype, weights=STORED)


def held_out(lab: Any, n_tokens: int) -> list[int]:
    """The beginning of Python's manual, which no calibration here has seen."""
    return lab.tokenizer.encode(calibrate.evaluation_text()[: 8 * n_tokens])[:n_tokens]


@torch.inference_mode()
def perplexity(model: Model, ids: list[int]) -> float:
    """Of each next token, after the first ``N_SKIPPED``."""
    log_p = model(ids)[N_SKIPPED:-1].log_softmax(-1)
    return math.exp(-log_p.gather(1, torch.tensor(ids[N_SKIPPED + 1 :])[:, None]).mean().item())


class Decoder:
    """Single steps of one model on the backend that it would run on."""

    def __init__(self, model: Model, n_past: int) -> None:
        self.cache = ContiguousCache(
            model.transformer.cache_entries, capacity_tokens=n_past + 64, device=model.device, dtype=model.dtype
        )
        self.backend, self.step = backends.bind("auto", transformer=model.transformer, cache=self.cache)
        self._run(torch.arange(n_past) + 100)

    def _run(self, ids: torch.Tensor) -> None:
        with torch.inference_mode():
            self.step(ids, timer=NULL_TIMER, should_stop=lambda: False)

    def token_ms(self, clock: Any, n: int = 4) -> float:
        """The median of ``n`` steps."""
        took = []
        for _ in range(n):
            began = clock()
            self._run(torch.tensor([77]))
            took.append((clock() - began) * 1e3)
        self.cache.truncate(self.cache.n_tokens() - n)
        return median(took)


def weigh(lab: Any, job: Any, *, n_tokens: int) -> Result:
    """Each format's bytes (counted), perplexity (measured) and time a token (measured in turn)."""
    import time

    ids, rows = held_out(lab, n_tokens), []
    names = ("unpacked", STORED, *FORMS)
    plain = Decoder(lab.model, 32)
    times: dict[str, list[float]] = {name: [] for name in names}
    computed = {"unpacked": plain.step.computed_by}
    with BusyWatch() as watch:
        for at, name in enumerate(names):
            job.progress(
                at / len(names), f"{name}: packing, then reading {n_tokens} tokens, then single tokens in turn"
            )
            if name == "unpacked":
                model = lab.model
            else:
                model = as_packed(lab.model) if name == STORED else repacked(lab.model, name)
            rows.append({"weights": name, "MB": model.nbytes / 1e6, "perplexity": perplexity(model, ids)})
            if name == "unpacked":
                continue
            decoder = Decoder(model, 32)
            computed[name] = decoder.step.computed_by
            for _ in range(N_TURNS):
                for mine, who in (("unpacked", plain), (name, decoder)):
                    times[mine].append(who.token_ms(time.perf_counter))
                    job.check()
            del decoder, model  # one packed form at a time: all of them would not fit a small machine
    for row in rows:
        mine = times[row["weights"]]
        row |= {
            "ms a token": median(mine),
            "range, ms": f"{min(mine):.1f} to {max(mine):.1f}",
            "computed by": computed[row["weights"]],
        }
    data = {"rows": rows, "busy": watch.share > 0.3}

    def mark(figure: Any, guess: float) -> None:
        line = {"color": theme.VERMILION, "dash": "dash"}
        at = rows[0]["ms a token"] / guess
        figure.add_hline(y=at, line=line, annotation_text="your guess for int4", row=1, col=3)

    figure = _three(rows, {name: (min(mine), max(mine)) for name, mine in times.items()})
    caption = "Bytes counted; the rest measured on this machine"
    return Result(figure, rows, _weighed(data), caption, mark_guess=mark, data=data)


def _three(rows: list[dict[str, Any]], ranges: dict[str, tuple[float, float]]) -> Any:
    """Three plots; on the times the range of the turns."""
    figure = make_subplots(rows=1, cols=3, subplot_titles=("MB", "perplexity", "ms a token"), horizontal_spacing=0.09)
    for col, key in enumerate(("MB", "perplexity", "ms a token"), 1):
        values = [row[key] for row in rows]
        figure.add_bar(
            x=[row["weights"] for row in rows],
            y=values,
            text=[f"{value:.0f}" if value >= 100 else f"{value:.1f}" for value in values],
            textposition="outside",
            cliponaxis=False,
            marker={
                "color": (theme.BLUE, theme.ORANGE, theme.BLUE)[col - 1],
                "pattern": {"shape": ("", "/", "")[col - 1]},
            },
            row=1,
            col=col,
        )
        figure.update_yaxes(range=[0, 1.18 * max(values)], row=1, col=col)
    low, high = zip(*(ranges[row["weights"]] for row in rows), strict=True)
    middle = [row["ms a token"] for row in rows]
    error = {"symmetric": False, "array": [h - m for h, m in zip(high, middle, strict=True)]}
    error["arrayminus"] = [m - l for l, m in zip(low, middle, strict=True)]
    figure.data[-1].update(error_y=error)
    figure.update_yaxes(range=[0, 1.25 * max(high)], row=1, col=3)
    figure.update_annotations(yshift=10)
    theme.figure_layout(figure, x="", y="")
    figure.update_layout(showlegend=False, height=320)
    return figure


def _weighed(data: dict[str, Any]) -> str:
    rows = {row["weights"]: row for row in data["rows"]}
    plain, four = rows["unpacked"], rows["int4"]
    return say(
        "int4 takes {fewer:.1f} times fewer bytes than unpacked weights, its perplexity changes by {change:+.0%}, and "
        "a token takes {ratio}.",
        fewer=plain["MB"] / four["MB"],
        change=four["perplexity"] / plain["perplexity"] - 1,
        ratio=takes(plain["ms a token"] / four["ms a token"]),
    )


def speed_gain(data: dict[str, Any]) -> float:
    """How many times less time int4 took for a token than unpacked weights: what the guess is held against."""
    rows = {row["weights"]: row for row in data["rows"]}
    return rows["unpacked"]["ms a token"] / rows["int4"]["ms a token"]


def found(data: dict[str, Any]) -> list[str]:
    """What this run says of bytes and speed, of int8's halving and of int4's price, whichever way it went."""
    rows = {row["weights"]: row for row in data["rows"]}
    plain, stored, eight, four, three = (rows[name] for name in ("unpacked", STORED, *FORMS))
    fewer, faster = plain["MB"] / four["MB"], speed_gain(data)
    said = []
    if faster < 1.05:
        said.append(f"int4 has {fewer:.1f} times fewer bytes and is **no faster here**: bytes are not what binds.")
    elif faster < 0.85 * fewer:
        said.append(
            f"The bytes fell {fewer:.1f} times, the time {faster:.1f} times: something else takes a share that does "
            "not shrink (the cache, the arithmetic of unpacking, the steps between products)."
        )
    else:
        said.append(f"The bytes fell {fewer:.1f} times and the time {faster:.1f} times: here bytes are what binds.")
    said.append(
        say(
            "`stored`, the file's own blocks, is {mb:.0f} MB and changes perplexity by {change:+.2%}: nothing is "
            "rounded a second time. A token takes {ratio}, measured beside unpacked.",
            mb=stored["MB"],
            change=stored["perplexity"] / plain["perplexity"] - 1,
            ratio=takes(plain["ms a token"] / stored["ms a token"]),
        )
    )
    eight_faster = plain["ms a token"] / eight["ms a token"]
    width = plain["MB"] / eight["MB"]
    said.append(
        say(
            "“INT8 halves latency”: against these unpacked weights int8 has {width:.1f} times fewer bytes and takes "
            "{ratio}.",
            width=width,
            ratio=takes(eight_faster),
        )
    )
    cost = four["perplexity"] / plain["perplexity"] - 1
    if cost > 0.05:
        said.append(
            f"int4 in groups of 64 costs {cost:.0%} of perplexity here, although this model's file *is* 4-bit: its "
            "grid is another one (groups of 32 with a float minimum), and rounding to a second grid loses again."
        )
    else:
        said.append(f"int4 in groups of 64 changes perplexity by {cost:+.1%} on this text.")
    said.append(
        f"int3 is {'the smallest' if three['MB'] < four['MB'] else 'no smaller'} at {three['MB']:.0f} MB, costs "
        f"{three['perplexity'] / plain['perplexity'] - 1:+.0%}, and was computed by `{three['computed by']}`: "
        + (
            "without a product of its own, each step unpacks it first."
            if three["computed by"] == "reference"
            else "it has a product of its own."
        )
    )
    if data["busy"]:
        said.append("Other programs were busy meanwhile: take the times as rough.")
    return said


def weigh_panel(lab: Any, guess: Any = None) -> Experiment:
    def run(job: Any, **values: Any) -> Result:
        return weigh(lab, job, **values)

    fields = {"n_tokens": slider("Tokens of text", 128, 512, 160, step=32, width="230px")}
    return Experiment("What do fewer bits change: bytes, error, speed?", run, fields, guess=guess)


# --- tables


def sizes_of_7b() -> list[dict[str, Any]]:
    """The article's four figures for 7B, the exact ones, and a file that one can download."""
    n = n_parameters(LLAMA_7B)
    rows = [
        {"weights": name, "the article, GB": said, "parameters × bits, GB": n * bits / 8e9}
        for name, said, bits in (("fp32", 28, 32), ("fp16", 14, 16), ("int8", 7, 8), ("int4", 3.5, 4))
    ]
    formats = (("fp32", None), ("fp16", None), ("fp16", "int8"), ("fp16", Packed(4, 128)))
    for row, (dtype, weights) in zip(rows, formats, strict=True):
        row["with scales and a plain head, GB"] = weights_nbytes(LLAMA_7B, dtype=dtype, weights=weights) / 1e9
    return rows


def where_it_loses(lab: Any) -> list[dict[str, Any]]:
    """FLOPs a byte of a decode step and of a prompt, counted: fewer bits help where this is small."""
    config, rows = lab.model.config, []
    for name, weights in (("unpacked", None), ("int4", "int4")):
        setting: dict[str, Any] = {"dtype": "fp32", "weights": weights}
        one, many = decode_cost(config, 64, **setting).total, prefill_cost(config, 512, **setting).total
        rows.append(
            {
                "weights": name,
                "a token: MB": one.bytes / 1e6,
                "a token: FLOP/byte": one.intensity,
                "512 tokens: MB": many.bytes / 1e6,
                "512 tokens: FLOP/byte": many.intensity,
            }
        )
    return rows
