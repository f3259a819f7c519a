"""Lesson 03, attention as lines: from each token that looks to those it looks at, on the reader's own sentence."""

from __future__ import annotations

from html import escape
from typing import Any

from labkit.model.watch import Inside, look_inside
from labkit.ui.controls import slider, text
from labkit.ui.experiment import Result
from labkit.ui.live import Live
from labkit.ui.words import say, sentences

SENTENCE = "The keys to the old wooden cabinet are on the"
MAX_TOKENS = 24
"""More lines than these nobody can follow."""
ROW, TOP, LEFT, RIGHT, WIDTH = 22, 34, 104, 186, 290
FAINT = 0.02
"""A share below this is not drawn."""


class Seen:
    """The last sentence's attention maps, all layers: the model runs when the sentence changes, at no other time."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._text: str | None = None
        self._inside: Inside | None = None

    def __call__(self, sentence: str) -> Inside:
        """Raises ValueError for a sentence without a token."""
        if self._inside is None or sentence != self._text:
            ids = self._model.tokenizer.encode_prompt(sentence)[:MAX_TOKENS]
            self._inside, self._text = look_inside(self._model, ids), sentence
        return self._inside


def draw(seen: Seen, *, sentence: str, layer: int, head: int, looking: int) -> Result:
    """Two columns of the same tokens; a line is as strong as its share. ``looking`` 0 shows every token's lines."""
    inside = seen(sentence)
    if layer not in inside.attention:
        raise ValueError(
            f"layer {layer} of {inside.model.name} has latent or compressed attention, of which no map is kept: choose "
            "a model with keys and values of its own."
        )
    weights = inside.attention[layer][head].tolist()
    tokens = [_shown(token) for token in inside.tokens]
    chosen = min(looking, len(tokens))
    rows_looked = range(len(tokens)) if not chosen else [chosen - 1]
    best = [sorted(range(q + 1), key=lambda k, q=q: -weights[q][k])[:3] for q in rows_looked]
    rows = [
        {"token": f"{q + 1} {tokens[q]}"}
        | {
            say("looks most at, {n}", n=n + 1): f"{tokens[top[n]]} {weights[q][top[n]]:.0%}" if n < len(top) else "–"
            for n in range(3)
        }
        for q, top in zip(rows_looked, best, strict=True)
    ]
    first = sum(weights[q][0] for q in rows_looked) / len(rows_looked)
    where = say("Layer {layer}, head {head}.", layer=layer, head=head)
    if chosen:
        words = ", ".join(f"**{tokens[k]}** {weights[chosen - 1][k]:.0%}" for k in best[0])
        said = say("Token {n}, **{token}**, looks most at {words}.", n=chosen, token=tokens[chosen - 1], words=words)
    else:
        said = say("On average a token gives **{share:.0%}** of its attention to the very first one.", share=first)
    extra = _svg(tokens, weights, rows_looked, sentences(where, said).replace("**", ""))
    return Result(None, rows, sentences(where, said), "Who looks at whom", extra=extra, data=weights)


def _shown(token: str) -> str:
    """A token's text, its spaces visible, short; a piece of a character (Chinese, an emoji) says that it is one."""
    if "\N{REPLACEMENT CHARACTER}" in token:
        return say("(part of a character)")
    readable = token.replace(" ", "·").replace("\n", "⏎")
    return readable if len(readable) <= 12 else readable[:11] + "…"


def _svg(tokens: list[str], weights: list[list[float]], looking: Any, words: str) -> str:
    lines, names = [], []
    for q in looking:
        for k in range(q + 1):
            share = weights[q][k]
            if share >= FAINT:
                lines.append(
                    f'<line x1="{LEFT + 4}" y1="{TOP + q * ROW}" x2="{RIGHT - 4}" y2="{TOP + k * ROW}" '
                    f'stroke-width="{0.6 + 5 * share:.2f}" stroke-opacity="{0.25 + 0.75 * share:.2f}"/>'
                )
    for at, token in enumerate(tokens):
        y = TOP + at * ROW + 4
        faint = "" if at in looking else ' class="is-faint"'
        names.append(f'<text x="{LEFT}" y="{y}" text-anchor="end"{faint}>{escape(token)}</text>')
        names.append(f'<text x="{RIGHT}" y="{y}">{escape(token)}</text>')
    height = TOP + 14 + (len(tokens) - 1) * ROW
    for x, anchor, head in ((LEFT, "end", say("looks")), (RIGHT, "start", say("is looked at"))):
        names.append(f'<text x="{x}" y="{TOP - 20}" text-anchor="{anchor}" class="is-head">{head}</text>')
    return (
        f'<div class="lk-lines"><svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(words)}">'
        f"{''.join(lines)}{''.join(names)}</svg></div>"
    )


def panel(lab: Any) -> Live:
    """Type a sentence; walk through layers and heads."""
    config, seen = lab.model.config, Seen(lab.model)

    def show(**values: Any) -> Result:
        return draw(seen, **values)

    fields = {
        "sentence": text("Your sentence", SENTENCE, rows=1),
        "layer": slider("Layer", 0, config.n_layers - 1, config.n_layers // 2, width="200px"),
        "head": slider("Head", 0, config.n_heads - 1, 0, width="200px"),
        "looking": slider("Token that looks (0: all)", 0, MAX_TOKENS, 0, width="220px"),
    }
    note = "Up to 24 tokens. A line is as thick as the share of attention; the model runs when the sentence changes."
    return Live("Who looks at whom in your sentence?", show, fields, note=note)
