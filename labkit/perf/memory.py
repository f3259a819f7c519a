"""Does it fit, and for how many? Bytes of a model and its caches before either is loaded.

needed = weights + caches + one step's activations      weights and caches exactly, activations estimated
users  = floor((memory - weights) / cache of one sequence)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from labkit import registry
from labkit.model.config import ModelConfig, MoEFFN
from labkit.perf import formats
from labkit.perf.weights import weights_of
from labkit.quant import WeightFormat, format_of

RESERVE_SHARE = 0.05
"""Part of the free memory that a forecast leaves alone: allocators round up, and other programs breathe."""
PREFILL_CHUNK_TOKENS = 1024


@dataclass(frozen=True)
class Setting:
    """How a model is held in memory. Names and configs as ``load`` and ``Pipeline`` take them."""

    dtype: str = "fp32"
    weights: Any = None
    kv_cache: Any = "contiguous"
    n_tokens: int = 2048
    n_sequences: int = 1

    def describe(self) -> str:
        held = self.dtype if self.weights is None else f"weights={_name(self.weights)!r}, computed in {self.dtype}"
        return f"{held}, kv_cache={_name(self.kv_cache)!r}, {self.n_sequences} x {self.n_tokens} tokens"


@dataclass(frozen=True)
class Memory:
    """Bytes by what they are for."""

    weights_bytes: int
    kv_cache_bytes: int
    activation_bytes: int
    """Estimated: what one step holds at its widest point."""

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_cache_bytes + self.activation_bytes


@dataclass(frozen=True)
class Fit:
    """The verdict of ``fits``; true in a condition when the model fits."""

    ok: bool
    needed: Memory
    free_bytes: int
    message: str
    remedy: Setting | None = None
    """The mildest switch that makes it fit; None when it fits already, or nothing helps."""

    def __bool__(self) -> bool:
        return self.ok

    def require(self) -> None:
        """Raise MemoryError with the message unless the model fits."""
        if not self.ok:
            raise MemoryError(self.message)


def weights_nbytes(config: ModelConfig, *, dtype: str = "fp32", weights: Any = None) -> int:
    """Bytes of the weights in memory: equals ``Model.nbytes``."""
    tied = config.tied_embeddings
    return sum(formats.weight_nbytes(w, dtype=dtype, weights=weights, tied=tied) for w in weights_of(config))


def memory_of(config: ModelConfig, setting: Setting) -> Memory:
    """What the setting takes."""
    return Memory(
        weights_nbytes(config, dtype=setting.dtype, weights=setting.weights),
        formats.cache_nbytes(
            config,
            n_tokens=setting.n_tokens,
            n_sequences=setting.n_sequences,
            dtype=setting.dtype,
            kv_cache=setting.kv_cache,
        ),
        _activation_nbytes(config, setting),
    )


def users(config: ModelConfig, *, memory_bytes: float, n_tokens: int, **held: Any) -> int:
    """How many sequences of ``n_tokens`` fit beside the weights; 0 when the weights alone do not.

    ``held``: dtype, weights, kv_cache. A cache that keeps nothing serves any number: raises ValueError.

    >>> from labkit.model.config import *
    >>> small = ModelConfig("llama", 49152, 576, 8192, uniform(30, GroupedAttention(9, 3, 64), DenseFFN(1536)))
    >>> users(small, memory_bytes=2e9, n_tokens=8192, dtype="fp16")
    9
    """
    setting = Setting(n_tokens=n_tokens, **held)
    one = memory_of(config, setting)
    if not one.kv_cache_bytes:
        raise ValueError(f"kv_cache {_name(setting.kv_cache)!r} takes no memory: any number of users fits, slowly.")
    return max(0, int((memory_bytes - one.weights_bytes) // one.kv_cache_bytes))


def fits(config: ModelConfig, *, free_bytes: int | None = None, device: str = "cpu", **held: Any) -> Fit:
    """Whether a model with this config fits, asked before anything is loaded. ``held``: a ``Setting``'s fields.

    ``free_bytes`` None asks the device. The verdict names the mildest switch that would make it fit: fewer bits a
    weight first (nothing else moves gigabytes at batch 1), then a shorter context.

    >>> from labkit.model.config import *
    >>> big = ModelConfig("llama", 32000, 4096, 4096, uniform(32, GroupedAttention(32, 32, 128), DenseFFN(11008)))
    >>> fits(big, free_bytes=20_000_000_000, dtype="fp32").remedy.dtype
    'bf16'
    """
    if free_bytes is None:
        from labkit.perf.device import free_bytes as measure_free

        free_bytes = measure_free(device)
    setting = Setting(**held)
    setting = replace(setting, n_tokens=min(setting.n_tokens, config.context_tokens))
    usable = free_bytes * (1 - RESERVE_SHARE)
    needed = memory_of(config, setting)
    if needed.total_bytes <= usable:
        return Fit(True, needed, free_bytes, f"fits: {_size(needed.total_bytes)} of {_size(free_bytes)} free.")
    remedy = next((s for s in _milder(config, setting) if memory_of(config, s).total_bytes <= usable), None)
    message = (
        f"the model needs {_size(needed.total_bytes)} ({_size(needed.weights_bytes)} of weights, "
        f"{_size(needed.kv_cache_bytes)} of cache) with {setting.describe()}; {_size(free_bytes)} are free. "
    )
    if remedy is None:
        message += "No switch makes it fit here: choose a smaller model, or free memory."
    else:
        message += f"It fits with {_difference(setting, remedy)} ({_size(memory_of(config, remedy).total_bytes)})."
    return Fit(False, needed, free_bytes, message, remedy)


def _milder(config: ModelConfig, setting: Setting) -> list[Setting]:
    """Settings that take less, the least intrusive first."""
    held = [setting]
    if setting.weights is None:
        held += [replace(setting, dtype="bf16")] if setting.dtype == "fp32" else []
        packed = [info.name for info in registry.components("weights") if _can_shrink(info)]
        held += sorted(
            (replace(setting, weights=name) for name in packed),
            key=lambda s: -weights_nbytes(config, dtype=s.dtype, weights=s.weights),
        )
    shorter = [n for n in (setting.n_tokens // 4, setting.n_tokens // 16) if n >= 64]
    one_user = [replace(s, n_sequences=1) for s in held] if setting.n_sequences > 1 else []
    return [*held[1:], *one_user, *(replace(s, n_tokens=n, n_sequences=1) for n in shorter for s in held)]


def _can_shrink(info: registry.ComponentInfo) -> bool:
    """A format that the reader can switch on at once, whatever the file."""
    config = format_of(info.name) if info.unavailable is None else None
    return isinstance(config, WeightFormat) and not config.from_file and not config.calibrates


def _difference(before: Setting, after: Setting) -> str:
    """The switches that changed, as a caller would write them."""
    changed = [name for name in ("dtype", "weights", "kv_cache") if getattr(before, name) != getattr(after, name)]
    words = [f"{name}={_name(getattr(after, name))!r}" for name in changed]
    if after.n_tokens != before.n_tokens:
        words.append(f"a context of {after.n_tokens} tokens")
    if after.n_sequences != before.n_sequences:
        words.append(f"{after.n_sequences} sequence")
    return ", ".join(words)


def _activation_nbytes(config: ModelConfig, setting: Setting) -> int:
    """The widest layer's live tensors for one chunk, and the logits in the model's dtype and in float32."""
    rows = min(setting.n_tokens, PREFILL_CHUNK_TOKENS) * 1
    widest = 0
    for layer in set(config.layers):
        ffn, attention = layer.ffn, layer.attention
        active = ffn.n_active * ffn.d_ff + ffn.d_ff_shared if isinstance(ffn, MoEFFN) else ffn.d_ff
        heads = (attention.n_heads + 2 * getattr(attention, "n_kv_heads", 1)) * attention.d_head
        widest = max(widest, 3 * active, 3 * heads)
    itemsize = formats.dtype_nbytes(setting.dtype)
    logits = setting.n_sequences * config.vocab_size * (itemsize + 4)
    return rows * (4 * config.d_model + widest) * itemsize + logits


def _name(choice: Any) -> Any:
    return choice if isinstance(choice, str) or choice is None else type(choice).__name__


def _size(n_bytes: float) -> str:
    return f"{n_bytes / 1e9:.2f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.0f} MB"
