"""Transformers' tensor names to labkit's, splitting what is stored fused and stacking what is stored apart."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

import torch

from labkit.model.config import DenseFFN, GroupedAttention, LatentAttention, ModelConfig, MoEFFN

Named = tuple[str, torch.Tensor]

_WRAPPERS = ("model.language_model.", "language_model.model.", "language_model.", "model.", "transformer.")
_IGNORED = re.compile(
    r"rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$"  # buffers that old checkpoints saved
    r"|^(model\.)?(vision_tower|multi_modal_projector)\."  # Gemma 3's eyes: labkit runs its text model
)
_TOP = {
    "embed_tokens.weight": "embedding.weight",
    "wte.weight": "embedding.weight",
    "wpe.weight": "positions.weight",
    "norm.weight": "final_norm.weight",
    "ln_f.weight": "final_norm.weight",
    "ln_f.bias": "final_norm.bias",
    "lm_head.weight": "head.weight",
    "lm_head.bias": "head.bias",
}
_MODULES = {
    **{f"self_attn.{x}": f"attention.{x}" for x in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")},
    **{f"mlp.{x}": f"ffn.{x}" for x in ("gate_proj", "up_proj", "down_proj")},
    **{f"mlp.shared_expert.{x}": f"ffn.shared.{x}" for x in ("gate_proj", "up_proj", "down_proj")},
    **{f"mlp.shared_experts.{x}": f"ffn.shared.{x}" for x in ("gate_proj", "up_proj", "down_proj")},
    **{f"self_attn.{x}": f"attention.{x}" for x in ("q_a_proj", "q_b_proj")},
    "self_attn.q_a_layernorm": "attention.q_a_norm",
    "self_attn.kv_a_proj_with_mqa": "attention.kv_a_proj",
    "self_attn.kv_a_layernorm": "attention.kv_a_norm",
    "self_attn.indexer.wq_b": "attention.indexer.q_proj",
    "self_attn.indexer.wk": "attention.indexer.k_proj",
    **{f"self_attn.indexer.{x}": f"attention.indexer.{x}" for x in ("k_norm", "weights_proj")},
    "mlp.shared_expert_gate": "ffn.shared_gate",
    "mlp.gate": "ffn.router",
    "block_sparse_moe.gate": "ffn.router",
    "ln_1": "attention_norm",
    "ln_2": "ffn_norm",
    "attn.c_proj": "attention.o_proj",
    "mlp.c_fc": "ffn.up_proj",
    "mlp.c_proj": "ffn.down_proj",
}
_NORMS = {
    "pre": {"input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm"},
    "post": {"post_attention_layernorm": "attention_norm", "post_feedforward_layernorm": "ffn_norm"},
    "sandwich": {
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "attention_post_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "ffn_post_norm",
    },
}
_LAYER = re.compile(r"(?:layers|h)\.(\d{1,5})\.(.+)\.(\w+)")
_EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d{1,6})\.(\w+)")
_EXPERT_PARTS = {"w1": "gate", "w3": "up", "w2": "down", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


def tensors_from_hf(config: ModelConfig, tensors: Mapping[str, torch.Tensor] | Iterable[Named]) -> Iterator[Named]:
    """Yield ``(labkit name, tensor)`` for a checkpoint's tensors, in the order they come.

    A name that means nothing to this family is passed on unchanged, so that the loader can report it. Fused
    weights (Phi-3's qkv, GPT-2's c_attn) become views; experts stored one by one are stacked once all are seen. A tied
    model has one matrix, which some files store as ``lm_head.weight`` only.
    """
    pairs: Iterable[Named] = tensors.items() if isinstance(tensors, Mapping) else tensors  # type: ignore[assignment]
    experts = ExpertStack(config)
    head: Named | None = None
    has_embedding = False
    for name, tensor in pairs:
        if _IGNORED.search(name):
            continue
        short = _unwrapped(name)
        if config.tied_embeddings and short == "lm_head.weight":
            head = name, tensor
            continue
        has_embedding |= _TOP.get(short) == "embedding.weight"
        match = _LAYER.fullmatch(short)
        if match is None:
            yield _TOP.get(short, name), tensor
            continue
        layer_idx, module, kind = int(match[1]), match[2], match[3]
        if layer_idx >= config.n_layers:
            if not config.family.startswith("deepseek"):  # theirs: a layer that drafts, beside the model
                yield name, tensor
            continue
        yield from _layer_tensors(config, experts, layer_idx, module, kind, name, tensor)
    yield from experts.leftovers()
    if head is not None and not has_embedding:  # the one matrix, saved under its other name
        yield "embedding.weight", head[1]


def to_hf(config: ModelConfig, name: str) -> str:
    """The name that transformers gives to labkit's tensor or module ``name``, in models that store nothing fused; one
    that ``tensors_from_hf`` reads back for every family."""
    layer = re.fullmatch(r"layers\.(\d+)\.([\w.]+?)(\.(?:weight|bias)\w*)?", name)
    if layer is None:
        module, dot, kind = name.rpartition(".")
        stem = {"embedding": "embed_tokens", "positions": "wpe", "final_norm": "norm"}.get(module)
        return f"model.{stem}.{kind}" if stem else f"lm_head{dot}{kind}" if module == "head" else name
    back = {own: theirs for theirs, own in reversed(_MODULES.items())}
    back |= {own: theirs for theirs, own in _NORMS[config.layers[int(layer[1])].norms].items()}
    return f"model.layers.{layer[1]}.{back[layer[2]]}{layer[3] or ''}"


def _unwrapped(name: str) -> str:
    wrapper = next((prefix for prefix in _WRAPPERS if name.startswith(prefix)), "")
    return name[len(wrapper) :]


def _layer_tensors(
    config: ModelConfig,
    experts: ExpertStack,
    layer_idx: int,
    module: str,
    kind: str,
    name: str,
    tensor: torch.Tensor,
) -> Iterator[Named]:
    layer, at = config.layers[layer_idx], f"layers.{layer_idx}."
    if config.family == "gpt2" and module.endswith(("c_attn", "c_proj", "c_fc")) and kind == "weight":
        tensor = tensor.t()  # Conv1D stores (in, out)
    expert = _EXPERT.fullmatch(module)
    if module == "attn.c_attn" or module == "self_attn.qkv_proj":
        yield from split_qkv(config, layer_idx, kind, name, tensor)
    elif module == "mlp.gate_up_proj" and isinstance(layer.ffn, DenseFFN):
        yield from split_rows(tensor, name, {f"{at}ffn.{x}_proj.{kind}": layer.ffn.d_ff for x in ("gate", "up")})
    elif module == "self_attn.kv_b_proj" and isinstance(layer.attention, LatentAttention):
        yield from _split_latent(layer.attention, f"{at}attention.", name, tensor)
    elif module == "mlp.gate" and kind == "e_score_correction_bias":
        yield f"{at}ffn.choice_bias", tensor
    elif expert and expert[2] in _EXPERT_PARTS and isinstance(layer.ffn, MoEFFN):
        yield from experts.add(layer_idx, int(expert[1]), _EXPERT_PARTS[expert[2]], name, tensor)
    elif module in ("mlp.experts", "block_sparse_moe.experts") and isinstance(layer.ffn, MoEFFN):
        yield from _stacked_experts(layer.ffn, at, kind, name, tensor)
    else:
        own = _MODULES.get(module) or _NORMS[layer.norms].get(module)
        yield (f"{at}{own}.{kind}" if own else name), tensor


def _stacked_experts(ffn: MoEFFN, at: str, kind: str, name: str, tensor: torch.Tensor) -> Iterator[Named]:
    """Experts already stacked: ``down_proj`` (E, M, F) and ``gate_up_proj`` (E, 2F, M)."""
    if kind == "gate_up_proj" and tensor.ndim == 3 and tensor.shape[1] == 2 * ffn.d_ff:
        gate, up = tensor.split(ffn.d_ff, dim=1)
        yield f"{at}ffn.experts.gate", gate
        yield f"{at}ffn.experts.up", up
    else:
        yield (f"{at}ffn.experts.down" if kind == "down_proj" else name), tensor


def split_qkv(config: ModelConfig, layer_idx: int, kind: str, name: str, tensor: torch.Tensor) -> Iterator[Named]:
    """A fused projection (H*D + 2*G*D, M), or its bias, as q, k and v."""
    attention = config.layers[layer_idx].attention
    if not isinstance(attention, GroupedAttention):
        yield name, tensor
        return
    n_q, n_kv = attention.n_heads * attention.d_head, attention.n_kv_heads * attention.d_head
    at = f"layers.{layer_idx}.attention."
    parts = {f"{at}q_proj.{kind}": n_q, f"{at}k_proj.{kind}": n_kv, f"{at}v_proj.{kind}": n_kv}
    yield from split_rows(tensor, name, parts)


def _split_latent(attention: LatentAttention, at: str, name: str, tensor: torch.Tensor) -> Iterator[Named]:
    """What makes keys and values of a latent, (H (N + V), L), head by head: (H, N, L) and (H, V, L)."""
    widths = [attention.d_nope, attention.d_value]
    rows = attention.n_heads * sum(widths)
    if tuple(tensor.shape) != (rows, attention.d_latent):
        raise ValueError(
            f"tensor {name} is {tuple(tensor.shape)}, but the config asks for {(rows, attention.d_latent)}."
        )
    k_up, v_up = tensor.unflatten(0, (attention.n_heads, -1)).split(widths, dim=1)
    yield from ((f"{at}k_up", k_up), (f"{at}v_up", v_up))


def split_rows(tensor: torch.Tensor, name: str, parts: dict[str, int]) -> Iterator[Named]:
    """Cut ``tensor`` along its rows. A wrong total is a wrong shape, named with the numbers."""
    rows = sum(parts.values())
    if tensor.ndim == 0 or tensor.shape[0] != rows:
        raise ValueError(
            f"tensor {name} has shape {tuple(tensor.shape)}, but the config asks for {rows} rows "
            f"({' + '.join(map(str, parts.values()))}). The config and the weights belong to different models."
        )
    yield from zip(parts, tensor.split(list(parts.values())), strict=True)


class ExpertStack:
    """Collects experts that are stored one by one until a layer's set is complete."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._waiting: dict[tuple[int, str], dict[int, Named]] = {}

    def add(self, layer_idx: int, expert_idx: int, part: str, name: str, tensor: torch.Tensor) -> Iterator[Named]:
        """Yields the stacked (E, ...) tensor when the last expert of the layer has come."""
        ffn = self._config.layers[layer_idx].ffn
        assert isinstance(ffn, MoEFFN)
        if expert_idx >= ffn.n_experts:
            yield name, tensor
            return
        waiting = self._waiting.setdefault((layer_idx, part), {})
        waiting[expert_idx] = (name, tensor)
        if len(waiting) == ffn.n_experts:
            del self._waiting[(layer_idx, part)]
            shapes = {tuple(tensor.shape) for _, tensor in waiting.values()}
            if len(shapes) > 1:
                raise ValueError(f"layer {layer_idx}: the experts' {part} weights differ in shape: {sorted(shapes)}.")
            yield f"layers.{layer_idx}.ffn.experts.{part}", torch.stack([waiting[i][1] for i in sorted(waiting)])

    def leftovers(self) -> Iterator[Named]:
        """Raises ValueError that names the first missing expert of an incomplete layer."""
        for (layer_idx, part), waiting in self._waiting.items():
            ffn = self._config.layers[layer_idx].ffn
            assert isinstance(ffn, MoEFFN)
            lacking = next(i for i in range(ffn.n_experts) if i not in waiting)
            raise ValueError(
                f"layer {layer_idx}: expert {lacking} of {ffn.n_experts} has no {part} weight in this checkpoint."
            )
        return iter(())
