"""The GGUF reader: values against the gguf package, names and row order against transformers' own conversion."""

from __future__ import annotations

import struct

import gguf
import numpy as np
import pytest
import torch
from small_files import random_blocks, write_gguf

from labkit.checkpoint.fetch import fetch_default
from labkit.checkpoint.gguf import GGUFFile
from labkit.quant.blocks import CHUNK_VALUES, block_layout, dequantize

ALL_KINDS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_dequantised_values_equal_the_gguf_package(kind, dtype):
    rows, columns = 3 * CHUNK_VALUES // 1024 + 5, 1024  # several chunks and a remainder
    blocks = random_blocks(kind, rows, columns, np.random.default_rng(7))
    wanted = torch.from_numpy(gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind]).copy()).reshape(rows, columns)
    raw = torch.from_numpy(np.ascontiguousarray(blocks).view(np.uint8).reshape(-1).copy())
    assert torch.equal(dequantize(raw, kind, (rows, columns), dtype), wanted.to(dtype))


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_block_layouts_equal_the_gguf_package(kind):
    code = gguf.GGMLQuantizationType[kind]
    assert block_layout(int(code)) == (kind, *gguf.GGML_QUANT_SIZES[code])


def test_metadata_and_tensors_equal_the_gguf_package(tmp_path):
    path = write_gguf(tmp_path / "model.gguf")
    reader = gguf.GGUFReader(path)
    with GGUFFile(path) as file:
        theirs = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
        assert file.metadata == theirs
        assert list(file.tensors) == [tensor.name for tensor in reader.tensors]
        for tensor in reader.tensors:
            info = file.tensors[tensor.name]
            assert (info.kind, info.nbytes, info.start) == (
                tensor.tensor_type.name,
                tensor.n_bytes,
                tensor.data_offset,
            )
            wanted = gguf.dequantize(tensor.data, tensor.tensor_type)
            np.testing.assert_array_equal(file.tensor(tensor.name).numpy(), wanted.reshape(info.shape))


def test_tensors_outlive_the_file(tmp_path):
    path = write_gguf(tmp_path / "model.gguf")
    with GGUFFile(path) as file:
        tensors = dict(file.items())
    path.write_bytes(b"")  # would end the process if anything were still mapped
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values())


def test_default_model_equals_gguf_values_and_transformers_row_order(default_model):
    """Independent of labkit's reader: gguf's parser and values, transformers' un-permutation of q and k."""
    from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

    processor = LlamaTensorProcessor({"num_attention_heads": 9, "num_key_value_heads": 3})
    raw = np.memmap(fetch_default(), mode="r")
    state = default_model.transformer.state_dict()
    ours = {"attn_q": "attention.q_proj", "attn_k": "attention.k_proj", "ffn_down": "ffn.down_proj"}
    with GGUFFile(fetch_default()) as file:  # for the places only; they are compared with gguf's elsewhere
        for layer_idx in (0, 13, 29):
            for theirs, own in ours.items():
                name = f"blk.{layer_idx}.{theirs}.weight"
                info = file.tensors[name]
                blocks = np.asarray(raw[info.start : info.start + info.nbytes]).reshape(info.shape[0], -1)
                values = processor.process(gguf.dequantize(blocks, gguf.GGMLQuantizationType[info.kind]), name).weights
                assert torch.equal(state[f"layers.{layer_idx}.{own}.weight"], torch.from_numpy(values.copy()))


# --- what is refused ------------------------------------------------------------------------------------------------


def header(*, magic=b"GGUF", version=3, n_tensors=0, n_keys=0, rest=b"") -> bytes:
    return magic + struct.pack("<IQQ", version, n_tensors, n_keys) + rest


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "too short"),
        (b"PK\x03\x04" + bytes(40), "not a GGUF file"),
        (header(magic=b"FUGG", rest=bytes(8)), "big-endian"),
        (header(version=1, rest=bytes(8)), "version 1"),
        (header(n_keys=2**60, rest=bytes(99)), "claims 1152921504606846976 metadata keys"),
        (header(n_tensors=2**40, rest=bytes(99)), "claims 1099511627776 tensors"),
        (header(n_keys=1, rest=struct.pack("<Q", 2**63) + bytes(64)), "ends inside a metadata key"),
        (header(n_keys=1, rest=struct.pack("<Q1sI", 1, b"k", 99) + bytes(64)), "type 99"),
        (header(n_keys=1, rest=struct.pack("<Q1sIIQ", 1, b"k", 9, 8, 2**50) + bytes(64)), "entries of k"),
        (header(n_tensors=1, rest=struct.pack("<Q1sI", 1, b"t", 7) + bytes(64)), "7 dimensions"),
        (header(n_tensors=1, rest=struct.pack("<Q1sIQIQ", 1, b"t", 1, 8, 77, 0) + bytes(64)), "number 77"),
        (header(n_tensors=1, rest=struct.pack("<Q1sIQIQ", 1, b"t", 1, 2**62, 0, 0) + bytes(64)), "file ends at"),
        (header(n_tensors=1, rest=struct.pack("<Q1sIQIQ", 1, b"t", 1, 31, 2, 0) + bytes(64)), "cannot fill"),
    ],
)
def test_damaged_headers_are_refused_with_the_reason(content, message, tmp_path):
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        GGUFFile(path)


def test_overlapping_tensors_are_refused(tmp_path):
    entry = struct.pack("<Q1sIQIQ", 1, b"%c", 1, 8, 0, 0)
    two = entry.replace(b"%", b"a", 1) + entry.replace(b"%", b"b", 1)
    path = tmp_path / "bad.gguf"
    path.write_bytes(header(n_tensors=2, rest=two + bytes(128)))
    with pytest.raises(ValueError, match="overlap"):
        GGUFFile(path)
