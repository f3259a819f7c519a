"""How many tokens to guess: a fixed number, or as many as pay, judged from the run's own times.

    expected tokens a round   E(n) = (1 - a^(n+1)) / (1 - a)          a: chance that a guess is accepted
    time of a round           T(n) = v0 + n (s(n) + c)                v0: a plain step, c: one guess, s(n): one more row
                                                                      to check, where there are n
    speed-up                  E(n) v0 / T(n)                          (arXiv 2211.17192, theorem 3.8, with s > 0)

The first row may be nearly free and the second not, so s is measured for each n by itself; until it is, the nearest
length that was tried speaks for it.

n = 0 is plain decoding, so the best n never loses by this arithmetic. What can lose is to find a, s and c out. That is
a debt: the time spent over what plain steps would have taken for the same tokens. It may not grow beyond ``MAX_DEBT``
of the run and one plain step; while it is there, the run decodes plainly.
"""

from __future__ import annotations

from collections import deque
from statistics import median

MAX_DEBT = 0.03
FIRST_DEBT_STEPS = 1.0
N_PLAIN_FIRST = 2
"""Plain steps before the first guess: what it is compared with."""
RECENT = 7
"""Measurements of each kind that count; their median does."""
FORGET = 0.96
"""What an older guess's outcome counts beside the next one's."""
PRIOR_HITS, PRIOR_TRIALS = 1.2, 2.0
FIRST_TRY, FIRST_SLOPE = 1, 0.2
"""The first draft's length, and what a row more costs until that is known, in plain steps."""
CHECK_PLAIN_EVERY = 48
"""Rounds with guesses until a plain one measures again: the context grows, and others take the cores."""
LONGEST_PAUSE = 128
FIRST_PAUSE = 8


def expected_tokens(acceptance: float, n: int) -> float:
    """Tokens a round of ``n`` guesses yields, one of the target's own included.

    >>> expected_tokens(0.5, 2), expected_tokens(1.0, 4), expected_tokens(0.0, 4)
    (1.75, 5.0, 1.0)
    """
    if acceptance >= 1.0:
        return n + 1.0
    return (1.0 - acceptance ** (n + 1)) / (1.0 - acceptance)


def speedup(acceptance: float, n: int, *, draft_cost: float, verify_cost: float) -> float:
    """Over plain decoding; ``draft_cost`` of one guess and ``verify_cost`` of the whole check, in plain steps.

    >>> round(speedup(0.8, 5, draft_cost=0.05, verify_cost=1.0), 2)      # arXiv 2211.17192's form: v = 1
    2.95
    """
    return expected_tokens(acceptance, n) / (verify_cost + n * draft_cost)


class FixedLength:
    """Always ``n``."""

    def __init__(self, n: int) -> None:
        self.n = n

    def choose(self, room: int) -> int:
        return min(self.n, room)

    def learn(self, n_proposed: int, n_accepted: int, *, draft_s: float, verify_s: float) -> None:
        pass


class AutomaticLength:
    """As many as pay by what this run has measured."""

    def __init__(self, longest: int = 8) -> None:
        self.longest = longest
        self._plain: deque[float] = deque(maxlen=RECENT)
        self._rows: dict[int, deque[float]] = {}
        self._guess: deque[float] = deque(maxlen=RECENT)
        self._hits, self._trials = PRIOR_HITS, PRIOR_TRIALS
        self._spent_s = 0.0
        self._n_tokens = self._n_since_plain = self._waited = 0
        self._pause = FIRST_PAUSE

    @property
    def acceptance(self) -> float:
        return self._hits / self._trials

    def choose(self, room: int) -> int:
        """Guesses for the next round, at most ``room``."""
        if len(self._plain) < N_PLAIN_FIRST or room < 1 or self._n_since_plain >= CHECK_PLAIN_EVERY:
            return 0
        plain_s = median(self._plain)
        longest = min(room, self.longest if self._rows else FIRST_TRY)
        n = max(range(longest + 1), key=lambda n: expected_tokens(self.acceptance, n) / self._round_s(n, plain_s))
        if n == 0 and self._waited >= self._pause:
            n = 1  # look again: texts change
        if n and self._debt_s(plain_s) + self._round_s(n, plain_s) - plain_s > self._allowed_s(plain_s):
            return 0
        return n

    def learn(self, n_proposed: int, n_accepted: int, *, draft_s: float, verify_s: float) -> None:
        """What a round was: its guesses, how many held, and where its time went."""
        self._spent_s += draft_s + verify_s
        self._n_tokens += n_accepted + 1
        if not n_proposed:
            self._plain.append(verify_s)
            self._n_since_plain, self._waited = 0, self._waited + 1
            return
        self._n_since_plain += 1
        plain_s = median(self._plain) if self._plain else verify_s
        row_s = max(0.0, (verify_s - plain_s) / n_proposed)
        self._rows.setdefault(n_proposed, deque(maxlen=RECENT)).append(row_s)
        self._guess.append(draft_s / n_proposed)
        for idx in range(min(n_accepted + 1, n_proposed)):
            self._hits = FORGET * self._hits + (idx < n_accepted)
            self._trials = FORGET * self._trials + 1.0
        paid = (n_accepted + 1) * plain_s >= draft_s + verify_s
        self._pause = FIRST_PAUSE if paid else min(2 * self._pause, LONGEST_PAUSE)
        self._waited = 0

    def _round_s(self, n: int, plain_s: float) -> float:
        row = FIRST_SLOPE * plain_s
        if self._rows:
            nearest = min(self._rows, key=lambda tried: (abs(tried - n), tried))
            row = median(self._rows[nearest])
        guess = median(self._guess) if self._guess else 0.0
        return plain_s + n * (row + guess)

    def _debt_s(self, plain_s: float) -> float:
        return self._spent_s - self._n_tokens * plain_s

    def _allowed_s(self, plain_s: float) -> float:
        return plain_s * (FIRST_DEBT_STEPS + MAX_DEBT * self._n_tokens)
