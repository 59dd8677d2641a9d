"""The GPU benchmark's FLOP counts, batches and report; tests/slow runs the measurement itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megapack.job.config.sections import ModelConfig
from tools.benching import gpu_report, gpu_ways
from tools.benching.model_flops import forward_flops

pytestmark = pytest.mark.unit


def test_flops_by_hand() -> None:
    model = ModelConfig(
        num_layers=3,
        hidden_size=8,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=4,
        ffn_hidden_size=10,
        vocab_size=100,
    )
    # Queries 8x16, keys and values 8x8 each, output 16x8, three of 8x10: 624 weights a layer.
    matrices = 2 * (8 * 16 + 2 * 8 * 8 + 16 * 8 + 3 * 8 * 10)
    head = 2 * 8 * 100
    # One sample of 5 + 3 tokens; 8^2 / 2 pairs, each two products of 4 heads of 4, twice.
    attention = 8**2 / 2 * 2 * 2 * 4 * 4
    sizes = model
    assert forward_flops(sizes, [(5, 3)]) == 3 * (8 * matrices + attention) + 3 * head
    # Samples do not attend to each other: twice the samples, twice the work.
    assert forward_flops(sizes, [(5, 3)] * 2) == 2 * forward_flops(sizes, [(5, 3)])


def test_dense_batches_predict_only_response_tokens() -> None:
    samples = [(2, 3), (0, 2), (4, 0)]
    batch = gpu_ways.dense_batch(samples, 50, torch.device("cpu"))
    assert batch.tokens_BS.shape == (3, 5)
    assert batch.loss_positions_R.tolist() == [1, 2, 3, 5]
    packed = gpu_ways.make_batch(samples, 50)
    wanted = torch.cat([packed.tokens(0)[2:], packed.tokens(1)[1:]])
    assert batch.labels_R.equal(wanted)


def way(seconds: float, tokens: int = 1000, **changes: Any) -> dict[str, Any]:
    modes = ("train", "forward", "logprobs")
    return {
        "seconds": {mode: [seconds, 5 * seconds, seconds / 2] for mode in modes},
        "tokens": tokens,
        "row_tokens": 2 * tokens,
        "num_microbatches": 4,
        "forward_flops": 2e12 * tokens / 1000,
        "peak_bytes": 3 * 2**30,
        **changes,
    }


def report(**ways: Any) -> dict[str, Any]:
    host = {
        "num_microbatches": 4,
        "planning_seconds": [0.01, 0.02, 0.9],
        "adapter_seconds": [0.06, 0.06, 0.06],
    }
    cell = {"trace": "lengths", "num_samples": 3, "tokens": 1000, "response_tokens": 600}
    cell |= {"longest": 500, "max_tokens_per_gpu": 512, "ways": ways, "host": host}
    model = {"model": "toy", "device": "gpu", "peak_flops": 1e12, "parameters": 2e9}
    model |= {"dtype": "bf16", "recompute": "none", "cells": [cell]}
    return {"command": "bench", "date": "2026-01-02", "packages": {"torch": "2"}, "models": [model]}


WAYS = {
    "one sample": way(8.0),
    "padded": way(5.0),
    "packed, te": way(2.0),
    "dense": way(1.9, tokens=900),
}


def test_the_report_uses_medians_and_real_tokens() -> None:
    text = gpu_report.markdown(report(**WAYS))
    assert "| padded | 4 | 0.500 | 200 | 200 | 1.200 | 200 | 3.0 |" in text
    assert "| packed over one sample | 4.0 or more | 4.00 |" in text
    assert "| packed over padded | 2.0 or more | 2.50 |" in text
    # 1000 tokens in 2.0 s against 900 in 1.9 s, each token of equal work here.
    share = (1000 / 2.0) / (900 / 1.9)
    assert f"| packed over dense, at equal FLOPs | 0.95 or more | {share:.3f} |" in text
    assert f"| host time over the step | below 0.02 | {0.08 / 2.02:.4f} |" in text
    assert "| adapter, host ms per micro-batch | - | 15.000 |" in text
    assert gpu_report.failures(report(**WAYS)) == []


def test_failures_are_named_and_not_measured() -> None:
    empty = {"seconds": {mode: [] for mode in ("train", "forward", "logprobs")}}
    found = report(**{**WAYS, "packed, te": {**empty, "error": "no kernel"}})
    found["models"][0]["cells"][0]["host"] = None
    found["models"].append({"model": "big", "cells": [], "error": "out of memory"})
    found["tests"] = {
        "te": {
            "fp32": {"error": "Traceback\nRuntimeError: wrong\nmore"},
            "bf16": {"logprob_mean_error": 0.004},
        }
    }
    text = gpu_report.markdown(found)
    row = "| packed, te | not measured | not measured | not measured | not measured |"
    assert row in text
    assert "| packed over padded | 2.0 or more | not measured |" in text
    assert gpu_report.failures(found) == [
        "toy, lengths, packed, te: no kernel",
        "big: out of memory",
        "tests, te, fp32: RuntimeError: wrong",
    ]
    assert "| te | bf16 | not measured | not measured | 4.0e-03 |" in text


def test_without_a_peak_there_is_no_mfu() -> None:
    found = report(**WAYS)
    found["models"][0]["peak_flops"] = None
    text = gpu_report.markdown(found)
    assert "peak unknown" in text
    assert "| padded | 4 | 0.500 | 200 | 200 | not measured | 200 | 3.0 |" in text
