"""Tiers: which of a processor's instructions the integer products use, chosen by what it has and never by a clock.

    x86-64    amx > avx512vnni > avxvnni > avx2 > plain
    aarch64   i8mm > dotprod > plain

Every tier gives the same numbers: its sums of integers are exact, and the floats around them are the same operations.
The best that the processor has serves, but for AMX, which waits to be named; LABKIT_CPU names another one. Every
release is run on processors with those of ``CHECKED``; the others were run in emulators (docs/decisions.md, 90), which
say that they are right and not how fast they are. Such a tier is tried first, once on a machine, in a process of its
own (``tier_check``): an instruction that the system withholds ends that process and no other, and a wrong number is
found. The next tier then serves, and ``labkit doctor`` says why.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

from labkit.kernels.cpu import arm_features, tile_permission
from labkit.resources import cache_folder

VARIABLE = "LABKIT_CPU"
CHECK_S = 60
"""How long a check may take: it takes a third of a second."""


@dataclass(frozen=True)
class Tier:
    """A set of instructions. ``lanes``: int32 sums in a vector."""

    name: str
    uses: str
    needs: frozenset[str] = frozenset()
    """LLVM's names of the features without which it is not used."""
    lanes: int = 8
    has_halves: bool = False
    """Whether float16 becomes float32 in one instruction."""
    has_tiles: bool = False
    """Whether 16 tokens of bytes meet 16 rows in one instruction (``amx_tile``), once the system permits it."""


PLAIN = Tier("plain", "plain vectors")
_AVX2 = frozenset(("avx2", "fma", "f16c"))
_VNNI512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni"}
TIERS: dict[str, tuple[Tier, ...]] = {
    "x86_64": (
        Tier(
            "amx",
            "tdpbsud for 16 tokens of bytes, else as avx512vnni",
            _VNNI512 | {"amx-tile", "amx-int8"},
            lanes=16,
            has_halves=True,
            has_tiles=True,
        ),
        Tier("avx512vnni", "vpdpbusd and vpdpwssd, 512 bits", _VNNI512, lanes=16, has_halves=True),
        Tier("avxvnni", "vpdpbusd and vpdpwssd, 256 bits", _AVX2 | {"avxvnni"}, has_halves=True),
        Tier("avx2", "vpmaddubsw and vpmaddwd, 256 bits", _AVX2, has_halves=True),
        PLAIN,
    ),
    "aarch64": (
        Tier("i8mm", "usdot, 128 bits", frozenset(("neon", "dotprod", "i8mm")), has_halves=True),
        Tier("dotprod", "sdot, 128 bits", frozenset(("neon", "dotprod")), has_halves=True),
        PLAIN,
    ),
}
"""By architecture, the best first."""
CHECKED = ("avx2", "plain")
"""Run on a processor, by the tests of every release; these need no check. Whoever has a processor for another runs the
tests and ``benchmarks/steps.py`` with it and without (LABKIT_CPU), and adds it here."""
WAITING = ("amx",)
"""Used only when LABKIT_CPU names it: the emulator that ran it had to be corrected first."""
ARCHITECTURES = {"amd64": "x86_64", "x86_64": "x86_64", "arm64": "aarch64", "aarch64": "aarch64"}


def architecture() -> str:
    return ARCHITECTURES.get(platform.machine().lower(), "")


def features() -> frozenset[str]:
    """What code may be compiled for here, by LLVM's names: the processor's features, but where numba's own variables
    say otherwise, since LLVM ends a process that asks it for more."""
    import llvmlite.binding as llvm

    asked, name = os.environ.get("NUMBA_CPU_FEATURES"), os.environ.get("NUMBA_CPU_NAME", "")
    if asked is None and name.lower() == "generic":
        asked = ""
    if asked is not None:
        return frozenset(part.strip()[1:] for part in asked.split(",") if part.strip().startswith("+"))
    found = set()
    with suppress(RuntimeError):  # LLVM does not know them on every system
        found = {feature for feature, has in llvm.get_host_cpu_features().items() if has}
    if architecture() == "aarch64":
        found |= arm_features.found() | {"neon"}
    if os.environ.get("NUMBA_ENABLE_AVX") == "0":
        found = {feature for feature in found if not feature.startswith("avx")}
    return frozenset(found)


def spelled(names: frozenset[str]) -> str:
    """Features as LLVM and numba take them."""
    return ",".join(f"+{name}" for name in sorted(names))


def for_numba() -> dict[str, str]:
    """Variables under which numba compiles, in a process of its own, for all of ``features``: of LLVM's list alone it
    knows no dot products on an Arm processor."""
    if architecture() != "aarch64" or "NUMBA_CPU_FEATURES" in os.environ:
        return {}
    return {"NUMBA_CPU_FEATURES": spelled(features())}


def available() -> tuple[Tier, ...]:
    """The tiers that this processor has, the best first."""
    has, every = features(), TIERS.get(architecture(), (PLAIN,))
    return tuple(tier for tier in every if tier.needs <= has and (not tier.has_tiles or tile_permission.granted()))


def find(name: str) -> Tier:
    """A tier of any architecture. Raises KeyError."""
    return {tier.name: tier for tiers in TIERS.values() for tier in tiers}[name]


def allowed() -> tuple[Tier, ...]:
    """``available``, from the one that LABKIT_CPU names on; without it, all but those of ``WAITING``. Raises ValueError
    when it names none of them."""
    asked, here = os.environ.get(VARIABLE, "").strip().lower(), available()
    if not asked:
        return tuple(tier for tier in here if tier.name not in WAITING)
    names = [tier.name for tier in here]
    if asked in names:
        return here[names.index(asked) :]
    known = {tier.name for tiers in TIERS.values() for tier in tiers}
    why = "this processor lacks it" if asked in known else "there is no such tier"
    raise ValueError(f"{VARIABLE}={asked}: {why}. It has {', '.join(names)}; unset {VARIABLE} for the best.")


@dataclass(frozen=True)
class Choice:
    """The tier in use, and why each better one is not: (name, reason)."""

    tier: Tier
    refused: tuple[tuple[str, str], ...] = ()


@lru_cache(maxsize=1)
def choice() -> Choice:
    """The process's tier: the first that is allowed and right. Raises ValueError as ``allowed`` does."""
    refused = []
    for tier in allowed():
        if tier.name in CHECKED or not (reason := _refused.get(tier.name) or verdict(tier)):
            return Choice(tier, tuple(refused))
        refused.append((tier.name, reason))
    return Choice(PLAIN, tuple(refused))


_refused: dict[str, str] = {}
"""What was found out in this process, after the check."""


def refuse(tier: Tier, reason: str, *, keep: bool) -> None:
    """Do without a tier from here on: the next one is in use. ``keep``: in the processes to come too."""
    _refused[tier.name] = reason
    choice.cache_clear()
    if keep:
        _keep_verdict(tier, reason)


def in_use() -> Tier:
    return choice().tier


def verdict(tier: Tier) -> str:
    """Why a tier that the processor claims to have is not used; "" when it passed its check, now or earlier."""
    known = _verdicts().get(tier.name)
    if isinstance(known, str):
        return known
    try:
        reason = check(tier)
    except (OSError, subprocess.SubprocessError) as error:  # nothing was found out, so nothing is kept
        return f"its check could not be run ({type(error).__name__})"
    _keep_verdict(tier, reason)
    return reason


def _verdicts() -> dict[str, str]:
    with suppress(OSError, ValueError):
        return dict(json.loads(_kept().read_text()))
    return {}


def _keep_verdict(tier: Tier, reason: str) -> None:
    path, known = _kept(), _verdicts()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(known | {tier.name: reason}))
        os.replace(unfinished, path)


def check(tier: Tier) -> str:
    """Try a tier in a process of its own: "" when its products are right, else what happened."""
    command = [sys.executable, "-m", "labkit.kernels.cpu.tier_check", tier.name]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[3], stdin=subprocess.DEVNULL, capture_output=True, timeout=CHECK_S
    )
    if done.returncode == 0:
        return ""
    said = done.stderr.decode(errors="replace").strip().splitlines()
    what = next((line for line in said if "ERROR" in line), said[-1] if said else "")
    return f"its check ended with {done.returncode}" + (f": {what}" if what else "")


_CHECKED_BY = ("integer_dots.py", "amx_tile.py", "tier_check.py")


def _kept() -> Path:
    """Where verdicts are kept: for these features, this compiler and these sources."""
    sources = b"".join((Path(__file__).parent / name).read_bytes() for name in _CHECKED_BY)
    parts = [sorted(features()), version("llvmlite"), hashlib.sha256(sources).hexdigest()]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
    return cache_folder() / "compiled" / f"tiers-{key}.json"
