"""Random weights for the shape of a real model: its speed and memory, without a download.

Made where they are used, on the device. On a CPU one block of normal values is drawn and laid out again and
again: drawing seven billion would take minutes, and neither time nor bytes depend on the values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from labkit.checkpoint.assemble import skeleton
from labkit.checkpoint.placement import check_fits
from labkit.model.config import ModelConfig, MoEFFN
from labkit.model.transformer import Transformer

STANDARD_DEVIATION = 0.02
_BLOCK_VALUES = 2**22 + 1  # odd: rows of a matrix do not repeat each other


def random_transformer(
    config: ModelConfig, *, device: torch.device, dtype: torch.dtype, name: str, seed: int = 0
) -> Transformer:
    """A transformer of ``config`` with normal(0, 0.02) weights, norms that pass values through, and no bias.

    Raises ValueError before allocating when it does not fit, with what would.
    """
    transformer = skeleton(config, name).to(dtype)
    check_fits(sum(p.numel() for p in transformer.parameters()), dtype, device, name)
    transformer = transformer.to_empty(device=device).requires_grad_(False).eval()
    generator = torch.Generator(device=device).manual_seed(seed)
    block = None
    for table in transformer.buffers():  # which experts a token id has: taken in turn
        n_experts = max(layer.ffn.n_experts for layer in config.layers if isinstance(layer.ffn, MoEFFN))
        table.copy_(torch.arange(table.numel(), device=device).reshape(table.shape) % n_experts)
    for key, parameter in transformer.named_parameters():
        if key.endswith(("bias", ".base")):
            parameter.zero_()
        elif "norm" in key:
            parameter.fill_(0.0 if config.norm.unit_offset else 1.0)
        elif device.type == "cpu":
            if block is None:
                n_values = min(_BLOCK_VALUES, max(p.numel() for p in transformer.parameters()))
                block = torch.randn(n_values, generator=generator).mul_(STANDARD_DEVIATION).to(dtype)
            _tile(parameter, block)
        else:
            parameter.normal_(0.0, STANDARD_DEVIATION, generator=generator)
    return transformer


def _tile(parameter: Tensor, block: Tensor) -> None:
    flat = parameter.view(-1)
    for start in range(0, len(flat), len(block)):
        piece = flat[start : start + len(block)]
        piece.copy_(block[: len(piece)])


def byte_vocabulary(vocab_size: int) -> dict[str, Any]:
    """A tokenizer's metadata, in GGUF's words, for a model without one: a token for each byte, the rest unnamed.

    Raises ValueError when there are not even 256 ids.
    """
    if vocab_size < 256:
        raise ValueError(f"a vocabulary of {vocab_size} cannot hold the 256 bytes.")
    tokens = [*_byte_characters(), *(f"⟨{i}⟩" for i in range(256, vocab_size))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * vocab_size,
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.add_bos_token": False,
    }


def _byte_characters() -> list[str]:
    """GPT-2's printable stand-in for each byte: itself where it prints, else a letter from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]
