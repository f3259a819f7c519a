"""Lesson 01: what the same sentences cost in nine languages, in one vocabulary or another."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import plotly.graph_objects as go

from labkit.tokenizer import Tokenizer, bpe
from labkit.ui import html, spread, theme
from labkit.ui.experiment import ExperimentJob, Result
from labkit.ui.panels.tokenizer import default_tokenizer, small_bpe

# Articles 1 (first sentence), 3 and 6 of the Universal Declaration of Human Rights, as the United Nations have them.
SENTENCES: dict[str, tuple[str, str, str]] = {
    "English": (
        "All human beings are born free and equal in dignity and rights.",
        "Everyone has the right to life, liberty and security of person.",
        "Everyone has the right to recognition everywhere as a person before the law.",
    ),
    "German": (
        "Alle Menschen sind frei und gleich an Würde und Rechten geboren.",
        "Jeder hat das Recht auf Leben, Freiheit und Sicherheit der Person.",
        "Jeder hat das Recht, überall als rechtsfähig anerkannt zu werden.",
    ),
    "Spanish": (
        "Todos los seres humanos nacen libres e iguales en dignidad y derechos.",
        "Todo individuo tiene derecho a la vida, a la libertad y a la seguridad de su persona.",
        "Todo ser humano tiene derecho, en todas partes, al reconocimiento de su personalidad jurídica.",
    ),
    "French": (
        "Tous les êtres humains naissent libres et égaux en dignité et en droits.",
        "Tout individu a droit à la vie, à la liberté et à la sûreté de sa personne.",
        "Chacun a le droit à la reconnaissance en tous lieux de sa personnalité juridique.",
    ),
    "Russian": (
        "Все люди рождаются свободными и равными в своем достоинстве и правах.",
        "Каждый человек имеет право на жизнь, на свободу и на личную неприкосновенность.",
        "Каждый человек, где бы он ни находился, имеет право на признание его правосубъектности.",
    ),
    "Chinese": (
        "人人生而自由，在尊严和权利上一律平等。",
        "人人有权享有生命、自由和人身安全。",
        "人人在任何地方有权被承认在法律前的人格。",
    ),
    "Arabic": (
        "يولد جميع الناس أحرارًا متساوين في الكرامة والحقوق.",
        "لكل فرد الحق في الحياة والحرية وسلامة شخصه.",
        "لكل إنسان أينما وجد الحق في أن يعترف بشخصيته القانونية.",
    ),
    "Korean": (
        "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다.",
        "모든 사람은 생명과 신체의 자유와 안전에 대한 권리를 가진다.",
        "모든 사람은 어디에서나 법 앞에 인간으로서 인정받을 권리를 가진다.",
    ),
    "Hindi": (
        "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता और समानता प्राप्त है।",
        "प्रत्येक व्यक्ति को जीवन, स्वाधीनता और वैयक्तिक सुरक्षा का अधिकार है।",
        "हर किसी को हर जगह क़ानून की निग़ाह में व्यक्ति के रूप में स्वीकृति-प्राप्ति का अधिकार है।",
    ),
}
# What the bill can be drawn up with; each is made when it is first chosen.
VOCABULARIES: dict[str, Callable[[], Tokenizer]] = {
    "SmolLM2's, 49,152 tokens": default_tokenizer,
    "trained here, 656 tokens": lambda: small_bpe().to_tokenizer(),
    "bytes only, 256 tokens": lambda: bpe.BPE([]).to_tokenizer(),
}
UNITS = ("tokens", "tokens per character")


def token_bill(job: ExperimentJob, *, vocabulary: str, unit: str) -> Result:
    """Three sentences in each language: their tokens, counted here in one of VOCABULARIES and drawn in one of UNITS."""
    tokenizer, counts = VOCABULARIES[vocabulary](), {}
    for n, (language, sentences) in enumerate(SENTENCES.items()):
        job.progress(n / len(SENTENCES), language)
        counts[language] = [len(tokenizer.encode(sentence)) for sentence in sentences]
    english = counts["English"]
    times = {name: [a / b for a, b in zip(own, english, strict=True)] for name, own in counts.items()}
    rows: list[dict[str, Any]] = [
        {
            "language": name,
            "characters": median(map(len, SENTENCES[name])),
            "bytes": median(len(sentence.encode()) for sentence in SENTENCES[name]),
            "tokens": median(own),
            "lowest": min(own),
            "highest": max(own),
            "times English": median(times[name]),
            "tokens per character": median(_per_character(name, own)),
        }
        for name, own in counts.items()
    ]
    most = max(rows, key=lambda row: row["times English"])
    low, high = min(times[most["language"]]), max(times[most["language"]])
    return Result(
        figure=_figure(counts, unit),
        rows=rows,
        summary=f"{most['language']} pays {most['times English']:.1f} times the tokens of English, by the median; "
        f"{low:.1f} to {high:.1f} times, sentence by sentence.",
        caption=f"Three sentences, nine languages, one vocabulary: {vocabulary}. Medians, lowest and highest",
        mark_guess=_mark_factor(median(english)) if unit == "tokens" else None,
        data={"tokens": counts, "times English": {row["language"]: row["times English"] for row in rows}},
    )


def _per_character(language: str, counts: list[int]) -> list[float]:
    return [n / len(sentence) for n, sentence in zip(counts, SENTENCES[language], strict=True)]


def _figure(counts: dict[str, list[int]], unit: str) -> go.Figure:
    names = list(counts)[::-1]
    if unit == "tokens":
        values = [[float(n) for n in counts[name]] for name in names]
        most = [median(len(s.encode()) for s in SENTENCES[name]) for name in names]
    else:
        values = [_per_character(name, counts[name]) for name in names]
        most = [median(len(s.encode()) / len(s) for s in SENTENCES[name]) for name in names]
    middle = [median(each) for each in values]
    bars = go.Bar(
        x=middle,
        y=names,
        error_x=spread.error_bars(values),
        orientation="h",
        text=[html.number(value) for value in middle],
        textposition="inside",
        insidetextanchor="start",
        name="median and range of three sentences",
        marker={"color": [theme.BLUE if name == "English" else theme.ORANGE for name in names]},
    )
    ceiling = go.Scatter(
        x=most,
        y=names,
        mode="markers",
        name="ceiling: a token for every byte",
        marker={"symbol": "line-ns-open", "size": 16, "line": {"width": 3}, "color": theme.NEUTRAL},
    )
    figure = theme.figure_layout(go.Figure([bars, ceiling]), x=unit, height=420)
    if unit == "tokens":
        figure.add_vline(x=median(counts["English"]), line={"color": theme.NEUTRAL, "dash": "dot"})
    return figure


def _mark_factor(english: float) -> Callable[[Any, Any], None]:
    """How the guessed factor is drawn: only tokens are what it was about."""
    look = {"line": {"color": theme.VERMILION, "dash": "dash"}, "annotation_text": "your guess"}
    return lambda figure, guess: figure.add_vline(x=guess * english, **look)
