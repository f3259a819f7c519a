"""Lesson 10, speculative decoding: guesses coloured as they hold or fall, and when they pay."""

from __future__ import annotations

from html import escape
from statistics import median
from typing import Any
from weakref import WeakKeyDictionary

import plotly.graph_objects as go

from labkit.decoding import EarlyExit, PromptLookup, Rounded, TrainedHead
from labkit.decoding.account import account
from labkit.decoding.draft_length import speedup
from labkit.decoding.drafters import choose
from labkit.decoding.trained_head import own_head
from labkit.prompts import ready_prompts
from labkit.ui import findings, theme
from labkit.ui.controls import choice, slider
from labkit.ui.exercise import Exercise
from labkit.ui.experiment import Experiment, Result

N_PAIRS = 3
"""Plain and drafted runs, in turn."""
CONFIGS: dict[str, Any] = {
    "prompt-lookup": PromptLookup(),
    "rounded": Rounded(),
    "trained-head": TrainedHead(),
    "early-exit": EarlyExit(),
}
COPY = "copy"
PASSAGE = (
    "The harbour master keeps three lists. The first list names the ships that are in the harbour today. The second "
    "list names the ships that are expected tomorrow. The third list names the ships that were expected yesterday and "
    "did not come. Every evening she reads the third list aloud, and nobody answers."
)
TO_COPY = f"{PASSAGE}\n\nThe same text once more:\n\n{PASSAGE}\n\nAnd again:\n\nThe harbour master"
"""A text that the model goes on repeating: what a lookup is made for."""
_made: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()


def names(lab: Any) -> list[str]:
    """Drafters that this installation has for the model on the page."""
    plain = lab.model.weights is None
    have = {"prompt-lookup": True, "rounded": plain, "trained-head": own_head().is_file(), "early-exit": True}
    return [name for name in CONFIGS if have[name]]


def texts() -> list[tuple[str, str]]:
    """What a menu offers: label and name."""
    ready = [(p.title, p.name) for p in ready_prompts() if p.name in ("first", "story", "code")]
    return [("A text to copy", COPY), *ready]


def drafter_of(lab: Any, name: str, n_draft: int) -> Any:
    """The drafter of that name for the lesson's model, with this draft length: built once."""
    kept = _made.setdefault(lab.model, {})
    if name not in kept:
        kept[name] = choose(CONFIGS[name], target=lab.model)
    kept[name].n_draft = n_draft
    return kept[name]


def _question(name: str) -> tuple[str, bool]:
    if name == COPY:
        return TO_COPY, False
    found = next(p for p in ready_prompts() if p.name == name)
    return found.text, found.chat


def colored(lab: Any, rounds: list[dict[str, Any]], first: list[int]) -> str:
    """The answer as it came: guesses that held underlined, the target's own tokens plain, a guess that fell struck
    through where it stood. HTML."""
    said = lab.tokenizer.decode
    parts = [f"<span>{escape(said(first))}</span>"]
    line = f"text-decoration-color:{theme.BLUE};text-decoration-thickness:3px"
    for r in rounds:
        held, own = r["tokens"][: r["n_accepted"]], r["tokens"][r["n_accepted"] :]
        if held:
            parts.append(f'<u style="{line}">{escape(said(held))}</u>')
        fell = r["proposed"][r["n_accepted"] : r["n_accepted"] + 1]
        if fell:
            parts.append(f'<s style="opacity:.6;text-decoration-color:{theme.VERMILION}">{escape(said(fell))}</s>')
        parts.append(f"<span>{escape(said(own))}</span>")
    legend = (
        '<div class="lk-muted"><u style="text-decoration-thickness:3px">underlined</u>: a guess that held; plain: the '
        "model's own token; <s>struck through</s>: the guess that it replaces</div>"
    )
    return f'<div class="lk-text" style="white-space:pre-wrap;line-height:1.7">{"".join(parts)}</div>{legend}'


def measure(lab: Any, job: Any, *, drafter: str, text: str, n_draft: int, n_tokens: int) -> Result:
    """Plain and drafted runs in turn; what came of each guess, what it cost, and what the formula makes of that."""
    prompt, chat = _question(text)
    job.progress(-1, f"preparing {drafter}")
    made = drafter_of(lab, drafter, n_draft)
    plain, drafted = lab.pipeline(), lab.pipeline(drafter=made)
    options: dict[str, Any] = {"max_new_tokens": n_tokens, "chat": chat, "ignore_eos": True}
    pairs: list[tuple[Any, Any]] = []
    for idx in range(N_PAIRS):
        job.progress(idx / N_PAIRS, f"pair {idx + 1} of {N_PAIRS}: plain")
        alone = plain.generate(prompt, **options)
        job.progress((idx + 0.5) / N_PAIRS, f"pair {idx + 1} of {N_PAIRS}: {drafter}")
        run = drafted.run(prompt, **options)
        try:
            while run.running:
                live = run.snapshot()
                if idx == 0 and live.meta.get("speculation", {}).get("rounds"):
                    job.show(Result(extra=colored(lab, live.meta["speculation"]["rounds"], [])))
                job.check()
                job.stop_event.wait(0.1)
        finally:
            run.stop()
        pairs.append((alone, run.result(timeout=60)))
    return _result(lab, drafter, n_draft, pairs)


def _result(lab: Any, drafter: str, n_draft: int, pairs: list[tuple[Any, Any]]) -> Result:
    plain_s = median(_token_s(alone.trace) for alone, _ in pairs)
    accounts = [account(done.trace, plain_s) for _, done in pairs]
    found = sorted(accounts, key=lambda a: a.measured)[len(accounts) // 2]
    last = pairs[-1][1]
    same = all(done.token_ids == alone.token_ids for alone, done in pairs)
    lengths = list(range(1, 9))
    row = max(0.0, found.verify_cost - 1.0) / max(found.guesses_per_round, 1e-9)
    costs = {n: {"draft_cost": found.draft_cost, "verify_cost": 1.0 + n * row} for n in lengths}
    figure = go.Figure(
        [
            go.Scatter(
                x=lengths,
                y=[speedup(found.acceptance, n, **costs[n]) for n in lengths],
                name="predicted: the formula at this run's acceptance and costs",
                mode="lines",
                **theme.series(0),
            ),
            go.Scatter(
                x=[n_draft] * len(accounts),
                y=[a.measured for a in accounts],
                name="measured: each pair",
                mode="markers",
                **theme.series(1),
            ),
        ]
    )
    theme.figure_layout(figure, x="guesses a round", y="times as fast as plain decoding")
    figure.add_hline(y=1.0, line={"color": theme.GREY, "dash": "dash"})
    figure.update_yaxes(rangemode="tozero")
    rows = [
        {
            "pair": idx + 1,
            "guesses a round": a.guesses_per_round,
            "acceptance": a.acceptance,
            "tokens a round": a.tokens_per_round,
            "a guess costs": a.draft_cost,
            "a check costs": a.verify_cost,
            "predicted": a.predicted,
            "measured": a.measured,
        }
        for idx, a in enumerate(accounts)
    ]
    rounds = last.trace.meta["speculation"]["rounds"]
    data = {"accounts": accounts, "median": found, "same": same, "drafter": drafter, "n_draft": n_draft}
    data |= {"spread": (min(a.measured for a in accounts), max(a.measured for a in accounts))}
    return Result(
        figure,
        rows,
        " ".join(findings.speculation(data)),
        "Costs in steps of plain decoding",
        extra=colored(lab, rounds, last.token_ids[:1]),
        data=data,
    )


def _token_s(trace: Any) -> float:
    return sum(trace.itl_s) / max(1, len(trace.itl_s))


def panel(lab: Any, guess: Any = None) -> Experiment:
    """The experiment of the lesson."""
    have = names(lab)

    def run(job: Any, **values: Any) -> Result:
        return measure(lab, job, **values)

    fields = {
        "drafter": choice("Who guesses", have, "prompt-lookup", width="190px"),
        "text": choice("Text", texts(), COPY, width="220px"),
        "n_draft": slider("Guesses a round", 1, 8, 4, step=1),
        "n_tokens": slider("New tokens", 24, 120, 40, step=8),
    }
    return Experiment(
        "When do guesses pay?",
        run,
        fields,
        guess=guess,
        note="Plain decoding and drafting take turns, three times. The text below shows the fate of each guess.",
        confounders=("drafter", "text", "n_tokens"),
    )


CHOICES = {0.1: "about one time in ten", 0.45: "a little under half of the time", 0.9: "about nine times in ten"}


def break_even_choice() -> str:
    """The guess that the formula bears out: four guesses at a tenth of a step, a check at 1.35."""
    costs = {"draft_cost": 0.1, "verify_cost": 1.35}
    even = next(a / 1000 for a in range(1001) if speedup(a / 1000, 4, **costs) >= 1.0)
    return CHOICES[min(CHOICES, key=lambda a: abs(a - even))]


def extremes(lab: Any, n_tokens: int = 24) -> list[dict[str, Any]]:
    """Where it loses: the untrained early exit on a story, beside the best case. Measured, one pair each."""
    rows = []
    for name, text in (("prompt-lookup", COPY), ("early-exit", "story")):
        prompt, chat = _question(text)
        options: dict[str, Any] = {"max_new_tokens": n_tokens, "chat": chat, "ignore_eos": True}
        alone = lab.pipeline().generate(prompt, **options)
        done = lab.pipeline(drafter=drafter_of(lab, name, 4)).generate(prompt, **options)
        found = account(done.trace, _token_s(alone.trace))
        rows.append(
            {
                "drafter": name,
                "text": dict((value, label) for label, value in texts())[text],
                "acceptance": found.acceptance,
                "a guess costs": found.draft_cost,
                "predicted": found.predicted,
                "measured": found.measured,
            }
        )
    return rows


def _verdict(target: list[int], guesses: list[int]) -> list[int]:
    """The tokens of a greedy round: what the target would say after each guess, as long as they agree."""
    for idx, guess in enumerate(guesses):
        if guess != target[idx]:
            return target[: idx + 1]
    return target[: len(guesses) + 1]


ROUND = Exercise(
    "the tokens of a round",
    oracle=_verdict,
    cases=[([5, 7, 9], [5, 7]), ([5, 7, 9], [5, 8]), ([5, 7, 9], [4, 7]), ([3], [])],
    hints=(
        "The target's token after the last known one is target[0]; it is right whatever was guessed.",
        "Go through the guesses; at the first one that differs, stop: nothing behind it was checked on the right text.",
        "When all hold, target has one token more than there were guesses, and that one comes free.",
    ),
)

QUIZ = (
    (
        "A guess of four tokens falls at the first. What does the round yield?",
        {
            "nothing, and the token must be computed again": "The check has computed what follows the last known.",
            "one token, the target's own": "The check's first row is a plain step's, so a round never yields less.",
            "three tokens": "What was computed behind a wrong guess belongs to another text.",
        },
        "one token, the target's own",
    ),
    (
        "With temperature, is the text still distributed as without a drafter?",
        {
            "only with temperature 0": "Greedy is the simple case; rejection sampling carries the others.",
            "yes, by accepting with chance p/q and drawing the rest from p - q": "What q proposes too often is "
            "rejected just so often, and the remainder is what p has more than q.",
            "nearly, as far as the draft is good": "A bad draft costs time and changes no chance.",
        },
        "yes, by accepting with chance p/q and drawing the rest from p - q",
    ),
    (
        "Where does it pay least?",
        {
            "one reader, a large model": "There a step waits for the weights, and more rows are nearly free.",
            "many readers in one batch": "The batch fills the arithmetic; rows that are thrown away take its place.",
            "a text that quotes its own prompt": "That is the best case for a lookup.",
        },
        "many readers in one batch",
    ),
)
