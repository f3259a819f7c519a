"""Every key of a published config is used, or changes nothing, or is refused: transformers reads the same file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from labkit.checkpoint.translate import config_from_hf, supported, tensors_from_hf
from labkit.kvcache.none import NoCache
from labkit.model import Transformer
from labkit.tokenizer import Tokenizer
from tests.model.families import close, randomize, token_ids

sys.path.insert(0, str(Path(__file__).parents[1] / "tokenizer"))
sys.path.insert(0, str(Path(__file__).parent))
import small
from published import COMMON, ENDS, LLAMA, SHAPES

transformers = pytest.importorskip("transformers", reason="transformers is the oracle")

N_LAYERS, D_HEAD, N_TOKENS = 7, 16, 30
SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 40, "num_hidden_layers": N_LAYERS,
         "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}  # fmt: skip
SMALLER = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
           "shared_expert_intermediate_size": 40, "head_dim": D_HEAD, "query_pre_attn_scalar": 20,
           "sliding_window": 8}  # fmt: skip


def small_config(name: str) -> dict:
    """The published shape with small sizes; windows small enough to matter."""
    shape = dict(SHAPES[name])
    for key, value in SMALLER.items():
        if shape.get(key) is not None:
            shape[key] = value
    d_head = shape.get("head_dim", SIZES["hidden_size"] // SIZES["num_attention_heads"])
    scaling = shape.get("rope_scaling")
    if scaling and scaling.get("short_factor") == "short":
        n_pairs = int(d_head * shape.get("partial_rotary_factor", 1.0)) // 2
        shape["rope_scaling"] = scaling | {
            "short_factor": [1.0 + 0.1 * i for i in range(n_pairs)],
            "long_factor": [1.0 + i for i in range(n_pairs)],
        }
    sizes = {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 96} if shape["model_type"] == "gpt2" else SIZES
    return COMMON | shape | sizes


def test_there_are_enough():
    assert len(SHAPES) + len(ENDS) >= 50
    elsewhere = {"deepseek_v2", "deepseek_v3", "deepseek_v32", "v4_hybrid"}  # tests/checkpoint/test_translate.py
    assert {shape["model_type"] for shape in SHAPES.values()} == set(supported()) - elsewhere


@pytest.mark.parametrize("name", SHAPES)
def test_the_numbers_are_the_references(tmp_path, name):
    values = small_config(name)
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    ).eval()
    randomize(theirs, seed=1)
    ours = Transformer(config_from_hf(values))
    ours.load_state_dict(dict(tensors_from_hf(ours.config, theirs.state_dict())))
    ids = token_ids(N_TOKENS)
    with torch.inference_mode():
        close(ours(ids, NoCache(ours.cache_entries, capacity_tokens=N_TOKENS)), theirs(ids[None]).logits[0])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("logit_scale", 0.5), ("embedding_multiplier", 12.0), ("residual_multiplier", 0.22), ("clip_qkv", 8.0),
        ("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0), ("sliding_window", 4096), ("alibi", True),
        ("qk_norm", True), ("rope_interleaved", True), ("norm_before_gate", "post"), ("qkv_bias", True),
        ("rotary_pct", 0.25), ("attention_sinks", 4), ("rope_scaling", {"type": "linear", "factor": 2.0,
                                                                       "mrope_section": [2, 3, 3], "scale": 2}),
    ],
)  # fmt: skip
def test_an_unknown_key_that_sounds_like_arithmetic_is_refused(key, value):
    named = "scale = 2" if key == "rope_scaling" else f"{key} = "
    with pytest.raises(ValueError, match=rf"{named}.*sounds as if it changed the arithmetic"):
        config_from_hf(COMMON | LLAMA | SIZES | {"max_position_embeddings": 64} | {key: value})


@pytest.mark.parametrize("name", ENDS)
def test_which_tokens_end_an_answer(tmp_path, name):
    of_config, of_generation, of_tokenizer, in_template, expected = ENDS[name]
    tokens = sorted(expected | {"<s>"})
    ids = {token: 258 + i for i, token in enumerate(tokens)}

    def numbers(value):
        return [ids[token] for token in value] if isinstance(value, list) else ids.get(value)

    beside = {"config": {"eos_token_id": numbers(of_config)}}
    if of_generation:
        beside["generation_config"] = {"eos_token_id": numbers(of_generation)}
    template = {"chat_template": "{{ messages[0].content }}" + in_template} if in_template else {}
    beside["tokenizer_config"] = {"eos_token": of_tokenizer} | template
    spec = small.byte_level(added_tokens=[small.added(token, i) for token, i in ids.items()])
    tokenizer = Tokenizer.from_file(small.write(tmp_path, spec, **beside))
    assert {token for token, i in ids.items() if i in tokenizer.eos_ids} == expected
