"""How many tokens of prompts a step may take beside decodes, so that who is writing waits little longer than alone.

A fixed budget of tokens is a guess about the machine: 32 tokens are nothing on a GPU, and five times a decode step on
two cores. So the chunk follows what the steps took: smaller after one that took too long, one token more after one that
had time left. Which tokens come in which step changes no request's answer, so a clock may decide it here.
"""

from __future__ import annotations

from collections import deque
from statistics import median

AIM = 0.85
"""What part of the longest step is aimed at: steps of one kind differ, and the limit is for nearly all of them."""
LOOK_EVERY = 40
"""After so many steps with prompts one goes without, to see what writing alone takes now."""


class Pace:
    """``max_slowdown``: how many times as long as a step of decodes alone one with prompts may take."""

    def __init__(self, max_slowdown: float) -> None:
        self.max_slowdown = max_slowdown
        self.chunk = 4
        self._alone: dict[int, deque[float]] = {}
        """By number of decodes: seconds of the last steps without prompts."""
        self._since_alone = 0

    def tokens(self, n_decodes: int, most: int) -> int:
        """Of prompts, in the next step; 0 to see first what the decodes take alone."""
        if not n_decodes:
            return most
        if n_decodes not in self._alone or self._since_alone >= LOOK_EVERY:
            return 0
        return min(self.chunk, most)

    def note(self, n_decodes: int, n_prompt_tokens: int, seconds: float) -> None:
        """What a step took."""
        if not n_decodes:
            return
        if not n_prompt_tokens:
            self._alone.setdefault(n_decodes, deque(maxlen=9)).append(seconds)
            self._since_alone = 0
            return
        self._since_alone += 1
        if n_decodes not in self._alone:
            return
        share = seconds / (AIM * self.max_slowdown * median(self._alone[n_decodes]))
        if share > 1.0:
            self.chunk = max(1, min(int(self.chunk / share), self.chunk - 1))
        elif n_prompt_tokens >= self.chunk:
            self.chunk += 1
