"""The status line of a panel: a word, a sentence, how far it is and for how long it has been at it."""

from __future__ import annotations

import anywidget
import traitlets

from labkit.ui.theme import STATIC
from labkit.ui.words import language, say

STATES = ("idle", "loading", "running", "done", "stopped", "error")


class StatusLine(anywidget.AnyWidget):
    """``set("running", "Decoding", 0.4)``, in English or said already; a progress below 0 hides the bar."""

    _esm = STATIC / "status.js"
    state = traitlets.Enum(STATES, default_value="idle").tag(sync=True)
    text = traitlets.Unicode("").tag(sync=True)
    progress = traitlets.Float(-1.0).tag(sync=True)
    seconds = traitlets.Int(0).tag(sync=True)
    """Since the work began: the line moves while it runs, and a page that hears nothing for long says what to do."""

    words = traitlets.Dict().tag(sync=True)
    """What the page says by itself, in the reader's language."""

    def __init__(self) -> None:
        super().__init__(words=own_words())
        self.add_class("lk-status")

    def set(self, state: str, text: str, progress: float = -1.0, seconds: float = 0.0) -> None:
        """All of it in one message."""
        with self.hold_sync():
            self.state, self.text, self.progress, self.seconds = state, say(text), float(progress), int(seconds)


def own_words() -> dict[str, str]:
    """The line's own sentences. "%" is where the page puts a figure."""
    return {
        "language": language(),
        "progress": say("progress"),
        "silence": say("No news for {seconds} s.", seconds="%"),
        "voila": say("If its kernel was restarted or has ended, this panel hears no more of it: load this page again."),
        "notebook": say(
            "If its kernel was restarted or has ended, this panel hears no more of it: run the page's cells again, "
            "from the top."
        ),
    }
