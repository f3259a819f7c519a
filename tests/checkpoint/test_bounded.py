"""Hostile files: a documented error, and memory that stays below twice the file and 200 MB."""

from __future__ import annotations

import json
import os
import random
import struct
import subprocess
import sys
import tracemalloc
from array import array
from pathlib import Path

import pytest

from labkit.checkpoint.gguf import GGUFFile
from labkit.checkpoint.safetensors import tensor_shapes
from labkit.checkpoint.translate import config_from_gguf, config_from_hf
from labkit.resources import read_json_object
from labkit.tokenizer import Tokenizer
from labkit.tokenizer.byte_level import to_symbols

sys.path.insert(0, str(Path(__file__).parents[1] / "tokenizer"))
sys.path.insert(0, str(Path(__file__).parent))
import small
from published import COMMON, SHAPES
from test_gguf_keys import LLAMA
from test_gguf_keys import SHAPES as GGUF_SHAPES

PEAK = """
import resource, sys
from pathlib import Path
from labkit.resources import read_json_object
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    read_json_object(Path(sys.argv[1]), max_bytes=256 << 20)
    said = "read"
except ValueError as error:
    said = str(error)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024, said)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is counted in other units elsewhere")
@pytest.mark.parametrize("piece", ["{}", "[]", '{"a":0}', '"ab"', "300"])
def test_json_of_many_small_objects(tmp_path, piece):
    path = tmp_path / "tokenizer.json"
    path.write_text('{"added_tokens": [' + ",".join([piece] * 3_000_000) + "]}")
    done = subprocess.run([sys.executable, "-c", PEAK, str(path)], capture_output=True, text=True, check=True)
    peak, _, said = done.stdout.partition(" ")
    assert int(peak) < 2 * path.stat().st_size + 200e6, said
    assert said.strip() == "read" or "more objects than any published file" in said


TABLES = """
import resource, sys
from labkit.tokenizer import Tokenizer
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
tokenizer = Tokenizer.from_file(sys.argv[1])
assert tokenizer.decode(tokenizer.encode("Hello there")) == "Hello there"
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is counted in other units elsewhere")
def test_a_tokenizers_tables_of_200_000_merges(tmp_path):
    symbols = [to_symbols(bytes([byte])) for byte in range(256)]
    merges = [[a, b] for a in symbols for b in symbols]
    merges += [[a + b, c] for a in symbols for b in symbols for c in symbols[:2]]
    vocab = {token: i for i, token in enumerate([*symbols, *dict.fromkeys(a + b for a, b in merges)])}
    split = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": vocab, "merges": merges}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"added_tokens": [], "pre_tokenizer": split, "model": model}, ensure_ascii=False))
    done = subprocess.run([sys.executable, "-c", TABLES, str(path)], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 2 * path.stat().st_size + 200e6


def write_gguf_array(path: Path, code: int, form: str, n: int) -> Path:
    key = b"general.big"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(key)) + key
    path.write_bytes(head + struct.pack("<IIQ", 9, code, n) + struct.pack(f"<{n}{form}", *([300] * n)))
    return path


def test_a_gguf_array_takes_the_files_bytes(tmp_path):
    path = write_gguf_array(tmp_path / "big.gguf", 2, "H", 1_000_000)
    tracemalloc.start()
    with GGUFFile(path) as file:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        found = file.metadata["general.big"]
    assert isinstance(found, array)
    assert (len(found), found[7]) == (1_000_000, 300)
    assert peak < 3 * path.stat().st_size + 1e6
    with pytest.raises(ValueError, match=r"4000000 entries; at most 2097152"):
        GGUFFile(write_gguf_array(path, 2, "H", 4_000_000))


def test_a_safetensors_header_of_a_million_entries(tmp_path):
    entries = {f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(200_000)}
    header = json.dumps(entries).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(ValueError, match=r"200,000 tensors or more; at most .* 131,072"):
        tensor_shapes([path])


# ---- mutations ---------------------------------------------------------------------------------------------------

STRANGE = [None, True, -1, 0, 1.5, 1e308, -1e308, 10**30, "", "x" * 300, [], {}, [[]], {"a": {}}, [None], float("nan")]


def mutated(value, rng: random.Random, depth: int = 0):
    """`value` with one place in it replaced by something strange."""
    if isinstance(value, dict) and value and (depth == 0 or rng.random() < 0.7):
        key = rng.choice(list(value))
        return {**value, key: mutated(value[key], rng, depth + 1)}
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        return [*value[:at], mutated(value[at], rng, depth + 1), *value[at + 1 :]]
    return rng.choice(STRANGE)


def test_mutated_configs_fail_as_documented():
    rng = random.Random(1)
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 40, "num_hidden_layers": 3,
             "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
    for _ in range(1500):
        values = mutated(COMMON | sizes | SHAPES[rng.choice(list(SHAPES))], rng)
        try:
            config_from_hf(values)
        except ValueError:
            continue


def test_mutated_gguf_metadata_fails_as_documented():
    rng = random.Random(2)
    metadata = LLAMA | small.pieces_gguf() | {"tokenizer.ggml.bos_token_id": 1, "llama.rope.scaling.factor": 2.0}
    for _ in range(400):
        values = mutated(metadata, rng)
        for read in (lambda: config_from_gguf(values, GGUF_SHAPES, None), lambda: Tokenizer.from_gguf(values)):  # noqa: B023
            try:
                read()
            except ValueError:
                continue


def test_mutated_tokenizers_fail_as_documented(tmp_path):
    rng = random.Random(3)
    specs = [small.pieces(), small.byte_level(post_processor=small.template({"<s>": 258}, {}))]
    for _ in range(400):
        spec = mutated(rng.choice(specs), rng)
        path = small.write(tmp_path, spec)
        try:
            Tokenizer.from_file(path).encode_prompt("ab cd é")
        except (ValueError, FileNotFoundError):
            continue


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="this system has no devices as files")
def test_a_device_in_a_files_place(tmp_path):
    os.symlink("/dev/zero", tmp_path / "config.json")
    with pytest.raises(ValueError, match="not a regular file"):
        read_json_object(tmp_path / "config.json", max_bytes=1000)
