"""GPTQ and AWQ beside independent float64 numpy: the published recipes, one column and one candidate at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from labkit.quant import AWQ, GPTQ, Grid, awq, form_of, gptq

T, K, N = 600, 192, 24


@pytest.fixture(autouse=True)
def one_thread():
    """Thousands of small operations: a second thread would only be waited for, on a busy machine for ever."""
    n = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n)


@pytest.fixture(scope="module")
def layer():
    """Weights, and activations that are correlated and have outlier channels and one dead input."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(T, K, generator=generator) @ (torch.eye(K) + 0.3 * torch.randn(K, K, generator=generator) / K**0.5)
    x[:, [5, 77, 130]] *= 12
    x[:, 40] = 0
    return torch.randn(N, K, generator=generator) * 0.05, x


def fitted(w: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Scale (float16, as it is stored) and zero point of each row of w, 0 inside the range."""
    low, high = np.minimum(w.min(1), 0), np.maximum(w.max(1), 0)
    scale = np.maximum((high - low) / (2**bits - 1), 6e-8).astype(np.float16).astype(np.float64)
    return scale, np.clip(np.round(-low / scale), 0, 2**bits - 1)


def rounded(w: np.ndarray, scale: np.ndarray, zero: np.ndarray, bits: int) -> np.ndarray:
    return scale * (np.clip(np.round(w / scale + zero), 0, 2**bits - 1) - zero)


def gptq_numpy(weight, x, bits, group, damping, act_order):
    """arXiv 2210.17323's algorithm without its blocks: every error goes to all later columns at once."""
    w, h = weight.double().numpy().copy(), x.double().numpy().T @ x.double().numpy()
    dead = np.diag(h) == 0
    h[dead, dead] = 1
    w[:, dead] = 0
    columns = np.argsort(-np.diag(h), kind="stable") if act_order else np.arange(K)
    static = [fitted(w[:, at : at + group], bits) for at in range(0, K, group)]
    h, w = h[columns][:, columns], w[:, columns]
    h += damping * np.diag(h).mean() * np.eye(K)
    upper = np.linalg.cholesky(np.linalg.inv(h)).T
    q = np.zeros_like(w)
    for k in range(K):
        if act_order:
            scale, zero = static[columns[k] // group]
        elif k % group == 0:
            scale, zero = fitted(w[:, k : k + group], bits)
        q[:, k] = rounded(w[:, k], scale, zero, bits)
        w[:, k + 1 :] -= np.outer((w[:, k] - q[:, k]) / upper[k, k], upper[k, k + 1 :])
    back = np.empty_like(q)
    back[:, columns] = q
    return back


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize(("bits", "group"), [(4, 64), (3, 32), (2, 64)])
def test_gptq_is_the_published_algorithm(layer, bits, group, act_order):
    weight, x = layer
    order = gptq.order_of(x.T @ x / T, damping=0.01, act_order=act_order)
    found = gptq.round_columns(weight, order, Grid(bits), group).dequantize().double().numpy()
    wanted = gptq_numpy(weight, x, bits, group, 0.01, act_order)
    # A weight that stands halfway between two points may fall either way in float32, and then its neighbours differ.
    same = np.isclose(found, wanted, atol=1e-6).mean()
    assert same > 0.97
    xs, w = x.double().numpy(), weight.double().numpy()
    ours, theirs = (np.square((w - q) @ xs.T).sum() for q in (found, wanted))
    assert abs(ours / theirs - 1) < 0.02


@pytest.mark.parametrize("kind", ["asymmetric", "symmetric", "minimum"])
@pytest.mark.parametrize("bits", [4, 3, 2])
def test_gptq_loses_less_of_the_output_than_rounding(layer, bits, kind):
    weight, x = layer
    hessian, grid = x.T @ x / T, Grid(bits, kind)
    plain = grid.nearest(weight, 64).dequantize()
    for act_order, clip in ((False, False), (True, False), (False, True), (True, True)):
        order = gptq.order_of(hessian, act_order=act_order)
        found = gptq.round_columns(weight, order, grid, 64, clip=clip).dequantize()
        lost, before = (gptq.output_error(weight, q, hessian) for q in (found, plain))
        true = ((weight - found) @ x.T).square().sum() / (weight @ x.T).square().sum()
        assert lost == pytest.approx(float(true), rel=1e-3)
        assert lost < 0.95 * before


@pytest.mark.parametrize("kind", ["asymmetric", "symmetric", "minimum"])
def test_a_searched_range_is_the_best_of_thirteen(kind):
    """By hand, in float64: each range's grid, each weight's error, weighed."""
    groups, importance = torch.randn(5, 32) ** 3, torch.rand(32) + 0.1
    grid = Grid(3, kind)
    found = grid.search(groups, importance)
    errors = []
    for n in range(13):
        low, high = groups.double().amin(1) * (1 - 0.04 * n), groups.double().amax(1) * (1 - 0.04 * n)
        if kind == "symmetric":
            scale, shift = torch.maximum(-low, high) / 3.5, None
        elif kind == "asymmetric":
            scale = (high.clamp_min(0) - low.clamp_max(0)) / 7
            shift = -torch.round(-low.clamp_max(0) / scale.half().double()) * scale.half().double()
        else:
            scale, shift = (high - low) / 7, low.half().double()
        scale = scale.half().double()
        shift = -4 * scale if shift is None else shift
        codes = torch.round((groups.double() - shift[:, None]) / scale[:, None]).clamp(0, 7)
        errors.append((((codes * scale[:, None] + shift[:, None]) - groups) ** 2 * importance).sum(1))
    chosen = grid.values(grid.round(groups, *found), *found)
    made = ((chosen - groups) ** 2 * importance).sum(1).double()
    torch.testing.assert_close(made, torch.stack(errors).amin(0), rtol=1e-3, atol=1e-6)
    whole = grid.fit(groups)
    assert made.sum() < ((grid.values(grid.round(groups, *whole), *whole) - groups) ** 2 * importance).sum()


def test_awq_scales_are_the_best_of_the_twenty(layer):
    weight, x = layer
    second = weight.flip(0) * 1.5
    hessian, mean_abs, grid = x.T @ x / T, x.abs().mean(0), Grid(3)
    scales, exponent = awq.search_scales([weight, second], hessian, mean_abs, grid, 64)
    xs, size = x.double().numpy(), np.maximum(mean_abs.double().numpy(), 1e-4)
    errors = {}
    for step in range(20):
        s = size ** (step / 20)
        s /= np.sqrt(s.max() * s.min())
        lost = 0.0
        for w in (weight.double().numpy(), second.double().numpy()):
            q = np.concatenate([_rows(p) for p in np.split(w * s, K // 64, axis=1)], axis=1)
            lost += np.square((q / s - w) @ xs.T).sum()
        errors[step / 20] = lost
    best = min(errors, key=errors.get)
    assert errors[exponent] <= errors[best] * 1.001
    assert exponent > 0
    s = size**exponent
    np.testing.assert_allclose(scales.numpy(), s / np.sqrt(s.max() * s.min()), rtol=1e-4)


def _rows(part: np.ndarray) -> np.ndarray:
    scale, zero = fitted(part, 3)
    return rounded(part, scale[:, None], zero[:, None], 3)


def test_awq_clips_each_group_where_its_own_output_errs_least(layer):
    weight, x = layer
    weight = weight.clone()
    weight[:, 3] *= 6  # an outlier that a small input meets
    hessian, grid = x.T @ x / T, Grid(3)
    clipped = awq.search_clip(weight, hessian, grid, 64)
    for row, group in ((0, 0), (7, 1), (20, 2)):
        at = slice(64 * group, 64 * group + 64)
        w, xs = weight[row, at].double().numpy(), x[:, at].double().numpy()
        lost = {}
        for step in range(10):
            limit = np.abs(w).max() * (1 - 0.05 * step)
            cut = np.clip(w, -limit, limit)
            lost[limit] = np.square(xs @ (_rows(cut[None])[0] - w)).sum()
        limit = float(clipped[row, at].abs().max())
        closest = min(lost, key=lambda found: abs(found - limit))
        assert limit == pytest.approx(closest, rel=1e-5)
        assert lost[closest] <= min(lost.values()) * 1.001


def test_a_calibrated_format_packs_nothing_without_its_text():
    with pytest.raises(ValueError, match="GPTQ chooses its integers by a text"):
        GPTQ().layer("x", nn.Linear(64, 4))
    assert form_of("gptq-int4") == form_of("awq-int4") == "int4"
    assert form_of(AWQ(3, 32)).bits == 3
    with pytest.raises(ValueError, match="not finite"):
        gptq.order_of(torch.full((4, 4), float("nan")))
