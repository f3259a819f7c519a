"""Lesson 09's sentences follow its numbers, whichever way they go; its counted tables agree with arithmetic by hand."""

from __future__ import annotations

import pytest
import torch

from labkit.ui.panels import quantization, quantization_layers


def run(**changes):
    rows = {
        "unpacked": {"MB": 500.0, "perplexity": 10.0, "ms a token": 20.0, "computed by": "fused"},
        "stored": {"MB": 97.0, "perplexity": 10.0, "ms a token": 8.0, "computed by": "fused"},
        "int8": {"MB": 130.0, "perplexity": 10.1, "ms a token": 10.0, "computed by": "fused"},
        "int4": {"MB": 100.0, "perplexity": 13.0, "ms a token": 8.0, "computed by": "fused"},
        "int3": {"MB": 80.0, "perplexity": 30.0, "ms a token": 300.0, "computed by": "reference"},
    }
    for name, change in changes.items():
        rows[name] |= change
    return {"rows": [{"weights": name, **row} for name, row in rows.items()], "busy": False}


def test_speed_and_bytes_are_told_apart():
    said = " ".join(quantization.found(run()))
    assert "bytes fell 5.0 times, the time 2.5 times: something else" in said
    assert quantization.speed_gain(run()) == 2.5
    assert "time 5.0 times: here bytes are what binds" in " ".join(quantization.found(run(int4={"ms a token": 4.0})))
    assert "**no faster here**" in " ".join(quantization.found(run(int4={"ms a token": 21.0})))


def test_the_price_is_told_whether_it_is_high_or_not():
    assert "costs 30% of perplexity" in " ".join(quantization.found(run()))
    assert "97 MB and changes perplexity by +0.00%" in " ".join(quantization.found(run()))
    assert "changes perplexity by +1.0%" in " ".join(quantization.found(run(int4={"perplexity": 10.1})))
    assert "each step unpacks it first" in " ".join(quantization.found(run()))
    assert "it has a product of its own" in " ".join(quantization.found(run(int3={"computed by": "fused"})))
    assert "take the times as rough" in " ".join(quantization.found(run() | {"busy": True}))


def methods(gptq: float, awq: float, top: float):
    size = torch.ones(64)
    size[5] = top
    return {"bits": 3, "lost": {"q": {"RTN": 0.1, "GPTQ": gptq, "AWQ": awq}}, "size": size, "scales": size.sqrt()}


def test_who_loses_least_is_read_from_the_numbers():
    said = quantization_layers.judged(methods(0.05, 0.08, 20.0))
    assert said[0] == "At 3 bits the least is lost by **GPTQ** on q."
    assert "GPTQ loses 50% less than rounding" in said[1]
    assert "is 20 times the median one" in said[2]
    assert "**RTN** on q" in quantization_layers.judged(methods(0.2, 0.2, 1.0))[0]
    assert "neither beats plain rounding" in quantization_layers.judged(methods(0.2, 0.2, 1.0))[1]
    assert "few outliers" in quantization_layers.judged(methods(0.2, 0.2, 1.0))[2]


def test_the_figures_for_seven_billion():
    rows = quantization.sizes_of_7b()
    exact = [6_738_415_616 * bits / 8e9 for bits in (32, 16, 8, 4)]
    assert [row["parameters × bits, GB"] for row in rows] == pytest.approx(exact)
    layers = 32 * (4 * 4096**2 + 3 * 4096 * 11_008)
    file = layers * (4 + 24 / 128) / 8 + 2 * (6_738_415_616 - layers)  # a scale and a zero point for each 128
    assert rows[3]["with scales and a plain head, GB"] * 1e9 == pytest.approx(file, rel=1e-3)
