# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportAttributeAccessIssue=false
"""Writes the default model, unpacked, as a Hugging Face folder: what transformers, optimum and vLLM read."""

from __future__ import annotations

import json
from pathlib import Path

PER_LAYER = {
    "attention.q_proj": "self_attn.q_proj",
    "attention.k_proj": "self_attn.k_proj",
    "attention.v_proj": "self_attn.v_proj",
    "attention.o_proj": "self_attn.o_proj",
    "ffn.gate_proj": "mlp.gate_proj",
    "ffn.up_proj": "mlp.up_proj",
    "ffn.down_proj": "mlp.down_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def write(folder: Path) -> Path:
    """config.json, model.safetensors (bf16) and tokenizer files; does nothing when they are there."""
    if (folder / "tokenizer_config.json").is_file():
        return folder
    import gguf
    import torch
    from safetensors.torch import save_file

    import labkit
    from labkit.checkpoint.fetch import fetch_default

    folder.mkdir(parents=True, exist_ok=True)
    model = labkit.load(dtype="bf16", device="cpu", weights="plain")
    config, layer = model.config, model.config.layers[0]
    tensors = {"model.embed_tokens.weight": model.transformer.embedding.weight}
    for idx, block in enumerate(model.transformer.layers):
        for ours, theirs in PER_LAYER.items():
            tensors[f"model.layers.{idx}.{theirs}.weight"] = block.get_submodule(ours).weight
    tensors["model.norm.weight"] = model.transformer.final_norm.weight
    tensors = {name: tensor.detach().to(torch.bfloat16).contiguous().clone() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.d_head,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_tokens,
        "rms_norm_eps": config.norm.eps,
        "rope_theta": layer.attention.rope.theta,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(settings, indent=1))
    fields = gguf.GGUFReader(str(fetch_default())).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = fields["tokenizer.ggml.merges"].contents()
    bpe = {
        "type": "BPE",
        "vocab": {token: i for i, token in enumerate(tokens)},
        "merges": [m.split(" ") for m in merges],
    }
    split = {"type": "Digits", "individual_digits": True}
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    special = [{"id": i, "content": tokens[i], **plain} for i in range(17)]
    whole = {
        "version": "1.0",
        "added_tokens": special,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, bytes_]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": bpe,
    }
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    names["chat_template"] = fields["tokenizer.chat_template"].contents()
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


if __name__ == "__main__":
    import sys

    print(write(Path(sys.argv[1])))
