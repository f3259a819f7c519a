"""Save a model whose layers are packed, as compressed-tensors "pack-quantized": what vLLM and transformers open.

The head and a tied embedding stay plain in the file (float16 where that loses nothing of their range), because no
reader packs them. The tokenizer is not written: the model that was quantised has it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from labkit.checkpoint import bitstream
from labkit.checkpoint.names import to_hf
from labkit.quant import GroupLinear, Int4Linear
from labkit.quant.grid import Groups

ARCHITECTURES = {
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM", "qwen2_moe": "Qwen2MoeForCausalLM", "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM", "gemma2": "Gemma2ForCausalLM", "gemma3_text": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM", "olmo2": "Olmo2ForCausalLM", "smollm3": "SmolLM3ForCausalLM", "gpt2": "GPT2LMHeadModel",
}  # fmt: skip


def save(folder: Path, transformer: Any, settings: dict[str, Any], note: str) -> None:
    """Write config.json and model.safetensors into ``folder``, which exists. ``settings``: the model's own config.json,
    ``note``: how it was quantised, kept in the file's metadata."""
    from safetensors.torch import save_file

    config, tensors, form = transformer.config, {}, None
    for name, module in transformer.layers.named_modules():
        if isinstance(module, GroupLinear | Int4Linear):
            form = module.groups()
            at = to_hf(config, f"layers.{name}")
            tensors |= {f"{at}.{part}": tensor for part, tensor in parts_of(form).items()}
            if module.bias is not None:
                tensors[f"{at}.bias"] = _plain(module.bias)
    packed = {f"layers.{n}." for n, m in transformer.layers.named_modules() if isinstance(m, GroupLinear | Int4Linear)}
    for name, tensor in transformer.state_dict().items():
        if not any(name.startswith(at) for at in packed):
            tensors |= _named(config, name, tensor)
    tensors |= _joined_experts(transformer)
    assert form is not None
    quantized = {**settings, "quantization_config": quantization_config(form), "torch_dtype": "float16"}
    quantized.setdefault("architectures", [ARCHITECTURES.get(str(settings.get("model_type")), "")])
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors", metadata={"made": note})
    (folder / "config.json").write_text(json.dumps(quantized, indent=1))


def parts_of(groups: Groups) -> dict[str, Tensor]:
    """A packed module's tensors. Codes and zero points are stored without sign, as the library packs them."""
    if groups.minima is not None:
        raise ValueError("compressed-tensors stores whole zero points: a grid with float minima cannot be saved in it.")
    n_out, n_in = groups.codes.shape
    parts = {
        "weight_packed": bitstream.pack(groups.codes, groups.bits),
        "weight_scale": groups.scales,
        "weight_shape": torch.tensor([n_out, n_in]),
    }
    if groups.zeros is not None:
        parts["weight_zero_point"] = bitstream.pack(groups.zeros.t().contiguous(), groups.bits).t().contiguous()
    return parts


def quantization_config(groups: Groups) -> dict[str, Any]:
    """What config.json says of it."""
    weights = {
        "num_bits": groups.bits,
        "type": "int",
        "symmetric": groups.zeros is None,
        "strategy": "group",
        "group_size": groups.group_size,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def _named(config: Any, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """A plain tensor under transformers' name; an expert's gate and up projections are joined elsewhere."""
    at, _, part = name.rpartition(".ffn.experts.")
    if at:
        return {f"model.{at}.mlp.experts.down_proj": _plain(tensor)} if part == "down" else {}
    return {to_hf(config, name): _plain(tensor)}


def _plain(tensor: Tensor) -> Tensor:
    """Matrices in float16 where their range allows it; norms and biases in float32."""
    half = tensor.to(torch.float16) if tensor.ndim > 1 else tensor.float()
    return half if torch.isfinite(half).all() else tensor.float()


def _joined_experts(transformer: Any) -> dict[str, Tensor]:
    """Stacked gate and up projections, joined as transformers joins them."""
    found = {}
    for idx, block in enumerate(transformer.layers):
        experts: Any = getattr(block.ffn, "experts", None)
        if experts is not None:
            joined = torch.cat([experts.gate, experts.up], dim=1)  # (E, 2F, M)
            found[f"model.layers.{idx}.mlp.experts.gate_up_proj"] = _plain(joined)
    return found
