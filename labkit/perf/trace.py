"""What a run leaves behind: when each token came, and which phase each millisecond went to.

TTFT  time from the start of the run to its first token (tokenize + prefill + first sample)
ITL   time between one token and the next; one value for each token after the first
round tokens that a draft's check accepted come together: the ITL of all but the first of them is 0, and what a reader
      waits for is the round
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from labkit.perf.timer import PHASES, StepRecord

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Span:
    """One stretch of one phase. ``layer`` is None outside the layers. Seconds since the run began."""

    name: str
    stage: str
    step_idx: int
    layer: int | None
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Trace:
    """The times of one run, in seconds."""

    steps: tuple[StepRecord, ...]
    token_s: tuple[float, ...]
    """When each token was ready."""
    wall_s: float
    n_prompt_tokens: int = 0
    meta: dict[str, Any] = field(default_factory=dict)
    """What ran: model, dtype, cache, backend, device, bytes. Everything needed to repeat the run."""

    @property
    def ttft_s(self) -> float | None:
        """Time to first token; None when no token came."""
        return self.token_s[0] if self.token_s else None

    @property
    def itl_s(self) -> list[float]:
        """Inter-token latencies, one for each token after the first."""
        return [b - a for a, b in zip(self.token_s, self.token_s[1:], strict=False)]

    @property
    def round_s(self) -> list[float]:
        """Times between arrivals after the first token; without a drafter they are the ITLs."""
        return [gap for gap in self.itl_s if gap > 0.0]

    @property
    def paced_s(self) -> list[float]:
        """One value for each token after the first: its round's time, shared by the tokens that came in it. Without a
        drafter they are the ITLs; their sum is the same."""
        paced: list[float] = []
        for gap in self.itl_s:
            if gap > 0.0 or not paced:
                paced.append(gap)
                n = 1
            else:
                n += 1
                paced[-n + 1 :] = [sum(paced[-n + 1 :]) / n] * n
        return paced

    @property
    def n_tokens(self) -> int:
        return len(self.token_s)

    @property
    def phases(self) -> dict[str, float]:
        """Exclusive seconds by phase name, over the whole run, in pipeline order."""
        return self._sum(self.steps)

    def stage_phases(self, stage: str) -> dict[str, float]:
        """Exclusive seconds by phase name within ``"prefill"`` or ``"decode"``."""
        return self._sum(step for step in self.steps if step.stage == stage)

    def stage_s(self, stage: str) -> float:
        """Wall-clock seconds of one stage."""
        return sum(step.end_s - step.start_s for step in self.steps if step.stage == stage)

    @property
    def coverage(self) -> float:
        """Share of the wall clock that lies inside a named phase, 0 to 1."""
        return min(1.0, sum(self.phases.values()) / self.wall_s) if self.wall_s else 0.0

    @property
    def spans(self) -> list[Span]:
        """The timeline. Sampled steps keep every switch with its layer; the others one span for the whole step."""
        out = []
        for idx, step in enumerate(self.steps):
            if step.detail:
                out += [
                    Span(name, step.stage, idx, layer if layer >= 0 else None, start, end)
                    for name, layer, start, end in step.detail
                ]
                continue
            at = step.start_s
            for name in _in_order(step.phases):
                out.append(Span(name, step.stage, idx, None, at, at + step.phases[name]))
                at += step.phases[name]
        return out

    def summary(self) -> dict[str, Any]:
        """The figures a reader asks for first: milliseconds and tokens a second. ``itl_median_ms`` is of ``paced_s``:
        half of a run with a drafter may have come together with the token before."""
        itl, rounds = self.itl_s, self.round_s
        ttft = self.ttft_s
        return {
            "ttft_ms": None if ttft is None else ttft * 1e3,
            "itl_median_ms": median(self.paced_s) * 1e3 if itl else None,
            "round_median_ms": median(rounds) * 1e3 if rounds else None,
            "tokens_per_round": len(itl) / len(rounds) if rounds else None,
            "itl_p95_ms": quantile(itl, 0.95) * 1e3 if itl else None,
            "decode_tok_s": len(itl) / sum(itl) if itl and sum(itl) > 0 else None,
            "prefill_tok_s": self.n_prompt_tokens / ttft if ttft else None,
            "n_prompt_tokens": self.n_prompt_tokens,
            "n_tokens": self.n_tokens,
            "wall_ms": self.wall_s * 1e3,
            "coverage": self.coverage,
        }

    def diagnose(self, *, model: Any = None, machine: Any = None) -> Any:
        """Slow to start or slow to stream, which ceiling binds, by what evidence, and what would move it.

        Print it. See ``labkit.perf.diagnosis.diagnose``, which is looked up only now: this file is a leaf that every
        room imports, and a diagnosis needs the cost model above it."""
        return import_module("labkit.perf.diagnosis").diagnose(self, model=model, machine=machine)

    def to_dataframe(self) -> pd.DataFrame:
        """One row a span: step_idx, stage, phase, layer, start_ms, duration_ms."""
        import pandas as pd

        rows = [(s.step_idx, s.stage, s.name, s.layer, s.start_s * 1e3, s.duration_s * 1e3) for s in self.spans]
        return pd.DataFrame(rows, columns=["step_idx", "stage", "phase", "layer", "start_ms", "duration_ms"])  # type: ignore[arg-type]

    def to_json(self) -> str:
        """The whole trace as JSON; ``Trace.from_json`` reads it back."""
        return json.dumps(
            {
                "format": "labkit-trace-1",
                "wall_s": self.wall_s,
                "n_prompt_tokens": self.n_prompt_tokens,
                "token_s": list(self.token_s),
                "meta": self.meta,
                "steps": [
                    {
                        "stage": s.stage,
                        "start_s": s.start_s,
                        "end_s": s.end_s,
                        "n_tokens": s.n_tokens,
                        "phases": s.phases,
                        "detail": s.detail,
                    }
                    for s in self.steps
                ],
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Trace:
        """Raises ValueError when ``text`` is not a trace that labkit wrote."""
        try:
            data = json.loads(text)
            if data["format"] != "labkit-trace-1":
                raise ValueError(f"unknown trace format {data['format']!r}")
            steps = tuple(
                StepRecord(
                    s["stage"],
                    s["start_s"],
                    s["end_s"],
                    s["n_tokens"],
                    s["phases"],
                    [tuple(d) for d in s["detail"]],
                )
                for s in data["steps"]
            )
            return cls(steps, tuple(data["token_s"]), data["wall_s"], data["n_prompt_tokens"], data["meta"])
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"not a labkit trace: {error!r}") from error

    def to_chrome(self, path: str | Path) -> Path:
        """Write the Trace Event format that chrome://tracing and ui.perfetto.dev open; returns the path."""
        events: list[dict[str, Any]] = [
            {
                "ph": "M",
                "pid": 1,
                "name": "process_name",
                "args": {"name": f"labkit {self.meta.get('model', '')}"},
            },
            {"ph": "M", "pid": 1, "tid": 1, "name": "thread_name", "args": {"name": "steps"}},
            {"ph": "M", "pid": 1, "tid": 2, "name": "thread_name", "args": {"name": "phases"}},
        ]
        for idx, step in enumerate(self.steps):
            events.append(
                _event(
                    f"{step.stage} {idx}",
                    step.stage,
                    1,
                    step.start_s,
                    step.end_s,
                    {"n_tokens": step.n_tokens},
                )
            )
        for s in self.spans:
            args = {"stage": s.stage, "step": s.step_idx} | ({} if s.layer is None else {"layer": s.layer})
            events.append(_event(s.name, s.stage, 2, s.start_s, s.end_s, args))
        path = Path(path)
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": self.meta}))
        return path

    @staticmethod
    def _sum(steps: Any) -> dict[str, float]:
        totals: dict[str, float] = {}
        for step in steps:
            for name, seconds in step.phases.items():
                totals[name] = totals.get(name, 0.0) + seconds
        return {name: totals[name] for name in _in_order(totals)}


def quantile(values: list[float], q: float) -> float:
    """The q-quantile by linear interpolation, as numpy's default.

    >>> quantile([1.0, 2.0, 3.0], 0.5)
    2.0
    """
    ordered = sorted(values)
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def _in_order(names: Any) -> list[str]:
    return sorted(names, key=PHASES.index)


def _event(name: str, category: str, tid: int, start_s: float, end_s: float, args: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "pid": 1,
        "tid": tid,
        "ts": start_s * 1e6,
        "dur": (end_s - start_s) * 1e6,
        "args": args,
    }
