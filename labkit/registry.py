"""Names to components: what a widget lists, what a caller may choose, and why one is not available here.

A component is a frozen config dataclass plus the function that builds it. Its options and their ranges are
read from the dataclass's fields (``option(...)``), so the widgets, the command line and the documentation
all draw from one place.

Add a component in ten lines::

    @dataclass(frozen=True)
    class Paged:
        block_size: int = option(16, choices=(8, 16, 32, 64), help="tokens per block")

    @register("kv_cache", "paged", config=Paged, summary="Blocks of tokens behind a block table")
    def build_paged(config: Paged, **context): ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

KINDS = ("model", "weights", "kv_cache", "attention", "drafter", "sampler", "backend", "scheduler")


@dataclass(frozen=True)
class Option:
    """One adjustable setting of a component, with the range a slider or a dropdown needs."""

    name: str
    default: Any
    help: str = ""
    choices: tuple[Any, ...] | None = None
    low: float | None = None
    high: float | None = None
    step: float | None = None


@dataclass(frozen=True)
class ComponentInfo:
    """What the outside may know of a component: everything a widget draws."""

    name: str
    summary: str
    options: tuple[Option, ...] = ()
    unavailable: str | None = None
    """Why it cannot be chosen on this machine; None when it can."""


@dataclass(frozen=True)
class Component:
    kind: str
    name: str
    summary: str
    config: type | None
    build: Callable[..., Any]
    why_not: Callable[[], str | None]

    @property
    def info(self) -> ComponentInfo:
        return ComponentInfo(self.name, self.summary, options_of(self.config), self.why_not())


_components: dict[str, dict[str, Component]] = {kind: {} for kind in KINDS}


def option(
    default: Any,
    *,
    choices: Sequence[Any] | None = None,
    low: float | None = None,
    high: float | None = None,
    step: float | None = None,
    help: str = "",
) -> Any:
    """A dataclass field that carries its range. ``low`` and ``high`` are inclusive."""
    meta = {
        "choices": tuple(choices) if choices else None,
        "low": low,
        "high": high,
        "step": step,
        "help": help,
    }
    return field(default=default, metadata=meta)


def options_of(config: type | None) -> tuple[Option, ...]:
    """The adjustable fields of a config dataclass, in order."""
    if config is None:
        return ()
    return tuple(
        Option(f.name, None if f.default is MISSING else f.default, **f.metadata)
        for f in fields(config)
        if "choices" in f.metadata
    )


def check_options(config: Any) -> None:
    """Raise ValueError when a field of ``config`` is outside the range its ``option`` declares."""
    for opt in options_of(type(config)):
        value = getattr(config, opt.name)
        where = f"{type(config).__name__}({opt.name}={value!r})"
        if opt.choices is not None and value not in opt.choices:
            raise ValueError(f"{where}: choose one of {', '.join(map(str, opt.choices))}.")
        if type(opt.default) is int and type(value) is not int:
            raise ValueError(f"{where}: must be a whole number.")
        if opt.low is not None and value < opt.low:
            raise ValueError(f"{where}: must be at least {opt.low}.")
        if opt.high is not None and value > opt.high:
            raise ValueError(f"{where}: must be at most {opt.high}.")


def register(
    kind: str,
    name: str,
    *,
    summary: str,
    config: type | None = None,
    why_not: Callable[[], str | None] = lambda: None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: make ``build(config, **context)`` selectable as ``name`` among the components of ``kind``."""
    if kind not in _components:
        raise ValueError(f"unknown component kind {kind!r}: choose one of {', '.join(KINDS)}.")

    def add(build: Callable[..., Any]) -> Callable[..., Any]:
        _components[kind][name] = Component(kind, name, summary, config, build, why_not)
        return build

    return add


def components(kind: str) -> list[ComponentInfo]:
    """Every component of one kind, in the order it was registered.

    >>> [info.name for info in components("sampler")][:1]
    ['greedy']
    """
    if kind not in _components:
        raise ValueError(f"unknown component kind {kind!r}: choose one of {', '.join(KINDS)}.")
    return [component.info for component in _components[kind].values()]


def find(kind: str, choice: Any) -> tuple[Component, Any]:
    """The component that ``choice`` (a name or a config object) selects, and its config.

    Raises ValueError that lists the choices when there is no such component, says why when it is not
    available on this machine, and names the option that is out of range.
    """
    table = _components[kind]
    if isinstance(choice, str):
        component = table.get(choice)
        config = component.config() if component and component.config else None
    else:
        component = next((c for c in table.values() if c.config is not None and type(choice) is c.config), None)
        config = choice
    if component is None:
        raise ValueError(f"unknown {kind} {choice!r}: choose one of {', '.join(table) or '(none registered)'}.")
    reason = component.why_not()
    if reason:
        raise ValueError(f"{kind} {component.name!r} is not available here: {reason}")
    if config is not None:
        check_options(config)
    return component, config


def named(kind: str, config: Any) -> Any:
    """The name under which ``config`` can be asked for, when it is that component's default; else the config itself.

    What a record of a choice keeps: a name as far as it tells everything.
    """
    for component in _components[kind].values():
        if component.config is not None and type(config) is component.config and config == component.config():
            return component.name
    return config


def label(kind: str, choice: Any) -> str:
    """A choice in a few words: its name, and the options that differ from their defaults."""
    if choice is None or isinstance(choice, str):
        return str(choice)
    component, config = find(kind, choice)
    changed = [
        f"{opt.name}={getattr(config, opt.name)}"
        for opt in options_of(type(config))
        if getattr(config, opt.name) != opt.default
    ]
    return ", ".join([component.name, *changed])
