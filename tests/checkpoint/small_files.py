"""Small model files, made here: a GGUF of every block format, and a folder of safetensors."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import torch

from labkit.checkpoint.random_weights import byte_vocabulary

VOCAB, D_MODEL, D_FF, N_LAYERS, N_HEADS, N_KV_HEADS = 320, 256, 512, 2, 4, 2
KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "F16", "F32", "Q4_K", "Q6_K")


def random_blocks(kind: str, rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    """Bytes of a tensor in a block format: quantised where gguf can, else random codes under small scales."""
    code = gguf.GGMLQuantizationType[kind]
    if not kind.endswith("_K"):
        return gguf.quantize(rng.normal(0, 0.05, (rows, columns)).astype(np.float32), code)
    block, nbytes = gguf.GGML_QUANT_SIZES[code]
    raw = rng.integers(0, 256, (rows, columns // block, nbytes), dtype=np.uint8)
    scale = np.frombuffer(np.float16(0.001).tobytes(), np.uint8)
    places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}[kind]
    for at in places:
        raw[..., at : at + 2] = scale
    return raw.reshape(rows, -1)


def write_tokenizer(writer: gguf.GGUFWriter, vocab_size: int = VOCAB) -> None:
    vocabulary = byte_vocabulary(vocab_size)
    vocabulary["tokenizer.ggml.tokens"][300:302] = ["ab", "cd"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(vocabulary["tokenizer.ggml.tokens"])
    writer.add_token_types(vocabulary["tokenizer.ggml.token_type"])
    writer.add_token_merges(["a b", "c d"])
    writer.add_eos_token_id(2)


def write_gguf(path: Path, seed: int = 0) -> Path:
    """A two-layer Llama whose matrices go through all block formats."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(D_MODEL)
    writer.add_block_count(N_LAYERS)
    writer.add_feed_forward_length(D_FF)
    writer.add_head_count(N_HEADS)
    writer.add_head_count_kv(N_KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    write_tokenizer(writer)
    d_kv = D_MODEL // N_HEADS * N_KV_HEADS
    shapes = {
        "attn_q": (D_MODEL, D_MODEL),
        "attn_k": (d_kv, D_MODEL),
        "attn_v": (d_kv, D_MODEL),
        "attn_output": (D_MODEL, D_MODEL),
        "ffn_gate": (D_FF, D_MODEL),
        "ffn_up": (D_FF, D_MODEL),
        "ffn_down": (D_MODEL, D_FF),
    }
    kinds = [KINDS[i % len(KINDS)] for i in range(1 + N_LAYERS * len(shapes))]
    embedding = random_blocks("Q8_0", VOCAB, D_MODEL, rng)
    writer.add_tensor("token_embd.weight", embedding, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("output_norm.weight", np.ones(D_MODEL, np.float32))
    for i in range(N_LAYERS):
        writer.add_tensor(f"blk.{i}.attn_norm.weight", np.ones(D_MODEL, np.float32))
        writer.add_tensor(f"blk.{i}.ffn_norm.weight", np.ones(D_MODEL, np.float32))
        for name, (rows, columns) in shapes.items():
            kind = kinds.pop()
            blocks = random_blocks(kind, rows, columns, rng)
            writer.add_tensor(f"blk.{i}.{name}.weight", blocks, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_folder(folder: Path, *, n_shards: int = 1) -> Path:
    """The same model's shape as safetensors, with config.json and tokenizer.json."""
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": D_MODEL,
        "intermediate_size": D_FF,
        "num_hidden_layers": N_LAYERS,
        "num_attention_heads": N_HEADS,
        "num_key_value_heads": N_KV_HEADS,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tokens = byte_vocabulary(VOCAB)["tokenizer.ggml.tokens"]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator).mul_(0.05)

    d_kv = D_MODEL // N_HEADS * N_KV_HEADS
    tensors = {"model.embed_tokens.weight": matrix(VOCAB, D_MODEL), "model.norm.weight": torch.ones(D_MODEL)}
    for i in range(N_LAYERS):
        at = f"model.layers.{i}."
        tensors |= {
            f"{at}input_layernorm.weight": torch.ones(D_MODEL),
            f"{at}post_attention_layernorm.weight": torch.ones(D_MODEL),
            f"{at}self_attn.q_proj.weight": matrix(D_MODEL, D_MODEL),
            f"{at}self_attn.k_proj.weight": matrix(d_kv, D_MODEL),
            f"{at}self_attn.v_proj.weight": matrix(d_kv, D_MODEL),
            f"{at}self_attn.o_proj.weight": matrix(D_MODEL, D_MODEL),
            f"{at}mlp.gate_proj.weight": matrix(D_FF, D_MODEL),
            f"{at}mlp.up_proj.weight": matrix(D_FF, D_MODEL),
            f"{at}mlp.down_proj.weight": matrix(D_MODEL, D_FF),
        }
    if n_shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = list(tensors)
    weight_map = {}
    for shard in range(n_shards):
        file = f"model-{shard + 1:05d}-of-{n_shards:05d}.safetensors"
        save_file({name: tensors[name] for name in names[shard::n_shards]}, folder / file)
        weight_map |= dict.fromkeys(names[shard::n_shards], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder
