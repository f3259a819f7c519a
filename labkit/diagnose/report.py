"""The result of a diagnosis: findings, figures, tables; printed, as JSON, as one HTML page."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from labkit.diagnose import conventions
from labkit.diagnose.measured import Measured
from labkit.diagnose.recording import Recording
from labkit.diagnose.stream import Stream
from labkit.diagnose.verdict import Targets
from labkit.diagnose.waterfall import Waterfall, waterfall
from labkit.perf.trace import quantile
from labkit.perf.verdict import Finding

FORMAT = "labkit-diagnosis-1"


@dataclass(frozen=True)
class Report:
    """``print(report)``, ``report.to_json()``, ``report.to_html()``, ``report.save("report.html")``."""

    where: str
    who: str
    findings: tuple[Finding, ...]
    measured: Measured
    targets: Targets
    streams: tuple[Stream, ...]
    notes: tuple[str, ...] = ()
    load: str = ""
    server_means: dict[str, float] = field(default_factory=dict)
    """What the server's own metrics say of the time between, in seconds."""

    @property
    def verdict(self) -> Finding:
        return self.findings[0]

    @property
    def recordings(self) -> list[Recording]:
        return [stream.recording for stream in self.streams]

    @property
    def source(self) -> str:
        """measured, simulated or recorded."""
        return self.streams[0].recording.source if self.streams else "measured"

    @property
    def longest(self) -> Stream | None:
        """The stream with the most tokens: the one to look at."""
        return max((s for s in self.streams if s.tokens), key=lambda s: len(s.tokens), default=None)

    def figures(self) -> list[dict[str, Any]]:
        """What the verdict stands on, as rows."""
        seen = self.measured
        line, pace = seen.prefill, seen.decode
        rows: list[tuple[str, float | None, str]] = [
            ("prompt", seen.n_prompt, "tokens"),
            ("TTFT, fresh prompt, alone", _ms(seen.ttft_s), "ms"),
            ("of it growing with the prompt", _ms(seen.prefill_s) if line else None, "ms"),
            ("prefill", 1 / line.slope if line and line.slope > 0 and seen.prefill_s else None, "tokens/s"),
            ("TPOT, alone", _ms(seen.tpot_s), "ms"),
            ("TPOT for 1,000 tokens of context", _ms(1000 * pace.slope) if pace and pace.reach else None, "ms"),
            ("TTFT of the first request", _ms(seen.first_s), "ms"),
            ("TTFT of a prompt sent again", _ms(seen.repeat_s[1]) if seen.repeat_s else None, "ms"),
            ("the reader's own share of the time", _percent(seen.client_share), "%"),
            ("events held back", _percent(seen.held_share) if seen.n_events else None, "%"),
        ]
        for load in seen.loads:
            rows.append((f"TTFT, {load.n} at once", _ms(load.ttft_s), "ms"))
            rows.append((f"TPOT, {load.n} at once", _ms(load.tpot_s), "ms"))
        names = {
            "queue_s": "queue",
            "prefill_s": "prefill",
            "decode_s": "a token",
            "ttft_s": "TTFT",
            "itl_s": "ITL",
            "prompt_token_s": "time for a prompt token",
        }
        for what, told in (("its timings", seen.server), ("its metrics", self.server_means)):
            rows += [(f"the server's own {names[k]} ({what})", _ms(v), "ms") for k, v in told.items() if k in names]
        return [{"what": what, "figure": value, "unit": unit} for what, value, unit in rows if value is not None]

    def percentiles(self) -> list[dict[str, Any]]:
        """TTFT and ITL by probe: median, 95th and 99th percentile, milliseconds."""
        found = []
        timed = [s for s in self.streams if s.tokens and s.recording.timed]
        for name in dict.fromkeys(_label(s) for s in timed):
            group = [s for s in timed if _label(s) == name]
            row: dict[str, Any] = {"probe": name, "requests": len(group)}
            itl = [gap for s in group for gap in s.itl_s]
            for words, values in (("TTFT", [s.ttft_s or 0.0 for s in group]), ("ITL", itl)):
                for q in (0.5, 0.95, 0.99):
                    row[f"{words} p{q * 100:.0f} ms"] = quantile(values, q) * 1e3 if values else None
            found.append(row)
        return found

    def conventions(self) -> list[dict[str, Any]]:
        """Every tool's TTFT and ITL of the longest stream; empty when it has no times."""
        longest = self.longest
        return conventions.rows(longest) if longest and longest.recording.timed else []

    def waterfall(self) -> Waterfall | None:
        """Of the longest stream that the server gave times for, else of the longest."""
        timed = [s for s in self.streams if s.tokens and s.recording.timed]
        told = [s for s in timed if "prompt_ms" in s.timings]
        longest = max(told or timed, key=lambda s: len(s.tokens), default=None)
        return waterfall(longest) if longest else None

    def __str__(self) -> str:
        head = f"{self.where}" + (f" ({self.who})" if self.who else "")
        label = "" if self.source == "measured" else f" [{self.source}]"
        lines = [f"{head}{label}", ""]
        lines += [part for finding in self.findings for part in (str(finding), "")]
        if (fall := self.waterfall()) is not None:
            lines.append(fall.sentence)
        if (longest := self.longest) is not None and longest.recording.timed:
            lines.append(conventions.spread(longest))
        return "\n".join([*lines, *self.notes]).rstrip()

    def to_dict(self) -> dict[str, Any]:
        fall = self.waterfall()
        return {
            "format": FORMAT,
            "where": self.where,
            "server": self.who,
            "source": self.source,
            "verdict": self.verdict.to_dict(),
            "findings": [finding.to_dict() for finding in self.findings],
            "targets": asdict(self.targets),
            "workload": asdict(self.measured.workload),
            "figures": self.figures(),
            "percentiles": self.percentiles(),
            "conventions": self.conventions(),
            "waterfall": fall.rows() if fall else [],
            "notes": list(self.notes),
            "load": self.load,
            "recordings": [recording.to_dict() for recording in self.recordings],
        }

    def to_json(self) -> str:
        """Everything, the recordings too: ``labkit.diagnose.replay`` takes it back."""
        return json.dumps(self.to_dict(), indent=1)

    def to_html(self) -> str:
        """One page that needs nothing else: no script, no font, no picture from elsewhere."""
        from labkit.diagnose.page import page

        return page(self)

    def save(self, path: str | Path) -> Path:
        """HTML for a name that ends with .html, else JSON."""
        path = Path(path)
        path.write_text(self.to_html() if path.suffix in (".html", ".htm") else self.to_json(), encoding="utf-8")
        return path


def _label(stream: Stream) -> str:
    meta = stream.recording.meta
    name = str(meta.get("probe", "recording"))
    if name == "load":
        return f"{meta.get('concurrency')} at once"
    return f"{name}, {meta['n_words']:,} words" if name == "length" and "n_words" in meta else name


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _percent(share: float | None) -> float | None:
    return None if share is None else share * 100
