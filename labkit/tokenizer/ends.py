"""Which tokens end an answer, beyond the one that a file names.

A base model's end-of-text token often stays the only one that an instruct model's files name, while its chat template
closes each turn with another. llama.cpp takes every control token with one of a few names for an end; transformers
believes ``generation_config.json``. Here: the names below, where the chat template or the GGUF vocabulary has them as
a special token, and at the first chat whatever the template writes behind an assistant's words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

TURN_ENDS = frozenset(
    (
        "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|end_of_text|>",
        "<|endoftext|>", "<|end_of_turn|>", "<|eot|>", "<|EOT|>", "<|END_OF_TURN_TOKEN|>", "<end_of_turn>",
        "<end_of_utterance>", "<turn|>", "<EOT>", "_<EOT>", "[EOT]", "<|user_end|>", "<|assistant_end|>",
        "<｜end▁of▁sentence｜>",
    )
)  # fmt: skip
"""Source: llama.cpp's ``src/llama-vocab.cpp`` (the list of end-of-generation tokens), and published templates."""

_ANSWER = "labkit-answer"


def by_name(special: Mapping[str, int], template: str | None = None) -> list[int]:
    """The special tokens that end a turn by their name; with a `template`, only those that it mentions."""
    return [i for name, i in special.items() if name in TURN_ENDS and (template is None or name in template)]


def in_template(render: Callable[[Sequence[Mapping[str, Any]]], str], ids_of: Callable[[str], Iterable[int]],
                special_ids: frozenset[int]) -> int | None:  # fmt: skip
    """The special token that a chat template writes behind an assistant's words; None when it writes none.

    `render` lays out messages, `ids_of` encodes. Raises nothing: a template that refuses the trial tells nothing.
    """
    try:
        text = render([{"role": "user", "content": "a"}, {"role": "assistant", "content": _ANSWER}])
    except ValueError:
        return None
    before, found, behind = text.rpartition(_ANSWER)
    first = next(iter(ids_of(behind.lstrip()[:200])), None) if found and before else None
    return first if first in special_ids else None
