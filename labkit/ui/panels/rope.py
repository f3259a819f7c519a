"""Lesson 02, embeddings and rotary positions: real queries and keys of the model, moved to other positions."""

from __future__ import annotations

import math
from typing import Any

import plotly.graph_objects as go
import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from labkit.kernels import ops
from labkit.model.config import CompressedAttention, GroupedAttention, LatentAttention, Rope, RopeScaling
from labkit.model.rope import inverse_frequencies, turn
from labkit.model.watch import look_inside
from labkit.ui import html, theme
from labkit.ui.controls import choice, slider
from labkit.ui.exercise import Exercise
from labkit.ui.experiment import Experiment, Result

SENTENCE = "The dog that chased the cat was tired, so it lay down in the shade."
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


# --- embeddings


def neighbours(model: Any, text: str, n: int = 6) -> list[dict[str, Any]]:
    """The rows of the embedding table that point in nearly the same direction as the token ``text`` does.

    Raises ValueError when ``text`` is more than one token.
    """
    ids = model.tokenizer.encode(text)
    if len(ids) != 1:
        raise ValueError(f"{text!r} is {len(ids)} tokens: choose a text that is one, such as ' cat'.")
    table = _table(model).float()
    cosines = torch.nn.functional.cosine_similarity(table[ids], table)
    best = cosines.topk(n + 1)
    return [
        {"token": repr(model.tokenizer.decode([i])), "id": i, "cosine": round(c, 3)}
        for i, c in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        if i != ids[0]
    ]


def _table(model: Any) -> torch.Tensor:
    """All rows of the embedding, unpacked where they are packed."""
    embedding = model.transformer.embedding
    return embedding(torch.arange(embedding.num_embeddings, device=model.device))


def embedding_size(model: Any) -> dict[str, Any]:
    """How much of the model its embedding table is, and how much of it one token reads."""
    config, table = model.config, _table(model)
    return {
        "rows (V)": config.vocab_size,
        "values a row (M)": config.d_model,
        "table": f"{table.numel() * model.dtype.itemsize / 1e6:.1f} MB",
        "share of the model": f"{table.numel() * model.dtype.itemsize / model.nbytes:.0%}",
        "read for one token": f"{config.d_model * model.dtype.itemsize:,} bytes",
        "also the head (tied)": "yes" if config.tied_embeddings else "no",
    }


# --- scores that move, and scores that do not


def turned_by(model: Any, layer: int) -> tuple[Rope, int]:
    """A layer's rotation, and the width of what it turns in a head.

    Raises ValueError for a model that turns nothing."""
    config = model.config.layers[layer].attention
    if config.rope is None:
        raise ValueError(f"{model.name} turns no query and no key (its positions are learned vectors): choose another.")
    return config.rope, config.d_head if isinstance(config, GroupedAttention) else config.d_rope


@torch.inference_mode()
def query_and_key(model: Any, *, layer: int, head: int) -> tuple[Tensor, Tensor, int, int]:
    """The query of the sentence's last token and the key of its second, (1, 1, D) each, not yet turned, and their
    positions. They are what layer ``layer`` makes of its own hidden states.

    Latent and compressed attention turn a part of each head alone, and keep one key for all heads: it is that part. Of
    several residual streams it takes their confluence, where the layer reads a mixture of its own."""
    inside = look_inside(model, SENTENCE, layers=[])
    block, (_, width) = model.transformer.layers[layer], turned_by(model, layer)
    x = inside.hidden[layer]
    normed = block.attention_norm(x) if block.norms != "post" else x
    module = block.attention
    find = {GroupedAttention: _grouped, LatentAttention: _latent, CompressedAttention: _compressed}[type(module.config)]
    q, k = find(module, normed[-1:], normed[1:2], head, width)
    return q.float().view(1, 1, -1), k.float().view(1, 1, -1), len(inside.token_ids) - 1, 1


def _grouped(module: Any, x_q: Tensor, x_k: Tensor, head: int, width: int) -> tuple[Tensor, Tensor]:
    config = module.config
    q, k = module.q_proj(x_q), module.k_proj(x_k)
    if config.qk_norm == "full":
        q, k = module.q_norm(q), module.k_norm(k)
    q, k = q.view(config.n_heads, width)[head], k.view(config.n_kv_heads, width)
    k = k[head // (config.n_heads // config.n_kv_heads)]
    return (module.q_norm(q), module.k_norm(k)) if config.qk_norm == "head" else (q, k)


def _latent(module: Any, x_q: Tensor, x_k: Tensor, head: int, width: int) -> tuple[Tensor, Tensor]:
    config = module.config
    q = module.q_proj(x_q) if config.d_query is None else module.q_b_proj(module.q_a_norm(module.q_a_proj(x_q)))
    return q.view(config.n_heads, config.d_head)[head, -width:], module.kv_a_proj(x_k)[0, -width:]


def _compressed(module: Any, x_q: Tensor, x_k: Tensor, head: int, width: int) -> tuple[Tensor, Tensor]:
    q = module.q_b_proj(module.q_a_norm(module.q_a_proj(x_q))).view(module.config.n_heads, -1)[head]
    return rms_norm(q, q.shape, eps=module.eps)[-width:], module.kv_norm(module.kv_proj(x_k))[0, -width:]


def rotated_score(rope: Rope, q: Tensor, k: Tensor, q_position: Tensor, k_position: Tensor) -> Tensor:
    """q . k / sqrt(D) with q at each of ``q_position`` (N,) and k at each of ``k_position`` (N,): (N,).

    The positions' dtype is the dtype of the angles: float32 as labkit does it, bfloat16 as it must not be done.
    """
    frequencies = inverse_frequencies(rope, q.shape[-1])

    def at(x: Tensor, positions: Tensor) -> Tensor:
        if positions.dtype == torch.float32:
            cos, sin = turn(frequencies, positions, torch.float32)
        else:
            turns = positions[:, None] * frequencies.to(positions.dtype)
            cos, sin = turns.float().cos(), turns.float().sin()
        return ops.rotate(x.expand(len(positions), -1, -1), cos, sin, layout=rope.layout)

    return (at(q, q_position) * at(k, k_position)).sum((-1, -2)) * q.shape[-1] ** -0.5


@torch.inference_mode()
def measure(lab: Any, job: Any, *, layer: int, head: int, furthest: int, precision: str) -> Result:
    """One score, while both tokens move together, and while only the query moves."""
    job.progress(-1, "reading the sentence")
    rope, _ = turned_by(lab.model, layer)
    q, k, at_q, at_k = query_and_key(lab.model, layer=layer, head=head)
    shifts = torch.linspace(0, furthest, 161).round().unique()
    dtype = PRECISIONS[precision]
    q_at, k_at = (at_q + shifts).to(dtype), (at_k + shifts).to(dtype)
    still = torch.full_like(k_at, at_k)
    both = rotated_score(rope, q, k, q_at, k_at)
    alone = rotated_score(rope, q, k, q_at, still)
    job.progress(1.0)

    drift = float((both - both[0]).abs().max())
    moved = float((alone - alone[0]).abs().max())
    figure = go.Figure(
        [
            go.Scatter(x=shifts, y=both, name="both tokens moved", mode="lines", **theme.series(0)),
            go.Scatter(x=shifts, y=alone, name="only the query moved", mode="lines", **theme.series(1)),
        ]
    )
    theme.figure_layout(figure, x="shift (tokens)", y="score  q·k / √D")
    rows = [
        {"shift": int(shifts[i]), "both moved": float(both[i]), "only the query": float(alone[i])}
        for i in range(0, len(shifts), max(1, len(shifts) // 10))
    ]
    summary = (
        f"Layer {layer}, head {head}, angles in {precision}: moving both tokens by up to {furthest} changes the score "
        f"by at most **{html.number(drift)}**; moving the query alone changes it by up to **{html.number(moved)}**."
    )
    return Result(figure, rows, summary, "The score at some of the shifts", data={"drift": drift, "moved": moved})


def outcome(data: dict[str, float]) -> tuple[str | None, str]:
    """Which guess the run bore out (None: none), and what was seen; a thousandth is the float's rounding."""
    drift, moved = data["drift"], data["moved"]
    said = f"Moved together, the score changed by {html.number(drift)}; with the query alone, by {html.number(moved)}."
    if drift < 1e-3 * max(1.0, moved) and drift < moved:
        return "It stays the same", f"{said} What is left is float32's rounding."
    return None, f"{said} It did not stay: look at the precision that the angles are computed in."


def rounding(fine: dict[str, float], coarse: dict[str, float]) -> str:
    """What the angles' precision did to a score that should not move."""
    more = coarse["drift"] / max(fine["drift"], 1e-12)
    if more < 2:
        return f"Here the coarse angles made no difference: {html.number(coarse['drift'])}. Try a larger shift."
    said = f"Moved together, the score now changes by {html.number(coarse['drift'])}"
    return f"{said}, **{more:,.0f} times** as much as with angles in float32."


def panel(lab: Any, guess: Any = None) -> Experiment:
    """Shift both tokens; shift one."""

    def run(job: Any, **values: Any) -> Result:
        return measure(lab, job, **values)

    config = lab.model.config
    fields = {
        "layer": slider("Layer", 0, config.n_layers - 1, min(12, config.n_layers - 1), width="190px"),
        "head": slider("Head", 0, config.n_heads - 1, min(3, config.n_heads - 1), width="190px"),
        "furthest": slider("Largest shift", 16, 8000, 256, step=16, width="200px"),
        "precision": choice("Angles computed in", list(PRECISIONS), "float32"),
    }
    return Experiment(
        "Move the two tokens of one attention score: when does it change?",
        run,
        fields,
        guess=guess,
        note=f"The query of the last token and the key of “dog”, in: “{SENTENCE}”",
    )


# --- turning slower, to read further


def wavelengths(rope: Rope, d_head: int, n: int = 5) -> list[dict[str, Any]]:
    """Some of the pairs, from the fastest to the slowest: tokens for a full turn."""
    frequencies = inverse_frequencies(rope, d_head)
    picked = sorted({round(i * (len(frequencies) - 1) / (n - 1)) for i in range(n)})
    return [
        {
            "pair": i,
            "radians a token": f"{float(frequencies[i]):.2g}",
            "tokens for a full turn": round(2 * math.pi / float(frequencies[i]), 1),
        }
        for i in picked
    ]


def stretched(rope: Rope, d_head: int, *, original_context: int = 8192, factor: float = 4.0) -> list[dict[str, Any]]:
    """How much slower each way of reading ``factor`` times further turns the fastest, a middle and the slowest pair."""
    trained = inverse_frequencies(rope, d_head)
    ways = {
        "linear": RopeScaling("linear", factor, original_context),
        "dynamic NTK": RopeScaling("dynamic", factor, original_context),
        "YaRN": RopeScaling("yarn", factor, original_context),
        "Llama 3": RopeScaling("llama3", factor, original_context),
    }
    middle = len(trained) // 2
    rows = []
    for name, scaling in ways.items():
        scaled = Rope(rope.theta, rope.layout, rope.rotary_dims, scaling)
        slower = trained / inverse_frequencies(scaled, d_head, int(original_context * factor))
        rows.append({"way": name} | {what: f"{float(slower[i]):.2f}x slower" for what, i in _PICKS(middle).items()})
    return rows


def _PICKS(middle: int) -> dict[str, int]:
    return {"fastest pair": 0, f"pair {middle}": middle, "slowest pair": -1}


def _turned(a: float, b: float, position: int, frequency: float) -> tuple[float, float]:
    """labkit's own rotation of one pair."""
    cos, sin = turn(torch.tensor([frequency]), torch.tensor([position]), torch.float32)
    first, second = ops.rotate(torch.tensor([[[a, b]]]), cos, sin)[0, 0].tolist()
    return first, second


def _close(found: Any, expected: Any) -> bool:
    return len(found) == 2 and all(abs(float(x) - y) < 1e-4 for x, y in zip(found, expected, strict=True))


ROTATE_A_PAIR = Exercise(
    "rotate a pair",
    cases=[(1.0, 0.0, 1, 1.0), (0.5, -2.0, 7, 0.1), (3.0, 4.0, 0, 1.0), (-1.5, 2.5, 1000, 0.01)],
    oracle=_turned,
    same=_close,
    hints=(
        "The angle is the position times the frequency. `math.cos` and `math.sin` take radians, which it is in.",
        "A point (a, b), turned by an angle, keeps its length. The new first value is a·cos − b·sin.",
        "`return a * math.cos(angle) - b * math.sin(angle), b * math.cos(angle) + a * math.sin(angle)`",
    ),
)

QUIZ = (
    (
        "A sentence is moved from the start of a document to page 300. Its inner attention scores...",
        {
            "stay the same": "Yes: every pair of its tokens keeps its distance, and only distance counts.",
            "fade with the page number": "No. Each vector is turned further, but both of a pair alike; it cancels.",
        },
        "stay the same",
    ),
    (
        "How many weights does the rotary embedding add to a model?",
        {
            "One for each position": "That is GPT-2's way: a learned vector a position, and none beyond its context.",
            "None": "Right: the angles follow from the position and theta.",
            "One for each pair": "No. The frequencies are a formula, not learned.",
        },
        "None",
    ),
    (
        "Why is the embedding nearly free in decode, although its table is a fifth of the model?",
        {
            "One row is read": "Yes: a step reads M values of V times M. The head, with the same table, reads all.",
            "It stays in the cache": "The table is far larger than a processor's cache; only one row is needed.",
        },
        "One row is read",
    ),
)
