"""What a machine can do at most, as data: measured here, or read from a data sheet.

A roofline has two ceilings. ``read`` is the slope (bytes a second that can be streamed from memory), ``matmul``
the flat part (FLOPs a second of a large product, by dtype); where they meet is the ridge. Both carry their
spread, because a busy machine moves its ceilings and a forecast has to say so.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from statistics import median
from typing import Any

from labkit.resources import data_path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

BUSY_SHARE = 0.15
"""Others using more than this share of the cores while we measured: the machine was busy."""
WIDE_SPREAD = 0.25
"""(high - low) / value above which a measured rate is not to be trusted to better than that."""


@dataclass(frozen=True)
class Rate:
    """A rate (per second) or a time (s), measured several times, with its fast and its slow side."""

    value: float
    low: float
    high: float
    n: int = 1

    @classmethod
    def of(cls, samples: Sequence[float]) -> Rate:
        """The median, the 10th and the 90th percentile.

        >>> Rate.of([1.0, 2.0, 3.0]).value
        2.0
        """
        from labkit.perf.trace import quantile

        values = list(samples)
        return cls(median(values), quantile(values, 0.1), quantile(values, 0.9), len(values))

    @classmethod
    def ceiling(cls, samples: Sequence[float]) -> Rate:
        """The best sample, because a disturbance can only lower a ceiling; the 10th percentile is its unsteady side.

        >>> Rate.ceiling([8.0, 10.0, 9.0]).value
        10.0
        """
        from labkit.perf.trace import quantile

        values = list(samples)
        return cls(max(values), quantile(values, 0.1), max(values), len(values))

    @classmethod
    def exactly(cls, value: float) -> Rate:
        """One without a spread, from a data sheet."""
        return cls(value, value, value)

    @property
    def spread(self) -> float:
        """(high - low) / value; 0 for a data sheet's."""
        return (self.high - self.low) / self.value if self.value else 0.0


@dataclass(frozen=True)
class Machine:
    """One device's ceilings. Rates in bytes/s and FLOP/s (2 a multiply-add), sizes in bytes."""

    name: str
    device: str
    """"cpu" or "cuda"."""
    n_threads: int
    memory_bytes: int
    read: Rate
    """Streaming read from memory, all threads."""
    copy: Rate
    """Streaming copy, bytes read plus bytes written, all threads."""
    matmul: dict[str, Rate]
    """By dtype: fp32, bf16, fp16, int8 (operations a second)."""
    dispatch_s: Rate
    """What the smallest PyTorch operation costs: the price of each op of an eager step."""
    read_one_thread: Rate | None = None
    copy_one_thread: Rate | None = None
    caches: dict[str, int] = field(default_factory=dict)
    """Bytes by level: L1d, L2, L3 (on a GPU: L2)."""
    read_level: str = "memory"
    """What ``read`` was measured on: "memory", or a sentence when a cache may have held the buffer."""
    measured_at: str = ""
    """ISO date and time of the measurement; empty for a data sheet."""
    busy_share: float = 0.0
    """Share of the cores that other processes used meanwhile, 0 to 1."""
    torch_version: str = ""
    source: str = "measured"
    """"measured", or the data sheet that the figures are from."""

    @property
    def measured(self) -> bool:
        return self.source == "measured"

    def peak_flops(self, dtype: str) -> float:
        """FLOP/s of a large product in ``dtype``. Raises ValueError that lists the dtypes it knows."""
        if dtype not in self.matmul:
            raise ValueError(f"{self.name} has no matmul rate for {dtype!r}: it has {', '.join(self.matmul)}.")
        return self.matmul[dtype].value

    def ridge(self, dtype: str) -> float:
        """FLOPs a byte at which the two ceilings meet: below it memory binds, above it arithmetic."""
        return self.peak_flops(dtype) / self.read.value

    def attainable_flops(self, intensity: float, dtype: str) -> float:
        """The roofline: min(peak, bandwidth * FLOPs a byte), in FLOP/s (Williams, Waterman, Patterson, 2009)."""
        return min(self.peak_flops(dtype), self.read.value * intensity)

    @property
    def spread(self) -> float:
        """The widest spread of the two ceilings that a forecast leans on."""
        return max([self.read.spread, *(rate.spread for name, rate in self.matmul.items() if name != "int8")])

    @property
    def busy(self) -> bool:
        """Whether something else was using the machine while its ceilings were measured."""
        return self.busy_share > BUSY_SHARE or self.spread > WIDE_SPREAD

    def describe(self, say: Callable[..., str] = str.format) -> str:
        """One sentence for a notebook's header. ``say`` fills figures into a sentence, perhaps in another language."""
        read, top = self.read.value / 1e9, max(self.matmul, key=lambda name: self.matmul[name].value)
        when = say("measured {date}", date=self.measured_at[:10])
        if not self.measured:
            when = say("from {source}", source=self.source)
        said = [
            say(
                "{name}, {n} threads: reads {read:.1f} GB/s, multiplies {top:.0f} GFLOP/s in {dtype} ({when}).",
                name=self.name,
                n=self.n_threads,
                read=read,
                top=self.matmul[top].value / 1e9,
                dtype=top,
                when=when,
            )
        ]
        if self.read_level != "memory":
            said.append(say("Its bandwidth is that of {level}: decoding may pass it.", level=self.read_level))
        if self.busy:
            busy = (
                "The machine was busy (others used {share:.0%} of the cores, spread {spread:.0%}): forecasts are "
                "wider; measure again when it is quiet."
            )
            said.append(say(busy, share=self.busy_share, spread=self.spread))
        return " ".join(said)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Machine:
        """Raises ValueError when ``text`` is not a machine that labkit wrote."""
        try:
            data: dict[str, Any] = json.loads(text)
            for name in ("read", "copy", "dispatch_s", "read_one_thread", "copy_one_thread"):
                data[name] = None if data[name] is None else Rate(**data[name])
            data["matmul"] = {name: Rate(**rate) for name, rate in data["matmul"].items()}
            return cls(**data)
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"not a measured machine: {error!r}") from error


@cache
def sheets() -> dict[str, Machine]:
    """Machines by name, from the data sheets in ``data/hardware.toml``: for "what if I had an H200".

    >>> round(sheets()["H200"].ridge("bf16"))
    206
    """
    table = tomllib.loads(data_path("hardware.toml").read_text(encoding="utf-8"))
    return {entry["name"]: _from_sheet(entry) for entry in table["machine"]}


def sheet(name: str) -> Machine:
    """The data sheet called ``name``. Raises ValueError that lists the names."""
    known = sheets()
    if name not in known:
        raise ValueError(f"no data sheet for {name!r}: choose one of {', '.join(known)}.")
    return known[name]


def _from_sheet(entry: dict[str, Any]) -> Machine:
    bandwidth = Rate.exactly(entry["bandwidth_gb_s"] * 1e9)
    return Machine(
        name=entry["name"],
        device=entry["device"],
        n_threads=entry.get("cores", 0),
        memory_bytes=int(entry.get("memory_gb", 0) * 1e9),
        read=bandwidth,
        copy=bandwidth,
        matmul={name: Rate.exactly(tera * 1e12) for name, tera in entry["tflops"].items()},
        dispatch_s=Rate.exactly(entry["dispatch_us"] * 1e-6),
        source=entry["source"],
    )
