"""Fixtures that every room shares. The default model is fetched once and kept in the user's cache folder."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress

import pytest
import torch

with suppress(ImportError):
    import setuptools  # noqa: F401 - torch.compile's; it refuses to come after Python's own distutils

os.environ.setdefault("LABKIT_TEST", "1")  # widgets re-raise what they would otherwise show in a box
os.environ.setdefault("LABKIT_LANGUAGE", "en")  # whatever the developer chose for the pages
torch.set_num_threads(min(2, os.cpu_count() or 1))


@pytest.fixture(scope="session")
def default_model():
    """SmolLM2-135M-Instruct unpacked into float32."""
    import labkit

    return labkit.load(dtype="fp32", device="cpu", weights="plain")


@pytest.fixture(scope="session")
def reference_model(default_model):
    """transformers' LlamaForCausalLM holding the very same tensors: the oracle."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = default_model.config
    rope = config.layers[0].attention.rope
    hf_config = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.d_model,
        intermediate_size=config.d_ff,
        num_hidden_layers=config.n_layers,
        num_attention_heads=config.n_heads,
        num_key_value_heads=config.n_kv_heads,
        head_dim=config.d_head,
        max_position_embeddings=config.context_tokens,
        rope_parameters={"rope_type": "default", "rope_theta": rope.theta},
        rms_norm_eps=config.norm.eps,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(hf_config)
    names = {
        "attention.": "self_attn.",
        "ffn.": "mlp.",
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "embedding": "embed_tokens",
        "final_norm": "norm",
    }
    tensors = {}
    for name, tensor in default_model.transformer.state_dict().items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        tensors["model." + name] = tensor
    missing = model.load_state_dict(tensors, strict=False, assign=True).missing_keys
    assert set(missing) <= {"lm_head.weight"}, missing
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(hf_config)
    return model.eval()


def pytest_terminal_summary(terminalreporter):
    """What was skipped, and why, for the last lines of `make test`."""
    path = os.environ.get("LABKIT_SKIPPED")
    if path and (skipped := terminalreporter.stats.get("skipped")):
        reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped if report.longrepr)
        with open(path, "a", encoding="utf-8") as file:
            file.writelines(f"  {n} x {reason}\n" for reason, n in reasons.items())
