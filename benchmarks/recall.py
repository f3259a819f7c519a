# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false
"""Recall against compression: train the tiny models of lesson 12, or measure the trained ones.

    python benchmarks/recall.py                      # measure what lies in data/recall
    python benchmarks/recall.py --train              # train what is missing there (under 15 minutes on two cores)
    python benchmarks/recall.py --train --kinds csa --seeds 0 --out /tmp/recall --steps 200

Each kind and seed is a run of its own, written when it is done: stop it at any time and start it again. Training
computes all sequences of a batch at once, with masks; what is measured runs through labkit's own modules and cache, and
the two are compared on the way.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from labkit.checkpoint import recall_toys as toys
from labkit.kernels import ops
from labkit.kvcache.none import NoCache
from labkit.model import rope as rotary
from labkit.model.attention.compressed import rotate_last
from labkit.model.transformer import Transformer
from labkit.perf.long_context import cache_nbytes
from labkit.resources import data_path

LOADS = (1, 4, 8, 16, 32)
BATCH, STEPS, LEARNING_RATE = 32, 400, 1e-2
HIDDEN = -1e9
"""A score that takes no weight; finite, so that a query without rows has a gradient."""


# --- a batch of sequences at once: x (B, T, M), masks (T, S) ----------------------------------------------


def seen_by(n: int, window: int | None) -> Tensor:
    at = torch.arange(n)
    return ops.visible(at, at, window=window)


def angles(config: Any, n: int, d_head: int) -> tuple[Tensor, Tensor]:
    return rotary.angles(config.rope, d_head, torch.arange(n), torch.float32)


def grouped(module: Any, x: Tensor, dense: bool) -> tuple[Tensor, Tensor]:
    config = module.config
    cos, sin = angles(config, x.shape[1], config.d_head)
    q, k, v = (
        project(x).unflatten(-1, (config.n_heads, -1)) for project in (module.q_proj, module.k_proj, module.v_proj)
    )
    q, k = ops.rotate(q, cos, sin), ops.rotate(k, cos, sin)
    out = F.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), attn_mask=seen_by(x.shape[1], config.window)
    )
    return module.o_proj(out.transpose(1, 2).flatten(2)), x.new_zeros(())


def latent(module: Any, x: Tensor, dense: bool) -> tuple[Tensor, Tensor]:
    config = module.config
    cos, sin = angles(config, x.shape[1], config.d_rope)
    q_c, q_r = (
        module.q_proj(x).unflatten(-1, (config.n_heads, config.d_head)).split([config.d_nope, config.d_rope], dim=-1)
    )
    kept, k_r = module.kv_a_proj(x).split([config.d_latent, config.d_rope], dim=-1)
    kept = module.kv_a_norm(kept)
    q_r, k_r = (ops.rotate(t, cos, sin, layout="interleaved") for t in (q_r, k_r[:, :, None]))
    k_c, v = torch.einsum("bsl,hnl->bshn", kept, module.k_up), torch.einsum("bsl,hvl->bshv", kept, module.v_up)
    q, k = torch.cat((q_c, q_r), -1), torch.cat((k_c, k_r.expand(-1, -1, config.n_heads, -1)), -1)
    out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True, scale=module.scale)
    return module.o_proj(out.transpose(1, 2).flatten(2)), x.new_zeros(())


def pooled(module: Any, x: Tensor) -> Tensor:
    """The rows of a compressor, (B, T / rate, D)."""
    kv, gate = (F.linear(x, weight).unflatten(1, (-1, module.rate)) for weight in (module.kv, module.gate))
    gate = gate + module.position_bias
    if module.overlap:
        (kv_next, kv_own), (gate_next, gate_own) = kv.chunk(2, dim=-1), gate.chunk(2, dim=-1)
        kv = torch.cat((F.pad(kv_next, (0, 0, 0, 0, 1, 0))[:, :-1], kv_own), dim=2)
        gate = torch.cat((F.pad(gate_next, (0, 0, 0, 0, 1, 0), value=HIDDEN)[:, :-1], gate_own), dim=2)
    rows = module.norm((kv * gate.softmax(2)).sum(2))
    at = torch.arange(rows.shape[1]) * module.rate
    cos, sin = rotary.angles(module.rope, rows.shape[-1], at, torch.float32)
    return rotate_last(rows[:, :, None], cos, sin)[:, :, 0]


def compressed(module: Any, x: Tensor, dense: bool) -> tuple[Tensor, Tensor]:
    """``dense``: every row is seen, and the indexer learns from where attention went; else only its choice is."""
    config, n = module.config, x.shape[1]
    cos, sin = angles(config, n, config.d_head)
    squeezed = module.q_a_norm(module.q_a_proj(x))
    q = module.q_b_proj(squeezed).unflatten(-1, (config.n_heads, config.d_head))
    q = rotate_last(F.rms_norm(q, (config.d_head,), eps=module.eps), cos, sin)
    kv = rotate_last(module.kv_norm(module.kv_proj(x))[:, :, None], cos, sin)[:, :, 0]
    rows = pooled(module.compressor, x)
    closed = torch.arange(rows.shape[1]) < (torch.arange(1, n + 1) // config.rate)[:, None]  # (T, rows)
    visible, wanted = closed, None
    if module.indexer is not None:
        indexer = module.indexer
        detached = x.detach()
        keys = pooled(indexer.compressor, detached)
        asked = rotate_last(
            indexer.q_proj(squeezed.detach()).unflatten(-1, (indexer.config.n_heads, indexer.config.d_head)), cos, sin
        )
        weights = indexer.weights_proj(detached) * (indexer.config.n_heads * indexer.config.d_head) ** -0.5
        scores = torch.einsum("bth,bths->bts", weights, torch.einsum("bthd,bsd->bths", asked, keys).relu())
        wanted = scores.masked_fill(~closed, HIDDEN)
        if not dense:
            chosen = wanted.topk(indexer.config.top_k, dim=-1).indices
            visible = torch.zeros_like(wanted, dtype=torch.bool).scatter_(2, chosen, True) & closed
    z = torch.einsum("bthd,bsd->bhts", q, torch.cat((kv, rows), 1)) * module.scale
    mask = torch.cat((seen_by(n, config.window).expand(len(x), -1, -1), visible.expand(len(x), -1, -1)), -1)
    z = z.masked_fill(~mask[:, None], HIDDEN)
    sink = module.sinks[:, None, None].expand(len(x), -1, n, 1)
    p = torch.cat((z, sink), -1).softmax(-1)[..., :-1]
    out = torch.einsum("bhts,bsd->bthd", p, torch.cat((kv, rows), 1))
    out = rotate_last(out, cos, -sin).flatten(2).unflatten(-1, (config.n_groups, -1))
    loss = x.new_zeros(())
    if wanted is not None:  # the indexer is taught where attention went among the rows (DeepSeek-V3.2, eq. 3)
        went = (p[..., n:].sum(1).detach() + 1e-6) * visible
        went = went / went.sum(-1, keepdim=True).clamp(min=1e-9)
        tell = wanted.masked_fill(~visible, HIDDEN).log_softmax(-1)
        asked_at = slice(toys.N_CONTEXT_TOKENS, None)
        loss = F.kl_div(tell[:, asked_at], went[:, asked_at], reduction="none").sum(-1).mean()
    return module.o_b_proj(torch.einsum("btgd,grd->btgr", out, module.o_a).flatten(2)), loss


FORMS = {"full": grouped, "sliding": grouped, "mla": latent, "csa": compressed, "hca": compressed}


def forward(model: Transformer, tokens: Tensor, kind: str, *, dense: bool = False) -> tuple[Tensor, Tensor]:
    """Logits of the questions (B, Q, V), and what the indexers still get wrong."""
    x, loss = model.embedding(tokens), torch.zeros(())
    for block in model.layers:
        added, wrong = FORMS[kind](block.attention, block.attention_norm(x), dense)
        x, loss = x + added, loss + wrong
        x = x + block.ffn(block.ffn_norm(x))
    return model.logits(model.final_norm(x[:, toys.N_CONTEXT_TOKENS :])), loss


# --- training and measuring -------------------------------------------------------------------------------


def new_model(kind: str, seed: int) -> Transformer:
    torch.manual_seed(seed)
    model = Transformer(toys.config(kind))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.fill_(1.0)
        elif parameter.ndim == 1 or name.endswith("bias"):
            parameter.data.zero_()
        else:
            parameter.data.normal_(0.0, 1.0 if name == "embedding.weight" else parameter.shape[-1] ** -0.5)
    # A fact's vector starts as its drawer's plus its value's, a question's as its drawer's plus that of asking. The
    # rest (to look for the drawer, to read the value, to keep facts apart in one row) is learnt.
    width = model.embedding.weight.shape[1]
    drawers, values, asking = (torch.randn(n, width) for n in (toys.N_KEYS, toys.N_VALUES, 1))
    n_facts = toys.N_KEYS * toys.N_VALUES
    model.embedding.weight.data[:n_facts] = (drawers[:, None] + values).flatten(0, 1)
    model.embedding.weight.data[n_facts : n_facts + toys.N_KEYS] = drawers + asking
    return model.requires_grad_(True)


def train(kind: str, seed: int, steps: int) -> Transformer:
    model, generator = new_model(kind, seed), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01, betas=(0.9, 0.98))
    started = time.perf_counter()
    for step in range(steps):
        share = step / steps
        scale = min(1.0, (step + 1) / 30) * (0.5 + 0.5 * math.cos(math.pi * share))
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * scale
        most = toys.N_KEYS if share > 0.3 else 8  # few facts first
        n_facts = int(torch.randint(1, most + 1, (1,), generator=generator))
        tokens, answers = toys.facts(n_facts, BATCH, generator)
        logits, wrong = forward(model, tokens, kind, dense=share < 0.6)
        loss = F.cross_entropy(logits.flatten(0, 1), answers.flatten())
        optimizer.zero_grad(set_to_none=True)
        (loss + wrong).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 25 == 0 or step == steps - 1:
            took = time.perf_counter() - started
            print(
                f"{kind}-{seed} {step:4d} loss {loss:.3f} ({n_facts} facts), indexer {wrong:.3f}, {took:.0f} s",
                flush=True,
            )
    return model.requires_grad_(False)


@torch.inference_mode()
def disagreement(model: Transformer, kind: str) -> float:
    """The largest difference of a logit between the batch with masks and labkit's modules, one sequence each."""
    tokens, _ = toys.facts(12, 4, torch.Generator().manual_seed(7))
    masked, _ = forward(model, tokens, kind)
    worst = 0.0
    for row, wanted in zip(tokens, masked, strict=True):
        own = model(row, NoCache(model.cache_entries, capacity_tokens=len(row)))[toys.N_CONTEXT_TOKENS :]
        worst = max(worst, float((own - wanted).abs().max()))
    return worst


def measured(kind: str, seed: int) -> dict[str, Any]:
    model = toys.load(kind, seed)
    nbytes = int(cache_nbytes(model.config, toys.N_CONTEXT_TOKENS))
    found = {n: toys.recall(model, n) for n in LOADS}
    return {"kind": kind, "seed": seed, "cache_bytes": nbytes, **{f"recall_{n}": share for n, share in found.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", action="store_true", help="train what is missing")
    parser.add_argument("--kinds", nargs="+", default=list(toys.KINDS), choices=list(toys.KINDS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(toys.SEEDS))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, default=None, help="where the weights go (data/recall)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    out = args.out or data_path("prompts").parent / "recall"
    if args.train:
        out.mkdir(parents=True, exist_ok=True)
        for seed in args.seeds:
            for kind in args.kinds:
                path = out / f"{kind}-{seed}.safetensors"
                if path.exists():
                    continue
                model = train(kind, seed, args.steps)
                print(f"{kind}-{seed}: batch and labkit differ by {disagreement(model, kind):.1e} at most", flush=True)
                part = path.with_suffix(".part")
                save_file({name: t.half().contiguous() for name, t in model.state_dict().items()}, str(part))
                part.rename(path)
    if args.out is None:
        rows = [measured(kind, seed) for kind in args.kinds for seed in toys.seeds(kind) if seed in args.seeds]
        print("kind     seed  cache bytes  recall of " + "  ".join(f"{n:>4} facts" for n in LOADS))
        for row in rows:
            shares = "  ".join(f"{row[f'recall_{n}']:>10.1%}" for n in LOADS)
            print(f"{row['kind']:<8} {row['seed']:>4}  {row['cache_bytes']:>11,}            {shares}")
        if args.json:
            args.json.write_text(json.dumps(rows, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
