"""GPTQ, AWQ and compressed-tensors files: packed here by Python's integers, and by the last one's own library."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from small_files import write_folder

import labkit
from labkit.checkpoint import bitstream, packed, save_packed
from labkit.perf.memory import weights_nbytes
from labkit.quant import Grid, GroupLinear, Int4Linear, Packed

IDS = [5, 77, 300, 12, 9]
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


def stream(values: list[int], bits: int) -> list[int]:
    """Values as one long integer, cut into words of 32 bits with a sign."""
    whole = sum(v << (i * bits) for i, v in enumerate(values))
    words = [(whole >> (32 * j)) & 0xFFFFFFFF for j in range(-(-len(values) * bits // 32))]
    return [w - 2**32 if w >= 2**31 else w for w in words]


def streams(rows, bits: int) -> torch.Tensor:
    return torch.tensor([stream(row, bits) for row in rows], dtype=torch.int32)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_bit_streams(bits):
    rng = random.Random(bits)
    rows = [[rng.randrange(2**bits) for _ in range(77)] for _ in range(3)]
    words = streams(rows, bits)
    values = torch.tensor(rows, dtype=torch.uint8)
    assert torch.equal(bitstream.pack(values, bits), words)
    assert torch.equal(bitstream.unpack(words, bits, 77), values)


def parts(weight, method: str, bits: int, group: int, *, v2: bool = False, g_idx=None):
    """A matrix rounded to a grid and packed as ``method`` would; and what it stands for, (N, K)."""
    columns = torch.arange(weight.shape[1]) if g_idx is None else torch.argsort(g_idx, stable=True)
    found = Grid(bits).nearest(weight[:, columns], group)
    dense = torch.empty_like(weight)
    dense[:, columns] = found.dequantize()
    codes = torch.empty_like(found.codes)
    codes[:, columns] = found.codes
    zeros = found.zeros.clamp_min(1) if method == "gptq" and not v2 else found.zeros
    if not torch.equal(zeros, found.zeros):  # v1 cannot say zero
        dense[:, columns] = (found.codes.float().unflatten(1, (-1, group)) - zeros[..., None]).flatten(1) * (
            found.scales.float().repeat_interleave(group, 1)
        )
    if method == "gptq":
        held = {
            "qweight": streams(codes.t().t().tolist(), bits).t(),
            "qzeros": streams((zeros.int() - (0 if v2 else 1)).t().tolist(), bits),
            "scales": found.scales.t(),
            "g_idx": (torch.arange(weight.shape[1]) // group if g_idx is None else g_idx).int(),
        }
    elif method == "awq":

        def words(matrix):  # (rows, N): nibble i of word j is column 8 j + AWQ_COLUMNS[i]
            rows = [[row[8 * j + c] for j in range(len(row) // 8) for c in AWQ_COLUMNS] for row in matrix.tolist()]
            return streams(rows, 4)

        held = {"qweight": words(codes.t()), "qzeros": words(zeros.t()), "scales": found.scales.t()}
    else:
        held = {
            "weight_packed": streams(codes.tolist(), bits),
            "weight_scale": found.scales,
            "weight_shape": torch.tensor(weight.shape),
            "weight_zero_point": streams(zeros.t().tolist(), bits).t(),
        }
    return {name: t.contiguous() for name, t in held.items()}, dense


def gptq_config(bits: int = 4, group: int = 32, **more) -> dict:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, **more}


def compressed_config(bits: int = 4) -> dict:
    weights = {"num_bits": bits, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


CASES = {
    "gptq v1": (gptq_config(), {}),
    "gptq v2": (gptq_config(checkpoint_format="gptq_v2"), {"v2": True}),
    "gptq 3 bits": (gptq_config(3), {}),
    "gptq 8 bits": (gptq_config(8, 64), {}),
    "gptq act-order": (gptq_config(desc_act=True), {"shuffled": True}),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}, {}),
    "compressed-tensors": (compressed_config(), {}),
    "auto-round": ({"quant_method": "auto-round", "bits": 4, "group_size": 32, "data_type": "int", "sym": True,
                    "packing_format": "auto_round:auto_gptq", "block_name_to_quantize": "model.layers",
                    "extra_config": {"lm_head": {"bits": 16}}}, {"bare": True}),
    "auto-round, whole zero points": ({"quant_method": "auto-round", "bits": 3, "group_size": 32, "sym": False,
                                       "packing_format": "auto_round"}, {"v2": True, "bare": True}),
    "auto-round as awq": ({"quant_method": "auto-round", "bits": 4, "group_size": 64, "sym": False,
                           "packing_format": "auto_round:auto_awq"}, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_packed_file_computes_what_it_says_and_stays_packed(case, tmp_path):
    config, options = CASES[case]
    method, bits = config["quant_method"], config.get("bits", 4)
    if method == "auto-round":
        method = "awq" if "awq" in config["packing_format"] else "gptq"
    folder, group = write_folder(tmp_path / "model"), config.get("group_size", 32)
    tensors, dense = load_file(folder / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(1)
    for name in [n for n in tensors if "_proj" in n]:
        weight, g_idx = tensors.pop(name), None
        if options.get("shuffled"):
            g_idx = torch.arange(weight.shape[1])[torch.randperm(weight.shape[1], generator=generator)] // group
        made, dense[name] = parts(weight, method, bits, group, v2=options.get("v2", False), g_idx=g_idx)
        if options.get("bare"):
            del made["g_idx"]
        tensors |= {f"{name.removesuffix('.weight')}.{part}": t for part, t in made.items()}
    plain = write_folder(tmp_path / "plain")
    save_file(load_file(plain / "model.safetensors") | dense, plain / "model.safetensors")
    save_file(tensors, folder / "model.safetensors")
    settings = json.loads((folder / "config.json").read_text()) | {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(settings))
    options = {"dtype": "fp32", "device": "cpu", "backend": "reference"}
    found, wanted = labkit.load(folder, **options), labkit.load(plain, weights="plain", **options)
    torch.testing.assert_close(found(IDS), wanted(IDS), rtol=1e-4, atol=1e-5)
    kind = Int4Linear if bits == 4 and "act-order" not in case else GroupLinear
    assert all(type(m) is kind for n, m in found.transformer.layers.named_modules() if n.endswith("_proj"))
    assert isinstance(found.weights, Packed)
    assert found.nbytes == weights_nbytes(found.config, dtype="fp32", weights=found.weights)
    unpacked = labkit.load(folder, weights="plain", **options)
    torch.testing.assert_close(unpacked(IDS), wanted(IDS), rtol=1e-4, atol=1e-5)
    assert unpacked.weights is None


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [False, True])
def test_what_is_saved_is_what_the_library_reads_and_writes(bits, symmetric):
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    args = QuantizationArgs(num_bits=bits, type="int", symmetric=symmetric, strategy="group", group_size=32)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    library = BaseCompressor.get_value_from_registry("pack-quantized")
    torch.manual_seed(bits)
    groups = Grid(bits, "symmetric" if symmetric else "asymmetric").nearest(torch.randn(40, 96), 32)
    saved = save_packed.parts_of(groups)
    opened = library.decompress({**saved, "weight_scale": saved["weight_scale"].float()}, scheme)["weight"]
    torch.testing.assert_close(opened.float(), groups.dequantize(), rtol=1e-3, atol=1e-4)
    zero = torch.zeros(40, 3) if groups.zeros is None else groups.zeros.float() - 2 ** (bits - 1)
    state = {
        "weight": groups.dequantize(),
        "weight_scale": groups.scales.float(),
        "weight_zero_point": zero.to(torch.int8),
    }
    theirs = library.compress(state, scheme)
    layout = packed.layout_of(compressed_config(bits), "x")
    read = packed.read(layout, "x", dict(theirs))
    torch.testing.assert_close(read.groups.dequantize(), groups.dequantize())


def gptq_parts():
    return parts(torch.randn(16, 64, generator=torch.Generator().manual_seed(0)), "gptq", 4, 32)[0]


LAYOUT = packed.Layout("gptq", 4, 32, 1)


def without(name):
    return lambda p: {k: v for k, v in p.items() if k != name}


DAMAGE = {
    "a missing part": (without("qzeros"), "x is packed as gptq but has no 'qzeros'"),
    "scales of another shape": (
        lambda p: p | {"scales": p["scales"][:1]},
        r"x: scales is \(1, 16\), should be \(2, 16\)",
    ),
    "words that are floats": (lambda p: p | {"qweight": p["qweight"].float()}, "should be a matrix of int32"),
    "groups that do not divide": (
        lambda p: p | {"qweight": p["qweight"][:5]},
        "groups of 32 do not divide its 40 inputs",
    ),
    "a group that is not there": (lambda p: p | {"g_idx": p["g_idx"] + 1}, "g_idx has 64 entries from 1 to 2"),
    "groups of uneven size": (lambda p: p | {"g_idx": p["g_idx"] * 0}, "does not give each group its 32 inputs"),
    "a scale that is not finite": (lambda p: p | {"scales": p["scales"] * np.inf}, "its scales hold NaN or infinity"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_named(case):
    change, words = DAMAGE[case]
    packed.read(LAYOUT, "x", gptq_parts())
    with pytest.raises(ValueError, match=words):
        packed.read(LAYOUT, "x", change(gptq_parts()))


def test_zero_points_out_of_range_are_named():
    made, _ = parts(torch.randn(16, 64), "compressed-tensors", 4, 32)
    made["weight_zero_point"] = torch.full((16, 2), 9, dtype=torch.int8)
    with pytest.raises(ValueError, match="a zero point is out of the range of 4 bits"):
        packed.read(packed.Layout("compressed-tensors", 4, 32), "x", made)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "bitsandbytes"}, "holds packed weights .bitsandbytes., which this labkit does not read"),
        ({"quant_method": "gptq", "bits": 5}, "5 bits a weight; labkit reads 2, 3, 4, 8"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "AWQ weights of version 'gemv'"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "in format 'float-quantized'"),
        (
            {"quant_method": "auto-round", "bits": 4, "extra_config": {"model.layers.0.mlp.up_proj": {"bits": 8}}},
            "packed as 'auto_round:auto_gptq', layers differing; labkit reads integers, all layers alike",
        ),
        ({"quant_method": "auto-round", "bits": 4, "data_type": "mx_fp"}, "auto-round weights of type 'mx_fp'"),
        ({"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:fp8"}, "packed as 'auto_round:fp8'"),
    ],
)
def test_what_is_not_read_says_what_is(config, words):
    with pytest.raises(ValueError, match=words):
        packed.layout_of(config, "model")
