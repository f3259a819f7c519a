"""Packed safetensors that people bring, read without the libraries that made them and kept packed.

    GPTQ                  qweight (K b/32, N) along the inputs, qzeros (G, N b/32), scales (G, N), g_idx (K)
                          checkpoint_format "gptq" stores the zero point less 1, "gptq_v2" as it is
    AWQ, GEMM             qweight (K, N/8), qzeros (G, N/8): nibble i of a word is column 8 j + [0 2 4 6 1 3 5 7][i]
    compressed-tensors    pack-quantized: weight_packed (N, K b/32), weight_scale (N, G), weight_shape,
                          weight_zero_point (N b/32, G) packed along the outputs or (N, G), weight_g_idx (K)
    auto-round            one of the first two, without g_idx; its packing_format says which

Everywhere w = s[g] (q - z[g]). Each becomes ``grid.Groups``, checked before it is believed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from labkit.checkpoint import bitstream
from labkit.checkpoint.names import Named
from labkit.checkpoint.settings import Settings
from labkit.checkpoint.stored_rows import GroupRows
from labkit.quant.grid import Groups

BITS = (2, 3, 4, 8)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
AUTO_ROUND = {
    "auto_round": ("gptq", 0),
    "auto_round:gptqmodel": ("gptq", 0),
    "auto_round:auto_gptq": ("gptq", 1),
    "auto_round:gptq": ("gptq", 1),
    "auto_round:auto_awq": ("awq", 0),
    "auto_round:awq": ("awq", 0),
}
"""auto-round's packing formats: the layout, and what is added to stored zero points."""
Parts = dict[str, Tensor]


@dataclass(frozen=True)
class Layout:
    """What a checkpoint's quantization_config says."""

    method: str
    bits: int
    group_size: int
    """0: a group is a whole row."""
    zero_offset: int = 0
    """What is added to stored zero points."""

    @property
    def main(self) -> str:
        """The part that makes a module a packed one."""
        return "weight_packed" if self.method == "compressed-tensors" else "qweight"


def layout_of(values: Any, name: str) -> Layout:
    """From ``quantization_config``. Raises ValueError that says what is not read and what is."""
    config = Settings(values if isinstance(values, Mapping) else {"quant_method": str(values)})
    method = config.get("quant_method")
    if method in ("gptq", "awq", "auto-round") and config.get("bits") is None:
        raise ValueError(
            f"{name} holds packed weights ({method}), but its quantization_config does not say how many bits."
        )
    if method == "gptq":
        v2 = config.get("checkpoint_format", "gptq") == "gptq_v2"
        return Layout("gptq", _bits(config, "bits", name), _group(config), 0 if v2 else 1)
    if method == "awq":
        version, bits = str(config.get("version", "gemm")).lower(), _bits(config, "bits", name)
        if version != "gemm" or bits != 4:
            raise ValueError(f"{name}: AWQ weights of version {version!r} in {bits} bits; labkit reads GEMM in 4 bits.")
        return Layout("awq", bits, _group(config))
    if method == "auto-round":
        return _auto_round(config, name)
    if method == "compressed-tensors":
        return _compressed(config, name)
    raise ValueError(
        f"{name} holds packed weights ({method}), which this labkit does not read: it reads gptq, awq (GEMM), "
        "compressed-tensors (pack-quantized) and auto-round."
    )


def _compressed(config: Settings, name: str) -> Layout:
    form = config.get("format", "pack-quantized")
    groups = [g for g in config.table("config_groups").values() if isinstance(g, Mapping)]
    if form != "pack-quantized" or len(groups) != 1:
        raise ValueError(
            f"{name}: compressed-tensors in format {form!r} with {len(groups)} config groups; labkit reads "
            "'pack-quantized' with one."
        )
    weights = Settings(groups[0].get("weights") or {})
    kind, strategy = weights.get("type", "int"), weights.get("strategy", "group")
    if kind != "int" or strategy not in ("group", "channel") or groups[0].get("input_activations"):
        raise ValueError(
            f"{name}: compressed-tensors weights of type {kind!r}, strategy {strategy!r}; labkit reads integers by "
            "group or channel, with activations as they are."
        )
    group = 0 if strategy == "channel" else weights.count("group_size")
    return Layout("compressed-tensors", _bits(weights, "num_bits", name), group)


def _auto_round(config: Settings, name: str) -> Layout:
    """Which of the other two layouts auto-round packed in, and whether it took one off its zero points."""
    form, kind = str(config.get("packing_format", "auto_round:auto_gptq")), config.get("data_type", "int")
    own = [v for v in config.table("extra_config").values() if isinstance(v, Mapping) and v.get("bits", 0) < 16]
    mixed = any(v.get(key, config.get(key)) != config.get(key) for v in own for key in ("bits", "group_size"))
    if form not in AUTO_ROUND or kind != "int" or mixed or config.get("act_bits", 16) < 16:
        raise ValueError(
            f"{name}: auto-round weights of type {kind!r}, packed as {form!r}{', layers differing' if mixed else ''}; "
            f"labkit reads integers, all layers alike, activations as they are, packed as {', '.join(AUTO_ROUND)}."
        )
    method, offset = AUTO_ROUND[form]
    bits = _bits(config, "bits", name)
    if method == "awq" and bits != 4:
        raise ValueError(f"{name}: AWQ weights in {bits} bits; labkit reads GEMM in 4 bits.")
    return Layout(method, bits, _group(config), offset)


def _bits(config: Settings, key: str, name: str) -> int:
    bits = config.count(key)
    if bits not in BITS:
        raise ValueError(f"{name}: {bits} bits a weight; labkit reads {', '.join(map(str, BITS))}.")
    return bits


def _group(config: Settings) -> int:
    size = config.get("group_size", 128)
    return 0 if size == -1 else config.count("group_size", 128)


def gathered(layout: Layout, names: list[str], tensors: Iterator[Named], *, keep: bool) -> Iterator[tuple[str, Any]]:
    """The checkpoint's tensors with each packed module's parts as one ``GroupRows`` under ``MODULE.weight``.

    Unpacked when not ``keep``; an expert's matrices, which are stacked later, always. Raises ValueError that names
    the module."""
    modules = {n.removesuffix("." + layout.main) for n in names if n.endswith("." + layout.main)}
    parts_of: dict[str, set[str]] = {module: set() for module in modules}
    for name in names:
        module, _, part = name.rpartition(".")
        if module in modules and part != "bias":
            parts_of[module].add(part)
    waiting: dict[str, Parts] = {}
    for name, tensor in tensors:
        module, _, part = name.rpartition(".")
        if module not in modules or part == "bias":
            yield name, tensor
            continue
        held = waiting.setdefault(module, {})
        held[part] = tensor.clone()
        if set(held) == parts_of[module]:
            rows = read(layout, module, waiting.pop(module))
            yield f"{module}.weight", rows if keep and ".experts." not in module else rows.unpack(torch.float32)


def read(layout: Layout, module: str, parts: Parts) -> GroupRows:
    """One module's parts. Raises ValueError, naming it, when shapes disagree or numbers are out of range."""
    try:
        groups, order = _READERS[layout.method](layout, parts)
    except KeyError as error:
        raise ValueError(f"{module} is packed as {layout.method} but has no {error.args[0]!r}.") from None
    except _Wrong as error:
        raise ValueError(
            f"{module}: {error} The file and its quantization_config belong to different models."
        ) from None
    if not torch.isfinite(groups.scales).all():
        raise ValueError(f"{module}: its scales hold NaN or infinity. The file is damaged.")
    return GroupRows(groups, order)


class _Wrong(Exception):
    """What is wrong with a module's parts; ``read`` adds the module's name."""


def _shaped(parts: Parts, name: str, shape: tuple[int, ...]) -> Tensor:
    tensor = parts[name]
    if tuple(tensor.shape) != shape:
        raise _Wrong(f"{name} is {tuple(tensor.shape)}, should be {shape}.")
    return tensor


def _words(parts: Parts, name: str) -> Tensor:
    tensor = parts[name]
    if tensor.dtype != torch.int32 or tensor.ndim != 2:
        raise _Wrong(f"{name} holds {tensor.dtype} {tuple(tensor.shape)}, should be a matrix of int32.")
    return tensor


def _gptq(layout: Layout, parts: Parts) -> tuple[Groups, Tensor | None]:
    bits, words = layout.bits, _words(parts, "qweight")
    n_in, n_out = words.shape[0] * 32 // bits, words.shape[1]
    size, n_groups = _sizes(layout, n_in)
    codes = bitstream.unpack(words.t().contiguous(), bits, n_in)
    scales = _shaped(parts, "scales", (n_groups, n_out)).t()
    stored = _words(parts, "qzeros")
    _shaped(parts, "qzeros", (n_groups, bitstream.n_words(n_out, bits)))
    zeros = bitstream.unpack(stored.contiguous(), bits, n_out).t() + layout.zero_offset
    codes, order = _in_order(parts.get("g_idx"), codes, size, n_groups)
    return _groups(bits, codes, scales, zeros), order


def _awq(layout: Layout, parts: Parts) -> tuple[Groups, Tensor | None]:
    words = _words(parts, "qweight")
    n_in, n_out = words.shape[0], words.shape[1] * 8
    _, n_groups = _sizes(layout, n_in)
    scales = _shaped(parts, "scales", (n_groups, n_out)).t()
    _shaped(parts, "qzeros", (n_groups, n_out // 8))
    columns = torch.tensor([8 * j + AWQ_ORDER.index(i) for j in range(n_out // 8) for i in range(8)])
    codes, zeros = (bitstream.unpack(_words(parts, n), 4, n_out)[:, columns].t() for n in ("qweight", "qzeros"))
    return _groups(4, codes, scales, zeros), None


def _pack_quantized(layout: Layout, parts: Parts) -> tuple[Groups, Tensor | None]:
    bits, shape = layout.bits, parts["weight_shape"].flatten().tolist()
    if len(shape) != 2 or not all(0 < n < 2**31 for n in shape):
        raise _Wrong(f"weight_shape says {shape}.")
    n_out, n_in = (int(n) for n in shape)
    size, n_groups = _sizes(layout, n_in)
    _words(parts, "weight_packed")
    codes = bitstream.unpack(_shaped(parts, "weight_packed", (n_out, bitstream.n_words(n_in, bits))), bits, n_in)
    scales = _shaped(parts, "weight_scale", (n_out, n_groups))
    zeros = None
    if "weight_zero_point" in parts:
        stored = parts["weight_zero_point"]
        if stored.dtype == torch.int32:
            _shaped(parts, "weight_zero_point", (bitstream.n_words(n_out, bits), n_groups))
            zeros = bitstream.unpack(stored.t().contiguous(), bits, n_out).t()
        else:
            whole = _shaped(parts, "weight_zero_point", (n_out, n_groups)).to(torch.int64) + 2 ** (bits - 1)
            if int(whole.min()) < 0 or int(whole.max()) > 2**bits - 1:
                raise _Wrong(f"a zero point is out of the range of {bits} bits.")
            zeros = whole.to(torch.uint8)
    codes, order = _in_order(parts.get("weight_g_idx"), codes, size, n_groups)
    return _groups(bits, codes, scales, zeros), order


_READERS: dict[str, Callable[[Layout, Parts], tuple[Groups, Tensor | None]]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _pack_quantized,
}


def _sizes(layout: Layout, n_in: int) -> tuple[int, int]:
    """Group size and number of groups of a row."""
    size = layout.group_size or n_in
    if n_in == 0 or n_in % size:
        raise _Wrong(f"groups of {size} do not divide its {n_in} inputs.")
    return size, n_in // size


def _in_order(g_idx: Tensor | None, codes: Tensor, size: int, n_groups: int) -> tuple[Tensor, Tensor | None]:
    """Columns sorted by their group, and the input that each belongs to; None when they are in order already."""
    if g_idx is None or int(g_idx.min()) == -1:
        return codes, None
    n_in = codes.shape[1]
    if g_idx.numel() != n_in or int(g_idx.min()) < 0 or int(g_idx.max()) >= n_groups:
        raise _Wrong(
            f"g_idx has {g_idx.numel()} entries from {int(g_idx.min())} to {int(g_idx.max())}; its {n_in} inputs have "
            f"groups 0 to {n_groups - 1}."
        )
    if torch.equal(g_idx.long(), torch.arange(n_in) // size):
        return codes, None
    if not bool((torch.bincount(g_idx.long(), minlength=n_groups) == size).all()):
        raise _Wrong(f"g_idx does not give each group its {size} inputs.")
    order = torch.argsort(g_idx.long(), stable=True)
    return codes[:, order], order.to(torch.int32)


def _groups(bits: int, codes: Tensor, scales: Tensor, zeros: Tensor | None) -> Groups:
    """Zero points all in the middle are not kept, and scales are float16 where that loses nothing."""
    if zeros is not None and bool((zeros == 2 ** (bits - 1)).all()):
        zeros = None
    half = scales.to(torch.float16)
    scales = half if torch.equal(half.float(), scales.float()) else scales.float()
    return Groups(bits, codes.contiguous(), scales.contiguous(), None if zeros is None else zeros.contiguous())
