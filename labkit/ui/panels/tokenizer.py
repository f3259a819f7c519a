"""Lesson 01, the tokenizer: the merge slider, coloured tokens, and the exercise."""

from __future__ import annotations

from functools import cache
from html import escape

import ipywidgets as w
from IPython.display import HTML

from labkit.tokenizer import Tokenizer, bpe
from labkit.ui import controls, html, theme
from labkit.ui.errors import ErrorBox, guarded
from labkit.ui.exercise import Exercise

_SHADES = (theme.SKY, theme.ORANGE, theme.GREEN, theme.PURPLE)
_MARKS = {" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍"}
_MAX_CHIPS = 400


@cache
def default_tokenizer() -> Tokenizer:
    """SmolLM2's tokenizer alone, from its GGUF file's header: no weights are read."""
    from labkit.checkpoint.fetch import fetch_default
    from labkit.checkpoint.gguf import GGUFFile

    with GGUFFile(fetch_default()) as file:
        return Tokenizer.from_gguf(file.metadata)


@cache
def small_bpe(n_merges: int = 400) -> bpe.BPE:
    """A BPE trained here and now on the help texts that every Python carries (a second or two)."""
    from pydoc_data.topics import topics

    texts = [topics[name] for name in sorted(topics)][:40]
    return bpe.train(texts, bpe.N_BYTES + n_merges)


def chips(pieces: list[bytes], ids: list[int] | None = None) -> str:
    """Tokens as coloured chips with a border between them; bytes that are no text alone are shown in hex.

    Spaces are drawn as "·", line ends as "⏎". The chips are a list for a screen reader, and differ by more than colour.
    """
    items = []
    for n, piece in enumerate(pieces[:_MAX_CHIPS]):
        words = escape(readable(piece))
        label = f' title="id {ids[n]}"' if ids else ""
        color = _SHADES[n % len(_SHADES)]
        items.append(
            f'<li{label} style="display:inline-block;margin:2px 1px;padding:1px 4px;border-radius:4px;'
            f"border:1px solid {color};background:{color}33;font-family:monospace;white-space:pre-wrap;"
            f'overflow-wrap:anywhere">{words}</li>'
        )
    more = f"<li style='display:inline-block'>… and {len(pieces) - _MAX_CHIPS} more</li>" * (len(pieces) > _MAX_CHIPS)
    return f'<ol aria-label="tokens" style="list-style:none;padding:0;margin:4px 0">{"".join(items)}{more}</ol>'


def readable(piece: bytes) -> str:
    """A token's bytes as text, white space made visible; in hex when they are not whole characters.

    >>> readable(b" the"), readable(bytes([0xF0, 0x9F]))
    ('·the', 'F0 9F')
    """
    try:
        text = piece.decode()
    except UnicodeDecodeError:
        return " ".join(f"{byte:02X}" for byte in piece)
    return "".join(_MARKS.get(char, char) for char in text)


class MergeSlider:
    """One text, one slider: how many of the learned merges may be used. The tokens follow.

    ``model`` is a trained :class:`labkit.tokenizer.bpe.BPE`. ``n_tokens`` says how many tokens are shown.
    """

    def __init__(self, model: bpe.BPE, text: str) -> None:
        self.model = model
        self.n_tokens = 0
        self.error = ErrorBox()
        self.text = controls.text("Your text", text, rows=2)
        self.slider = controls.slider("Merges in use", 0, len(model.merges), 0, width="420px")
        show = guarded(self.error, self._show)
        self.slider.observe_value(show)
        self.text.observe_value(show)
        back = controls.button("One merge back", guarded(self.error, lambda: self._step(-1)))
        self.next_button = controls.button("Next merge", guarded(self.error, lambda: self._step(1)), primary=True)
        self.view = w.HTML()
        head = w.HTML(
            '<div class="lk-eyebrow">Step through</div>'
            '<div class="lk-title">From bytes to words, one merge at a time</div>'
        )
        self.widget = controls.stack(
            head, self.text, controls.row(self.slider, back, self.next_button, middle=True), self.error, self.view,
            panel=True,
        )  # fmt: skip
        self._show()

    def _step(self, by: int) -> None:
        self.slider.value = min(max(self.slider.value + by, 0), len(self.model.merges))

    def _show(self) -> None:
        text, n_merges = self.text.value, self.slider.value
        ids = self.model.encode(text, n_merges=n_merges)
        self.n_tokens = len(ids)
        self.error.clear()
        said = f"{len(text)} characters, {len(text.encode())} bytes, **{len(ids)} tokens**."
        if n_merges:
            last = self.model.merges[n_merges - 1]
            left, right, token = (f"`{readable(part)}`" for part in (last.left, last.right, last.token))
            said += f" Merge {n_merges}: {left} and {right} became {token}, seen {last.count:,} times in training."
        else:
            said += " No merge yet: every token is one byte."
        pieces = [self.model.tokens[i] for i in ids]
        self.view.value = f'<div role="status">{html.prose(said)}</div>{chips(pieces, ids)}'

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(self.widget)


class TokenView:
    """The learner's own text in a real model's tokens, coloured, with the counts that a bill is made of."""

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.error = ErrorBox()
        self.text = controls.text("Your text", text, rows=3)
        self.text.observe_value(guarded(self.error, self._show))
        self.view = w.HTML()
        head = w.HTML(
            '<div class="lk-eyebrow">Look</div><div class="lk-title">What the model sees of your text</div>'
            '<div class="lk-sub">Type, then click outside the box. Hold the pointer over a token for its id.</div>'
        )
        self.widget = controls.stack(head, self.text, self.error, self.view, panel=True)
        self._show()

    def _show(self) -> None:
        text = self.text.value
        self.ids = self.tokenizer.encode_prompt(text)
        self.error.clear()
        n_bytes = len(text.encode())
        ratio = f", {n_bytes / len(self.ids):.1f} bytes a token" if self.ids else ""
        said = f"{len(text)} characters, {n_bytes} bytes, **{len(self.ids)} tokens**{ratio}."
        self.view.value = f'<div role="status">{html.prose(said)}</div>' + chips(
            [self.tokenizer.token_bytes(i) for i in self.ids], self.ids
        )

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(self.widget)


def tokens_of(texts: dict[str, str]) -> HTML:
    """Some texts in the default model's tokens, one below the other, each with its count."""
    tokenizer = default_tokenizer()
    parts = []
    for name, text in texts.items():
        ids = tokenizer.encode_prompt(text)
        count = f"{len(text)} characters, {len(ids)} tokens"
        parts.append(
            f"<div style='margin-top:6px'><b>{escape(name)}</b> <span class='lk-muted'>{count}</span>"
            f"{chips([tokenizer.token_bytes(i) for i in ids], ids)}</div>"
        )
    return HTML(html.page(f'<div class="lk-card">{"".join(parts)}</div>'))


MERGE = Exercise(
    "merge",
    cases=[
        ([5, 6, 5, 6, 7], (5, 6), 300),
        ([9, 9, 9], (9, 9), 301),
        ([9, 9, 9, 9], (9, 9), 301),
        ([1, 2, 3], (3, 1), 302),
        ([4], (4, 4), 303),
        ([], (1, 2), 304),
    ],
    oracle=bpe.merge,
    hints=(
        "Walk through the ids with an index. At each place, look at this id **and** the next one.",
        "When they are the pair, append the new id and go on by **two**; else append the id and go on by one.",
        "`if tuple(ids[i : i + 2]) == pair:` is also right at the end of the list, where only one id is left.",
    ),
)

QUIZ = (
    (
        "Two merges fit a word. Which one is applied first?",
        {
            "The one that makes the longer token": "No. Length plays no part; greedy longest match gives other ids.",
            "The one that was learned earlier": "Yes: encoding replays the order of training.",
            "The one further left": "Only if both are the same merge. Otherwise the earlier learned one wins.",
        },
        "The one that was learned earlier",
    ),
    (
        "Why does Korean cost more tokens than it has characters?",
        {
            "Its sentences are longer": "No: it has fewer characters here than English.",
            "Few merges were learned for its bytes": "Yes. A syllable is three bytes, and rare pairs stay apart.",
        },
        "Few merges were learned for its bytes",
    ),
    (
        "A new vocabulary has twice as many tokens. What becomes cheaper?",
        {
            "Each step of decode": "No: the last layer now scores twice as many candidates.",
            "The number of steps for a text": "Yes: longer tokens, fewer of them. The table of embeddings pays for it.",
        },
        "The number of steps for a text",
    ),
)
