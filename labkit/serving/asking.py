"""What a request may ask for, and what is refused before it waits."""

from __future__ import annotations

from typing import Any

from labkit.model.model import Model
from labkit.sequence import Sequence


class TooBusy(Exception):
    """The queue is full: try again after ``retry_after_s``."""

    def __init__(self, n_waiting: int, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(
            f"{n_waiting} requests are waiting, which is as many as this server lets wait: try again in about "
            f"{retry_after_s:.0f} s."
        )


def encode(model: Model, prompt: Any, chat: bool = False) -> tuple[list[int], bool]:
    """Token ids of a text (``chat``: of one message that holds it), of a list of messages, or as they are given; and
    whether the answer goes on from the last word (a chat's is a text of its own).

    Raises ValueError for what is empty, malformed, or not in the vocabulary."""
    tokenizer = model.tokenizer
    if isinstance(prompt, str):
        if not prompt:
            raise ValueError("the prompt is empty: give the model at least one character to continue.")
        if not chat:
            return tokenizer.encode_prompt(prompt), True
        prompt = [{"role": "user", "content": prompt}]
    prompt = list(prompt)
    if prompt and all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in prompt):
        n_vocab = model.config.vocab_size
        if wrong := [token_id for token_id in prompt if not 0 <= token_id < n_vocab]:
            raise ValueError(f"token id {wrong[0]} is outside the vocabulary (0 to {n_vocab - 1}).")
        return prompt, True
    return tokenizer.encode_prompt(tokenizer.apply_chat_template(prompt), chat=True), False


def fit(sequence: Sequence, n_room: int) -> None:
    """Shorten what a request may generate to what an empty cache holds: it would wait for ever otherwise.

    Raises ValueError when its prompt alone is too long."""
    fitting = n_room - sequence.n_prompt + 1
    if fitting < 1:
        raise ValueError(
            f"the prompt has {sequence.n_prompt} tokens and this server has room for {n_room} of one request: shorten "
            "it."
        )
    sequence.max_new_tokens = min(sequence.max_new_tokens, fitting)
