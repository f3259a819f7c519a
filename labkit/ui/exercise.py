"""Exercises: a stub to fill, a check that says what is wrong, three hints, and a folded solution that CI runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from IPython.display import HTML, display

from labkit.ui import html, progress
from labkit.ui.words import counted, say

N_HINTS = 3


@dataclass
class Exercise:
    """What a solution must do: cases to try, and an oracle that knows the answers.

    ``cases`` are argument tuples; ``oracle(*case)`` is labkit's own answer, never a hard-coded one. ``same``
    compares (default: ``==``, and ``torch.allclose`` for tensors). ``hints``: exactly three, each closer.
    """

    name: str
    cases: Sequence[tuple[Any, ...]]
    oracle: Callable[..., Any]
    hints: tuple[str, str, str]
    same: Callable[[Any, Any], bool] | None = None
    tries: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if len(self.hints) != N_HINTS:
            raise ValueError(f"exercise {self.name!r} has {len(self.hints)} hints: give exactly {N_HINTS}.")
        if not self.cases:
            raise ValueError(f"exercise {self.name!r} has no cases to check.")


@dataclass(frozen=True)
class Verdict:
    """True when the solution is right. It has shown itself already, so a cell that ends with it adds nothing."""

    right: bool
    message: str

    def __bool__(self) -> bool:
        return self.right

    def _ipython_display_(self) -> None:
        pass


def check(solution: Callable[..., Any], exercise: Exercise) -> Verdict:
    """Try ``solution`` on the exercise's cases and show the verdict; true when all agree.

    An unfinished stub (it returns ``...`` or raises NotImplementedError) is "not yet", no failure, so a fresh
    notebook runs through. With LABKIT_TEST=solution anything but a pass raises AssertionError: so CI runs the
    folded solutions.
    """
    state, message = _judge(solution, exercise)
    exercise.tries += state == "wrong"
    progress.note(exercise=state == "right")
    display(HTML(html.page(_verdict(state, message, exercise))))
    if state != "right" and os.environ.get("LABKIT_TEST") == "solution":
        raise AssertionError(f"the solution of {exercise.name!r} does not pass: {message}")
    return Verdict(state == "right", message)


def _judge(solution: Callable[..., Any], exercise: Exercise) -> tuple[str, str]:
    for case in exercise.cases:
        expected = exercise.oracle(*deepcopy(case))
        call = f"{getattr(solution, '__name__', 'solution')}({', '.join(_short(arg) for arg in case)})"
        try:
            found = solution(*deepcopy(case))
        except NotImplementedError:
            return "open", say("not written yet")
        except Exception as error:  # noqa: BLE001 - the learner's code may raise anything; it is shown
            return "wrong", say("{call} raised {error}", call=call, error=f"{type(error).__name__}: {error}")
        if found is ... or (found is None and expected is not None):
            return "open", say("{call} returns {found}: not written yet", call=call, found=repr(found))
        if not _agree(found, expected, exercise.same):
            both = {"found": _short(found), "expected": _short(expected)}
            return "wrong", say("{call} gave {found}, expected {expected}", call=call, **both)
    return "right", counted(len(exercise.cases), "the one case agrees", "all {n} cases agree")


def _agree(found: Any, expected: Any, same: Callable[[Any, Any], bool] | None) -> bool:
    import torch

    try:
        if same is not None:
            return bool(same(found, expected))
        if isinstance(expected, torch.Tensor):
            found = torch.as_tensor(found)
            if found.shape != expected.shape:
                return False
            return torch.allclose(found.double(), expected.double(), rtol=1e-4, atol=1e-5, equal_nan=True)
        if isinstance(expected, float):
            return abs(found - expected) <= 1e-6 * max(1.0, abs(expected))
        return bool(found == expected)
    except (TypeError, ValueError, RuntimeError):
        return False


def _verdict(state: str, message: str, exercise: Exercise) -> str:
    title = say({"right": "Right.", "wrong": "Not yet.", "open": "Your turn."}[state])
    kind = {"right": "is-right", "wrong": "is-wrong", "open": ""}[state]
    hints = ""
    if state != "right":
        titles = [say("Hint {n} of {all}", n=n, all=N_HINTS) for n in range(1, N_HINTS + 1)]
        folded = "".join(
            f"<details class='lk-twin'><summary>{said}</summary>{html.prose(say(hint))}</details>"
            for said, hint in zip(titles, exercise.hints, strict=True)
        )
        hints = f"<div style='margin-top:6px'>{folded}</div>"
    return f'<div class="lk-note {kind}" role="status"><b>{title}</b> {html.prose(message)}{hints}</div>'


def _short(value: Any) -> str:
    text = repr(value).replace("\n", " ")
    return text if len(text) <= 90 else text[:87] + "..."
