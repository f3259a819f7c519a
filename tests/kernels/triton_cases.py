"""Run in a process of its own with TRITON_INTERPRET=1: every Triton kernel against plain PyTorch, on CPU tensors."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from labkit.kernels import ops
from labkit.kernels.triton import attention, elementwise, product, sampling, unpack
from labkit.kernels.triton.product import Matrix
from labkit.model.config import Norm
from labkit.model.norm import RMSNorm
from labkit.quant import grid
from labkit.quant.linear import Int4Linear, Int8Linear
from tests.kernels import triton_blocks


def close(got, wanted, tolerance=1e-5):
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


def rms_norm(device):
    for width, unit_offset in ((64, False), (100, True)):
        x, w = torch.randn(3, width, device=device), torch.randn(width, device=device)
        got = elementwise.rms_norm(x, w, 1e-5, unit_offset=unit_offset)
        close(got, ops.rms_norm(x, w, 1e-5, unit_offset=unit_offset))


def rotate_append(device):
    for layout, turned in (("half", 16), ("interleaved", 16), ("half", 8)):
        q, k, v = (torch.randn(2, n, 16, device=device) for n in (4, 2, 2))
        cos, sin = torch.randn(2, turned // 2, device=device), torch.randn(2, turned // 2, device=device)
        caches = [torch.zeros(2, 9, 16, device=device) for _ in range(2)]
        positions = torch.tensor([5, 6], device=device)
        got = elementwise.rotate_append(q, k, v, cos, sin, positions, *caches, layout=layout)
        close(got, ops.rotate(q, cos, sin, layout=layout))
        close(caches[0][:, 5:7], ops.rotate(k, cos, sin, layout=layout).transpose(0, 1))
        close(caches[1][:, 5:7], v.transpose(0, 1))
        assert not caches[0][:, :5].any()
        assert not caches[0][:, 7:].any()


def gate(device):
    g, u = torch.randn(2, 700, device=device), torch.randn(2, 700, device=device)
    close(elementwise.gate(g, u), F.silu(g) * u)


def attend_one(device):
    """Queries and the new key turned, the new entry stored, attention over all: against the same in plain PyTorch."""
    options = ({}, {"window": 7}, {"window": 40, "n_sinks": 2}, {"softcap": 5.0})
    for n_past in (0, 63, 64, 89):
        for at, option in enumerate(options):
            layout, turned = ("half", 16) if at % 2 else ("interleaved", 8)
            qkv = torch.randn(6 + 2 + 2, 16, device=device)
            cos, sin = (torch.randn(96, turned // 2, device=device) for _ in range(2))
            caches = [torch.randn(2, 96, 16, device=device) for _ in range(2)]
            wanted_caches = [cache.clone() for cache in caches]
            norms = [RMSNorm(16, Norm(eps=1e-5)).to(device) for _ in range(2)] if at == 3 else [None, None]
            for norm in norms[: 2 * (at == 3)]:
                norm.weight.normal_()
            q, k, v = qkv[None].split((6, 2, 2), dim=1)
            if at == 3:
                q, k = norms[0](q), norms[1](k)
            here = cos[n_past : n_past + 1], sin[n_past : n_past + 1]
            q, k = (ops.rotate(heads, *here, layout=layout) for heads in (q, k))
            wanted_caches[0][:, n_past], wanted_caches[1][:, n_past] = k[0], v[0]
            seen = [cache[:, : n_past + 1] for cache in wanted_caches]
            wanted = ops.attend(q, *seen, n_past=n_past, scale=0.3, **option)
            scratch = attention.Scratch(6, 2, 16, 96, device)
            out, position = torch.full((6 * 16,), torch.nan, device=device), torch.tensor([n_past], device=device)
            for _ in range(2):  # the second finds the counters where the first has left them
                attention.attend_one(
                    qkv.flatten(), cos, sin, position, *caches, out, scratch, n_heads=6, scale=0.3, layout=layout,
                    q_norm=norms[0], k_norm=norms[1], **option,
                )  # fmt: skip
            close(out.view(1, 6, 16), wanted, 1e-4)
            for cache, wanted_cache in zip(caches, wanted_caches, strict=True):
                close(cache, wanted_cache)


def linears(n_out, n_in, device):
    """The same shape in every form that weights are stored in, each with its bias."""
    weight, bias = torch.randn(n_out, n_in), torch.randn(n_out)
    plain = torch.nn.Linear(n_in, n_out).requires_grad_(False)
    plain.weight.copy_(weight)
    forms = [plain, Int8Linear(*grid.round_int8(weight), bias)]
    for group, symmetric in ((32, False), (64, True), (128, False)):
        if n_in % group == 0:
            forms.append(Int4Linear(*grid.round_int4(weight, group, symmetric=symmetric), bias))
    return [form.to(device) for form in forms]


def dense(form):
    return form.dequantize() if hasattr(form, "dequantize") else form.weight


def project(device):
    """Three matrices of different heights behind a norm, one added to a residual, and several tokens at once."""
    for n_in in (96, 1152):
        norm = RMSNorm(n_in, Norm(eps=1e-5, unit_offset=n_in == 96)).to(device)
        norm.weight.normal_()
        for forms in zip(*(linears(n_out, n_in, device) for n_out in (9, 4, 5)), strict=True):
            x, residual = torch.randn(2, n_in, device=device), torch.randn(2, 9, device=device)
            matrices = [Matrix.of(form) for form in forms]
            wanted = torch.cat([F.linear(norm(x), dense(form), form.bias) for form in forms], dim=1)
            got = product.project(x, matrices, torch.full_like(wanted, torch.nan), norm=norm)
            close(got, wanted, 1e-3)
            wanted = residual + F.linear(x, dense(forms[0]), forms[0].bias)
            close(product.project(x, matrices[:1], residual, residual=residual), wanted, 1e-3)


def gated(device):
    for n_in in (96, 1152):
        norm = RMSNorm(n_in, Norm(eps=1e-5)).to(device)
        norm.weight.normal_()
        for gate, up in zip(linears(9, n_in, device), linears(9, n_in, device), strict=True):
            x = torch.randn(n_in, device=device)
            g, u = (F.linear(norm(x), dense(form), form.bias) for form in (gate, up))
            got = product.gated(x, Matrix.of(gate), Matrix.of(up), torch.full_like(g, torch.nan), norm=norm)
            close(got, F.silu(g) * u, 1e-3)


def unpacked(device):
    for n_tokens in (3, unpack.FEW_TOKENS + 1):
        for form in linears(9, 384, device)[1:]:
            x = torch.randn(n_tokens, 384, device=device)
            close(unpack.linear(Matrix.of(form), x), F.linear(x, dense(form), form.bias), 1e-3)
            close(unpack.unpack(Matrix.of(form), torch.float32), dense(form))


def lookup(device):
    for form in linears(21, 640, device):
        out, token = torch.full((640,), torch.nan, device=device), torch.tensor([18], device=device)
        close(sampling.lookup(Matrix.of(form), token, out, 2.0), 2 * dense(form)[18])


def choose(device):
    logits = torch.randn(3000, device=device)
    logits[[7, 2500]] = 9.0  # a tie: the first wins, as in torch
    token, position = (torch.tensor([n], device=device) for n in (0, 4))
    history = torch.zeros(9, dtype=torch.int64, device=device)
    sampling.Chooser(3000, device)(logits, token, position, history)
    assert int(token) == int(logits.argmax()) == 7
    assert int(position) == 5
    assert history.tolist() == [0, 0, 0, 0, 0, 7, 0, 0, 0]
    for damage in (torch.nan, torch.inf):  # no choice, and the next step still has a row to look up
        logits[2000] = damage
        sampling.Chooser(3000, device)(logits, token, position, history)
        assert int(token) == -1
    table = linears(21, 640, device)[0]
    out = torch.full((640,), torch.nan, device=device)
    close(sampling.lookup(Matrix.of(table), token, out), dense(table)[0])


def step(device):
    """The captured step (without a graph on a CPU) against the model's own forward, and its own greedy loop."""
    from labkit import backends, registry
    from labkit.backends.graph_step import GraphStep
    from labkit.kvcache.contiguous import ContiguousCache
    from labkit.perf.timer import NULL_TIMER
    from labkit.quant import Int4
    from tests.kernels.families import FAMILIES, random_model

    for weights, family in ((None, "sinks"), (Int4(32), "partial, interleaved"), (Int4(32, head="int4"), "qwen3")):
        config = FAMILIES[family]
        layers = tuple(replace(layer, ffn=replace(layer.ffn, activation="silu")) for layer in config.layers[:1])
        transformer = random_model(replace(config, layers=layers))
        if weights is not None:
            transformer = registry.find("weights", weights)[0].build(weights, transformer=transformer)
        transformer.to(device)
        caches = [ContiguousCache(transformer.cache_entries, capacity_tokens=16, device=device) for _ in range(2)]
        steps = [GraphStep(transformer, caches[0]), backends.ReferenceStep(transformer, caches[1])]
        ids, options = torch.arange(10, device=device), {"timer": NULL_TIMER, "should_stop": lambda: False}
        with torch.inference_mode():
            for at in (slice(0, 9), slice(9, 10)):
                got, wanted = (step(ids[at], **options) for step in steps)
                close(got, wanted, 1e-3)
            start = token = wanted.argmax(-1)
            chosen = []
            for _ in range(2):
                token = steps[1](token, **options).argmax(-1)
                chosen.append(int(token))
            assert steps[0].decode_many(start, 2).tolist() == chosen


def look_ahead(device):
    """The captured step choosing by itself, a step ahead or not, asked for its own token or another's."""
    from labkit import backends
    from labkit.backends.graph_step import GraphStep
    from labkit.kvcache.contiguous import ContiguousCache
    from labkit.perf.timer import NULL_TIMER
    from tests.kernels.families import FAMILIES, random_model

    config = FAMILIES["llama"]
    transformer = random_model(replace(config, layers=config.layers[:1])).to(device)
    caches = [ContiguousCache(transformer.cache_entries, capacity_tokens=14, device=device) for _ in range(2)]
    step, reference = GraphStep(transformer, caches[0]), backends.ReferenceStep(transformer, caches[1])
    options = {"timer": NULL_TIMER, "should_stop": lambda: False}
    with torch.inference_mode():
        for own in (step, reference):
            own(torch.arange(6, device=device), **options)
        token = 5
        replays, replay = [], step._replay
        step._replay = lambda: (replays.append(caches[0].n_tokens()), replay())
        # ahead, ahead, another token than was chosen, plain logits in between, ahead up to the cache's end, at its end;
        # then back to where a step ahead was queued once, after another token
        for kind in ("ahead", "ahead", "other", "alone", "logits", "ahead", "ahead", "ahead", "back", "ahead", "ahead"):
            if kind == "back":
                for cache in caches:
                    cache.truncate(11)
            token = 3 if kind in ("other", "back") else token
            wanted = int(reference(torch.tensor([token], device=device), **options).argmax(-1))
            if kind == "logits":
                got = int(step(torch.tensor([token], device=device), **options).argmax(-1))
            else:
                got = step.choose_next(token, more=kind != "alone", **options)()
            assert got == wanted, kind
            token = got
        assert caches[0].n_tokens() == caches[1].n_tokens() == 14
        # two, one, two (the one ahead was for another token), none (it was there), one, two, one, none
        assert [replays.count(n) for n in range(6, 11)] == [2, 1, 2, 0, 1]
        assert [replays.count(n) for n in range(11, 14)] == [2 + 2, 1 + 1, 0 + 0]
        caches[0].reset()
        transformer.final_norm.weight[:] = torch.nan
        step(torch.arange(2, device=device), **options)
        assert step.choose_next(2, more=True, **options)() == -1


CASES = [rms_norm, rotate_append, gate, attend_one, project, gated, unpacked, lookup, choose, step, look_ahead]
CASES += triton_blocks.CASES


def main(device="cpu", *names):
    """Every case, or those named."""
    if device == "cpu":  # fewer programs: the interpreter takes its time for each
        product.tile_for = lambda kind, n_out: product.Tile(
            16 if kind > 100 else 4, 256 if kind in (8, 16) else 1024, 1
        )
    with torch.inference_mode():
        for case in CASES:
            if not names or case.__name__ in names:
                torch.manual_seed(0)
                case(device)
                print(case.__name__, "ok", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
