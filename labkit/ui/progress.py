"""What a learner has done, lesson by lesson: one small file in the user's own data folder, and nowhere else.

Nothing is sent anywhere, and nothing but a lesson's name, whether its exercise passed and its best quiz score is kept.
A page that others visit (Voila), a kiosk and a test keep nothing. ``LABKIT_PROGRESS`` names another file; ``off``
keeps none.
"""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from labkit.resources import read_json_object
from labkit.ui.errors import under_test, under_voila
from labkit.ui.words import say, sentences

VARIABLE = "LABKIT_PROGRESS"
N_LESSONS, N_QUESTIONS = 15, 3
MAX_BYTES = 64_000
_current = ""
"""The lesson whose header this kernel showed last."""


def path() -> Path | None:
    """Where progress is kept; None where nobody's is."""
    chosen = os.environ.get(VARIABLE, "")
    kiosk = os.environ.get("LABKIT_KIOSK", "0") != "0"
    if chosen == "off" or under_voila() or kiosk or (under_test() and not chosen):
        return None
    with suppress(RuntimeError):  # somebody without a home
        if chosen:
            return Path(chosen).expanduser()
        from platformdirs import user_data_dir

        found = Path(user_data_dir("labkit", appauthor=False)) / "progress.json"
        return found if found.is_absolute() else None
    return None


def lessons() -> dict[str, dict[str, Any]]:
    """{lesson: {"exercise": passed, "quiz": most right answers}}; empty where there is no readable file."""
    where = path()
    if where is None or not where.is_file():
        return {}
    try:
        found = read_json_object(where, max_bytes=MAX_BYTES).get("lessons")
    except (ValueError, OSError):
        return {}  # damaged: the next entry begins a new one
    if not isinstance(found, dict):
        return {}
    return {name: _clean(done) for name, done in found.items() if isinstance(done, dict)}


def _clean(done: dict[str, Any]) -> dict[str, Any]:
    quiz = done.get("quiz")
    return {
        "exercise": done.get("exercise") is True,
        "quiz": min(max(quiz, 0), N_QUESTIONS) if type(quiz) is int else 0,
    }


def begin(lesson: str) -> None:
    """What is done from here on in this kernel belongs to ``lesson`` (a notebook's name)."""
    global _current
    _current = Path(lesson).stem


def note(*, exercise: bool = False, quiz: int = 0) -> None:
    """Keep what was done in the current lesson. A later failure takes nothing away; a disk that cannot be written
    to keeps nothing."""
    where = path()
    if where is None or not _current:
        return
    known = lessons()
    before = known.get(_current, _clean({}))
    after = {"exercise": exercise or before["exercise"], "quiz": max(quiz, before["quiz"])}
    if after == before:
        return
    known[_current] = after
    with suppress(OSError):
        where.parent.mkdir(parents=True, exist_ok=True)
        handle, unfinished = tempfile.mkstemp(dir=where.parent, suffix=".part")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({"lessons": known}, file, indent=1, sort_keys=True)
        os.replace(unfinished, where)


def is_through(done: dict[str, Any]) -> bool:
    """Whether a lesson is finished: its exercise passed and every question answered right, if not at once."""
    return done["exercise"] and done["quiz"] == N_QUESTIONS


def words(lesson: str) -> str:
    """One line for a lesson's header; empty where nothing is kept."""
    if path() is None:
        return ""
    known = lessons()
    done = known.get(Path(lesson).stem, _clean({}))
    n_through = sum(is_through(each) for each in known.values())
    passed, still = "Exercise passed, quiz {n} of {of} right.", "Exercise open, quiz {n} of {of} right."
    here = say(passed if done["exercise"] else still, n=done["quiz"], of=N_QUESTIONS)
    through = "{n} of {of} lessons finished. This is kept on this computer only."
    return sentences(say("Your progress:"), here, say(through, n=n_through, of=N_LESSONS))
