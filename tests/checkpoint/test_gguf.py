"""The GGUF reader: values against the gguf package, names and row order against transformers' own conversion."""

from __future__ import annotations

import struct

import gguf
import numpy as np
import pytest
import torch
from small_files import D_MODEL, N_HEADS, N_KV_HEADS, VOCAB, random_blocks, write_gguf

from labkit.checkpoint.dequantize import CHUNK_VALUES, block_layout, dequantize
from labkit.checkpoint.fetch import fetch_default
from labkit.checkpoint.gguf import GGUFFile
from labkit.checkpoint.gguf_names import ARCHITECTURES, halves_from_pairs
from labkit.checkpoint.translate import config_from_gguf, tensors_from_gguf

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


def convert(model, path, architecture, *, permute, norm_offset=0.0):
    """A transformers model as GGUF, following llama.cpp's converter where it changes anything."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    d_head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(d_head)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    code = {arch: number for number, arch in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(code, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        for part, n_heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if permute and part in name:
                halves = values.reshape(n_heads, 2, values.shape[0] // n_heads // 2, *values.shape[1:])
                values = halves.swapaxes(1, 2).reshape(values.shape)
        if name.endswith("norm.weight"):
            values = values + np.float32(norm_offset)
        stem, _, suffix = name.rpartition(".")
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


GGUF_NAMES = {"gemma3_text": "gemma3"}


@pytest.mark.parametrize("family", ["llama", "smollm3", "qwen2", "qwen3", "olmo2", "gemma2", "gemma3_text", "phi3"])
def test_gguf_of_a_family_gives_the_tensors_that_its_safetensors_give(family, tmp_path):
    transformers = pytest.importorskip("transformers")
    from labkit.checkpoint.translate import config_from_hf, tensors_from_hf

    extra = {"head_dim": 16} if family in ("qwen3", "gemma2", "gemma3_text") else {}
    config = transformers.AutoConfig.for_model(
        family,
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **extra,
    )
    if "gemma" in family:
        config.query_pre_attn_scalar = 16  # llama.cpp keeps d_head in its code, not in the file
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.uniform_(0.5, 1.5)
    permute, offset = family in ("llama", "smollm3"), 1.0 if "gemma" in family else 0.0
    architecture = GGUF_NAMES.get(family, family)
    path = convert(model, tmp_path / "model.gguf", architecture, permute=permute, norm_offset=offset)
    hf_config = config_from_hf(model.config.to_dict())
    wanted = dict(tensors_from_hf(hf_config, model.state_dict()))
    with GGUFFile(path) as file:
        shapes = {name: info.shape for name, info in file.tensors.items()}
        own_config = config_from_gguf(file.metadata, shapes, file.tensor)
        got = dict(tensors_from_gguf(own_config, file.items()))
    assert own_config.layers == hf_config.layers
    assert got.keys() == wanted.keys()
    for name, tensor in got.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=2e-7 if offset else 0, msg=name)


def test_row_order_is_undone_for_biases_too():
    bias = torch.arange(8.0)
    assert halves_from_pairs(bias, 2, "bias").tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_llama3_rotary_factors_become_the_same_frequencies():
    """llama.cpp stores Llama 3's scaling as one divisor a pair: transformers' inverse frequencies, divided."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    hf = LlamaConfig(
        hidden_size=D_MODEL,
        num_attention_heads=N_HEADS,
        max_position_embeddings=512,
        rope_parameters={**scaling, "rope_theta": 10_000.0},
    )
    wanted, _ = ROPE_INIT_FUNCTIONS["llama3"](hf, "cpu")
    plain = 1.0 / 10_000.0 ** (torch.arange(0, 64, 2) / 64)
    metadata = {
        "general.architecture": "llama",
        "llama.context_length": 512,
        "llama.embedding_length": D_MODEL,
        "llama.block_count": 2,
        "llama.feed_forward_length": 512,
        "llama.attention.head_count": N_HEADS,
        "llama.attention.head_count_kv": N_KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
    }
    shapes = {"token_embd.weight": (VOCAB, D_MODEL), "rope_freqs.weight": (32,)}
    scaling = config_from_gguf(metadata, shapes, lambda _: plain / wanted).layers[0].attention.rope.scaling
    assert scaling.kind == "longrope"
    assert scaling.attention_factor == 1.0
    for factors in (scaling.short_factors, scaling.long_factors):
        torch.testing.assert_close(plain / torch.tensor(factors), wanted)


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


def test_unknown_architecture_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'mamba' is not supported.*llama") as error:
        config_from_gguf({"general.architecture": "mamba"}, {}, lambda _: torch.ones(1))
    assert all(name in str(error.value) for name in ARCHITECTURES)


def test_gpt2_gguf_gives_the_tensors_that_its_safetensors_give(tmp_path):
    transformers = pytest.importorskip("transformers")
    from labkit.checkpoint.translate import config_from_hf, tensors_from_hf

    torch.manual_seed(0)
    hf = transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    model = transformers.GPT2LMHeadModel(hf)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "gpt2")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_layer_norm_eps(1e-5)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, 2)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        stem, _, suffix = name.rpartition(".")
        if tensor.ndim == 2 and "wte" not in name and "wpe" not in name:
            tensor = tensor.t()  # llama.cpp stores (out, in); Conv1D stores (in, out)
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config = config_from_hf(hf.to_dict())
    check_same(tmp_path / "model.gguf", config, dict(tensors_from_hf(config, model.state_dict())))


def test_mixture_of_experts_gguf_gives_the_tensors_that_its_safetensors_give(tmp_path):
    transformers = pytest.importorskip("transformers")
    from labkit.checkpoint.translate import config_from_hf, tensors_from_hf

    torch.manual_seed(0)
    hf = transformers.Qwen3MoeConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        max_position_embeddings=64,
    )
    config = config_from_hf(hf.to_dict())
    wanted = dict(tensors_from_hf(config, transformers.Qwen3MoeForCausalLM(hf).state_dict()))
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "qwen3moe")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(16)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_expert_count(4)
    writer.add_expert_used_count(2)
    writer.add_expert_feed_forward_length(24)
    theirs = {
        "attention_norm": "attn_norm",
        "attention.q_proj": "attn_q",
        "attention.k_proj": "attn_k",
        "attention.v_proj": "attn_v",
        "attention.o_proj": "attn_output",
        "attention.q_norm": "attn_q_norm",
        "attention.k_norm": "attn_k_norm",
        "ffn_norm": "ffn_norm",
        "ffn.router": "ffn_gate_inp",
    }
    top = {"embedding": "token_embd", "final_norm": "output_norm", "head": "output"}
    for name, tensor in wanted.items():
        if name.removesuffix(".weight") in top:
            stored = f"{top[name.removesuffix('.weight')]}.weight"
        else:
            _, layer_idx, rest = name.split(".", 2)
            part = rest.removeprefix("ffn.experts.")
            stem = f"ffn_{part}_exps" if part != rest else theirs[rest.removesuffix(".weight")]
            stored = f"blk.{layer_idx}.{stem}.weight"
        writer.add_tensor(stored, tensor.detach().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    check_same(tmp_path / "model.gguf", config, wanted)


def check_same(path, hf_config, wanted):
    with GGUFFile(path) as file:
        shapes = {name: info.shape for name, info in file.tensors.items()}
        config = config_from_gguf(file.metadata, shapes, file.tensor)
        got = dict(tensors_from_gguf(config, file.items()))
    assert config.layers == hf_config.layers
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
