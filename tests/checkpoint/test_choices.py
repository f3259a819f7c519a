"""Folders and files that say a thing twice, or in parts: what transformers and llama.cpp take is taken, and said."""

from __future__ import annotations

import json
import os
import shutil
import sys
import warnings
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import labkit
from labkit.checkpoint.notes import CheckpointWarning
from labkit.checkpoint.safetensors import weight_files

sys.path.insert(0, str(Path(__file__).parent))
from small_files import write_folder, write_gguf

IDS = list(range(5, 25))


def load(path, **options):
    return labkit.load(path, dtype="fp32", backend="reference", **options)


def theirs(folder):
    """transformers' logits for the same folder."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([IDS])).logits[0]


def change(folder: Path, edit) -> Path:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


@pytest.fixture(autouse=True)
def _no_other_notes():
    with warnings.catch_warnings():
        warnings.simplefilter("error", CheckpointWarning)
        yield


# ---- tied heads --------------------------------------------------------------------------------------------------


def test_a_tied_model_that_stores_its_head_only(tmp_path):
    folder = write_folder(tmp_path)
    want = load(folder)(IDS)
    change(folder, lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))
    torch.testing.assert_close(load(folder)(IDS), want, rtol=0, atol=0)


def test_a_tied_model_that_stores_both_alike(tmp_path):
    folder = change(write_folder(tmp_path), lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 0}))
    assert load(folder).config.tied_embeddings


def test_a_head_of_its_own_is_kept(tmp_path):
    folder = change(write_folder(tmp_path), lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] * 2}))
    with pytest.warns(CheckpointWarning, match="stores a head of its own"):
        model = load(folder)
    assert not model.config.tied_embeddings
    torch.testing.assert_close(model(IDS), theirs(folder), rtol=1e-3, atol=1e-4)


# ---- which files -------------------------------------------------------------------------------------------------


def test_a_single_file_comes_before_shards(tmp_path):
    folder = write_folder(tmp_path, n_shards=2)
    change_shards = load_file(folder / "model-00001-of-00002.safetensors")
    save_file({k: v * 0 for k, v in change_shards.items()}, folder / "model-00001-of-00002.safetensors")
    single = write_folder(tmp_path / "single")
    shutil.copy(single / "model.safetensors", folder)
    change(folder, lambda _: None)
    with pytest.warns(CheckpointWarning, match=r"weights twice: model.safetensors is read.*not model-00001-of-00002"):
        model = load(folder)
    torch.testing.assert_close(model(IDS), theirs(folder), rtol=1e-3, atol=1e-4)


def test_an_index_left_over_from_shards(tmp_path):
    folder = write_folder(tmp_path)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-00001.safetensors"}}))
    with pytest.warns(CheckpointWarning, match="left over from shards that are not there; model.safetensors is read"):
        assert weight_files(folder) == [folder / "model.safetensors"]


def test_a_stale_index_beside_other_shards(tmp_path):
    folder = write_folder(tmp_path, n_shards=2)
    (folder / "model-00002-of-00002.safetensors").rename(folder / "model-00002-of-00003.safetensors")
    with pytest.raises(ValueError, match=r"lacks 1 of the 2 shards.*model-00002-of-00002.*is it stale"):
        load(folder)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_in_a_files_place_is_refused_and_not_waited_for(tmp_path):
    folder = write_folder(tmp_path)
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    with pytest.raises(ValueError, match="not a regular file"):
        load(folder)
    os.mkfifo(tmp_path / "model.gguf")
    with pytest.raises(FileNotFoundError, match="there is no file"):
        load(tmp_path / "model.gguf")
    (folder / "tokenizer.json").unlink()
    os.mkfifo(folder / "tokenizer.json")
    with pytest.raises(FileNotFoundError, match="tokenizer"):
        labkit.tokenizer.Tokenizer.from_file(folder)


# ---- GGUF --------------------------------------------------------------------------------------------------------


def split(path: Path, n_parts: int) -> list[Path]:
    """The file in parts, as llama.cpp's gguf-split writes them (its keys, its names)."""
    reader = gguf.GGUFReader(path)
    names = [path.with_name(f"part-{i + 1:05d}-of-{n_parts:05d}.gguf") for i in range(n_parts)]
    for i, name in enumerate(names):
        writer = gguf.GGUFWriter(name, "llama")
        if not i:
            for key, field in reader.fields.items():
                if key.startswith(("GGUF.", "general.architecture")):
                    continue
                kind = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(key, field.contents(), field.types[0], kind)
        writer.add_uint16("split.no", i)
        writer.add_uint16("split.count", n_parts)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[i::n_parts]:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return names


def test_a_gguf_in_parts(tmp_path):
    whole = write_gguf(tmp_path / "whole.gguf")
    with pytest.warns(CheckpointWarning, match=r"packs matrices as .*Q4_K.*unpacked into fp32"):
        want = load(whole)(IDS)
    parts = split(whole, 3)
    whole.unlink()
    for path in (parts[0], tmp_path):
        torch.testing.assert_close(load(path, weights="plain")(IDS), want, rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"part 1 of 3: load part-00001-of-00003.gguf"):
        load(parts[1])
    other = tmp_path / "other.gguf"
    parts[0].rename(other)
    with pytest.raises(ValueError, match="found by their names"):
        load(other)
    other.rename(parts[0])
    shutil.copy(parts[1], parts[2])
    with pytest.raises(ValueError, match="not part 3 of 3"):
        load(parts[0])
    parts[2].unlink()
    with pytest.raises(ValueError, match=r"3 parts; missing beside it: part-00003-of-00003.gguf"):
        load(parts[0])
