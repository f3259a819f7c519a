"""GGUF names and settings: a family's GGUF gives the tensors that its safetensors give."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from small_files import D_MODEL, N_HEADS, N_KV_HEADS, VOCAB

from labkit.checkpoint.gguf import GGUFFile
from labkit.checkpoint.gguf_names import ARCHITECTURES, halves_from_pairs
from labkit.checkpoint.translate import config_from_gguf, tensors_from_gguf


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


def test_unknown_architecture_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'mamba' is not supported.*llama") as error:
        config_from_gguf({"general.architecture": "mamba"}, {}, lambda _: torch.ones(1))
    assert all(name in str(error.value) for name in ARCHITECTURES)
