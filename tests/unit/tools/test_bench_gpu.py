"""The GPU benchmark's FLOP counts, batches and report; tests/slow runs the measurement itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megapack.job.config.sections import ModelConfig
from tools.benching import gpu_ways
from tools.benching.gpu_report import FORWARDS, REHEARSED, markdown
from tools.benching.model_flops import forward_flops
from tools.pages.measured import Head

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


def report() -> dict[str, Any]:
    """A report of one GPU without figures."""
    host = {
        "num_microbatches": 4,
        "planning_seconds": [0.01, 0.02, 0.9],
        "adapter_seconds": [0.06, 0.06, 0.06],
    }
    cell = {"trace": "lengths", "num_samples": 3, "tokens": 1000, "response_tokens": 600}
    names = ("one sample", "padded", "packed, te", "dense")
    ways = {name: {"seconds": {mode: [] for mode in FORWARDS}} for name in names}
    cell |= {"longest": 500, "max_tokens_per_gpu": 512, "ways": ways, "host": host}
    model = {"model": "toy", "device": "gpu", "peak_flops": 1e12, "parameters": 2e9}
    model |= {"dtype": "bf16", "recompute": "none", "cells": [cell]}
    about = {"command": "bench", "date": "2026-01-02", "commit": "1234567"}
    return {**about, "packages": {"torch": "2"}, "models": [model]}


def test_a_report_is_a_file_of_measured_tables(tmp_path: Path) -> None:
    for changes, says in (({}, "Single kernels"), ({"rehearsed": True}, REHEARSED)):
        path = tmp_path / "h200_1.md"
        path.write_text(markdown(report() | changes))
        head = Head.read(path)
        assert (head.title, head.date, head.commit) == ("Check of one gpu", "2026-01-02", "1234567")
        assert head.what.startswith(says)
        assert "| packed, te | not measured |" in path.read_text()
