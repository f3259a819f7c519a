"""Every switch of the switchboard, drawn from the registries: a component registered tomorrow appears by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape
from typing import Any

import ipywidgets as w

import labkit
from labkit import prompts, registry
from labkit.model.config import DTYPES
from labkit.ui import controls
from labkit.ui.component_picker import ComponentPicker
from labkit.ui.session import DEFAULT_MODEL
from labkit.ui.words import say

AUTO = "As the file packs them where the backend computes from that (stored), else unpacked (plain)"
OWN = ""
"""The prompt menu's first entry: the reader's own words."""


@dataclass(frozen=True)
class Settings:
    """One setting of every switch, read when Run is pressed."""

    prompt: str
    chat: bool
    max_new_tokens: int
    seed: int
    load: dict[str, Any] = field(default_factory=dict)
    """What ``labkit.load`` takes: name, dtype, weights."""
    pipeline: dict[str, Any] = field(default_factory=dict)
    """What ``labkit.Pipeline`` takes: kv_cache, backend, sampling, drafter."""
    words: dict[str, str] = field(default_factory=dict)
    """Every switch by the name a reader knows, in words: what two runs are compared by."""


class Switches:
    """The controls and their reading. ``on_load_change`` is called when a change needs another model."""

    def __init__(
        self,
        *,
        prompt: str = "first",
        max_new_tokens: int = 64,
        on_load_change: Callable[[], Any],
        on_prompt_change: Callable[[], Any],
        guard: Callable[[Callable[..., Any]], Callable[..., Any]],
    ) -> None:
        ready = prompts.ready_prompts()
        titles = [(item.title, item.name) for item in ready] + [("My own words", OWN)]
        self.ready = controls.choice("Ready-made", titles, prompt, width="100%")
        first = prompts.ready_prompt(prompt)
        self.prompt = controls.text(
            "The prompt", first.text, rows=4, placeholder="Type a question, or a text to continue"
        )
        self.prompt_note = w.HTML()
        as_question = [("a question to answer", True), ("a text to continue", False)]
        self.chat = controls.choice("Treat it as", as_question, first.chat, width="190px")
        self.length = controls.slider("New tokens, at most", 1, 512, max_new_tokens, width="190px")

        names = [(name, name) for name in labkit.models()]
        self.model = controls.choice("Name", names, DEFAULT_MODEL, width="100%")
        self.dtype = controls.choice("dtype", [("auto", "auto"), *((d, d) for d in DTYPES)], "auto", width="110px")
        self.weights = ComponentPicker("weights", "Weights", none_label="auto", none_help=AUTO, width="190px")

        self.pickers = {
            "kv_cache": ComponentPicker("kv_cache", "KV cache", value="contiguous", width="190px"),
            "backend": ComponentPicker("backend", "Backend", first=("auto", "auto"), value="auto", width="190px"),
            "sampling": ComponentPicker("sampler", "Sampler", value="greedy", width="190px"),
        }
        if registry.components("drafter"):
            self.pickers["drafter"] = ComponentPicker("drafter", "Drafter", none_label="none", width="190px")
        self.seed = controls.number("Seed", 0, low=0, high=2**31 - 1, width="110px")

        self.ready.observe_value(guard(self._choose_ready))
        self.prompt.observe_value(guard(self._typed))
        self._on_prompt_change = on_prompt_change
        self.chat.observe_value(guard(on_prompt_change))
        for switch in (self.model, self.dtype, self.weights):
            switch.observe_value(guard(on_load_change))
        self.ask = _group("Prompt", self.ready, self.prompt, self.prompt_note, controls.grid(self.chat, self.length))
        """What is asked; everything else is in ``widget``."""
        self.widget = controls.stack(
            _group("Model", self.model, controls.grid(self.dtype, self.weights)),
            _group("Run", controls.grid(*self.pickers.values(), self.seed)),
        )

    @property
    def load_options(self) -> dict[str, Any]:
        return {"name": self.model.value, "dtype": self.dtype.value, "weights": self.weights.value}

    def read(self) -> Settings:
        """All switches as they stand."""
        names = {"kv_cache": "KV cache", "backend": "backend", "sampling": "sampler", "drafter": "drafter"}
        words = {
            "prompt": _title(self.ready),
            "as": say("question") if self.chat.value else say("text"),
            "new tokens": str(self.length.value),
            "model": self.model.value,
            "dtype": self.dtype.value,
            "weights": self.weights.text,
            **{names[key]: picker.text for key, picker in self.pickers.items()},
            "seed": str(self.seed.value),
        }
        if self.ready.value == OWN:
            words["prompt"] = f"“{self.prompt.value[:24]}”"
        return Settings(
            prompt=self.prompt.value,
            chat=self.chat.value,
            max_new_tokens=self.length.value,
            seed=self.seed.value,
            load=self.load_options,
            pipeline={key: picker.value for key, picker in self.pickers.items()},
            words=words,
        )

    def reset(self) -> None:
        for switch in self._all():
            switch.reset()
        self._choose_ready()

    def set_disabled(self, disabled: bool) -> None:
        for switch in (*self._all(), self.prompt):
            switch.set_disabled(disabled)

    def _all(self) -> tuple[Any, ...]:
        head = (self.ready, self.chat, self.length, self.model, self.dtype, self.weights)
        return (*head, *self.pickers.values(), self.seed)

    def _choose_ready(self) -> None:
        if self.ready.value != OWN:
            chosen = prompts.ready_prompt(self.ready.value)
            self.prompt.value, self.chat.value = chosen.text, chosen.chat
        self._on_prompt_change()

    def _typed(self) -> None:
        """What the reader types is their own prompt; the menu says so."""
        if self.ready.value != OWN and self.prompt.value != prompts.ready_prompt(self.ready.value).text:
            self.ready.value = OWN
        self._on_prompt_change()

    def say_tokens(self, n_tokens: int | None, room: int | None) -> None:
        """Under the prompt: what the ready-made one shows, and how many tokens it is."""
        shows = "" if self.ready.value == OWN else prompts.ready_prompt(self.ready.value).shows
        count = "" if n_tokens is None else say("{n:,} tokens of {room:,}.", n=n_tokens, room=room)
        self.prompt_note.value = f'<div class="lk-help"><b class="lk-num">{count}</b> {escape(say(shows))}</div>'


def _group(title: str, *children: Any) -> w.Box:
    box = controls.stack(w.HTML(f'<div class="lk-eyebrow">{say(title)}</div>'), *children)
    box.add_class("lk-group")
    return box


def _title(menu: controls.Field) -> str:
    return next(text for text, value in menu.control.options if value == menu.value)
