"""Measures one model over length traces; `tools/bench_gpu.py` starts it as its own process.

    python tools/benching/gpu_model.py OUT.json SECONDS CONFIG TOKENS [section.key=value ...]
        [--trace FILE.csv ...] [--rounds 7]

OUT.json is rewritten after each trace, so that measurements survive if a later trace fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import logging
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megapack import Layout, launch
from megapack.config import load_config
from megapack.job.config.sections import ModelConfig, TrainConfig
from megapack.job.data.tokenizer import ByteTokenizer
from megapack.job.gpt import build_model, initialize_parallel
from megapack.model.attention.choice import choose_attention
from tools.benching.gpu_ways import (
    MODES,
    DenseWay,
    PackedWay,
    Sample,
    equal_batches,
    host_seconds,
    padded_batches,
    seconds_of,
)
from tools.benching.model_flops import forward_flops, peak_flops

logger = logging.getLogger("bench_gpu")
Way = PackedWay | DenseWay
HOST_ROUNDS = 3


def trace_lengths(path: Path | None) -> list[Sample]:
    """(prompt, response) tokens of a trace, shuffled with a fixed seed.

    None generates a trace: log-normal with a median of about 1,100 tokens.
    """
    rng = np.random.default_rng(0)
    if path is None:
        lengths = np.clip(rng.lognormal(7, 1, 4096), 16, 65536).astype(int)
        return [(length // 8, length - length // 8) for length in lengths.tolist()]
    columns = np.loadtxt(path, delimiter=",", skiprows=1, dtype=np.int64, ndmin=2)
    return [(int(p), int(r)) for p, r in rng.permutation(columns)[:, :2]]


def pick(samples: Sequence[Sample], num_tokens: int, max_length: int) -> list[Sample]:
    """The first samples that together have at least `num_tokens`, each cut to `max_length`."""
    picked: list[Sample] = []
    for prompt, response in samples:
        kept = min(prompt, max_length // 2)
        picked.append((kept, max(1, min(response, max_length - kept))))
        if sum(map(sum, picked)) >= num_tokens:
            break
    return picked


def build(model: ModelConfig, attention: str) -> list[Any]:
    """The model with the given attention, and with Megatron's own initialization on the device.

    Initialization by parameter names takes minutes for billions of parameters.
    """
    with mock.patch("megapack.job.gpt.build.initialize_by_name"):
        return build_model(
            dataclasses.replace(model, attention=attention),
            Layout(),
            vocab_size=_vocab_size(model),
            seed=1,
            distributed_optimizer=False,
        )


class Ways:
    """The ways of running one trace. One that fails is recorded and the others go on."""

    def __init__(self, config: TrainConfig, models: dict[str, Any], samples: list[Sample]) -> None:
        self.made: dict[str, Way] = {}
        self.results: dict[str, dict[str, Any]] = {}
        budget = config.plan.max_tokens_per_gpu
        assert budget is not None
        forward_budget = config.plan.forward_max_tokens_per_gpu or budget
        main = next(iter(models))
        common = {
            "vocab_size": _vocab_size(config.model),
            "chunk_tokens": config.objective.logprob_chunk_tokens,
        }

        def packed(name: str, attention: str, budget: dict[str, int], forward: dict[str, int]):
            chunks = models[attention]
            if isinstance(chunks, str):
                raise RuntimeError(chunks)
            sizes = {"budget": budget, "forward_budget": forward}
            return PackedWay(name, chunks, samples, **common, **sizes)

        def dense(name: str, cut: Callable[[int], list[list[Sample]]]) -> DenseWay:
            both = {"batches": cut(budget), "forward_batches": cut(forward_budget)}
            return DenseWay(name, models[main], unpacked=main == "te", **common, **both)

        one = {"micro_batch_size": 1}
        self._add("one sample", lambda name: packed(name, main, one, one))
        self._add("padded", lambda name: dense(name, lambda size: padded_batches(samples, size)))
        rows = ({"max_tokens_per_gpu": budget}, {"max_tokens_per_gpu": forward_budget})
        for attention in models:
            self._add(f"packed, {attention}", lambda name, a=attention: packed(name, a, *rows))
        self._add("dense", lambda name: dense(name, lambda size: equal_batches(samples, size)))

    def _add(self, name: str, make: Callable[[str], Way]) -> None:
        self.results[name] = {"warmup_seconds": {}, "seconds": {mode: [] for mode in MODES}}
        way = self._guarded(name, lambda: make(name))
        if way is not None:
            self.made[name] = way

    def _guarded(self, name: str, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except Exception as error:  # recorded: the other ways go on
            logger.exception("%s failed", name)
            self.results[name]["error"] = f"{type(error).__name__}: {str(error)[:500]}"
            self.made.pop(name, None)
        gc.collect()
        torch.cuda.empty_cache()
        return None

    def warm_up(self) -> None:
        """Run every mode once, to choose and compile kernels and to find the peak memory."""
        for name in list(self.made):
            _reset_peak()
            for mode in MODES:
                if name in self.made:
                    run = getattr(self.made[name], mode)
                    seconds = self._guarded(name, lambda run=run: seconds_of(run))
                    self.results[name]["warmup_seconds"][mode] = seconds
                if mode == "train":
                    self.results[name]["peak_bytes"] = _peak_bytes()

    def measure(self, until: float, rounds: int) -> None:
        """Time every way in every mode, round by round; at least one round, at most `rounds`.

        A device that slows down then slows all ways.
        """
        slowest = 0.0
        for number in range(rounds):
            started = time.monotonic()
            if number and started + slowest > until:
                return
            for mode in MODES:
                for name in list(self.made):
                    run = getattr(self.made[name], mode)
                    seconds = self._guarded(name, lambda run=run: seconds_of(run))
                    if seconds is not None:
                        self.results[name]["seconds"][mode].append(seconds)
            slowest = max(slowest, time.monotonic() - started)

    def host(self) -> dict[str, Any] | None:
        """Host time of the first packed way over several steps: planning, and the adapter."""
        name = next((name for name in self.made if name.startswith("packed")), None)
        if name is None:
            return None
        way = self.made[name]
        rounds = self._guarded(name, lambda: [host_seconds(way) for _ in range(HOST_ROUNDS)])
        if rounds is None:
            return None
        planning, adapter = zip(*rounds, strict=True)
        counts = {"num_microbatches": way.num_microbatches}
        return {"way": name, **counts, "planning_seconds": planning, "adapter_seconds": adapter}


def run_trace(
    config: TrainConfig,
    models: dict[str, Any],
    trace: Path | None,
    tokens: int,
    until: float,
    rounds: int,
) -> dict[str, Any]:
    """Results of all ways over one trace."""
    samples = pick(trace_lengths(trace), tokens, config.data.max_length or tokens)
    sizes = config.model
    ways = Ways(config, models, samples)
    ways.warm_up()
    ways.measure(until, rounds)
    for name, way in ways.made.items():
        ways.results[name] |= {
            "num_samples": len(way.samples),
            "num_microbatches": way.num_microbatches,
            "tokens": sum(map(sum, way.samples)),
            "row_tokens": way.row_tokens,
            "forward_flops": forward_flops(sizes, way.samples),
        }
        if isinstance(way, PackedWay):
            ways.results[name]["predicted_bytes"] = predicted_bytes(config, way)
    return {
        "trace": "generated" if trace is None else trace.stem,
        "num_samples": len(samples),
        "tokens": sum(map(sum, samples)),
        "response_tokens": sum(r for _, r in samples),
        "longest": max(map(sum, samples)),
        "max_tokens_per_gpu": config.plan.max_tokens_per_gpu,
        "ways": ways.results,
        "host": ways.host(),
    }


def predicted_bytes(config: TrainConfig, way: PackedWay) -> int:
    """What a forward and backward of the longest row takes beside weights and gradients, by the
    memory model of dry runs and `tune`."""
    longest = way.longest_row
    memory = config.memory_model().stage(Layout(), 0, live_tokens=longest, row_tokens=longest)
    return memory.activations + memory.head


def build_all(model: ModelConfig) -> dict[str, Any]:
    """Model chunks by attention, the best first; for a later one that fails, its error message."""
    main = choose_attention(model.attention, model.dtype)
    models: dict[str, Any] = {main: build(model, main)}
    if main == "te":
        try:
            models["varlen"] = build(model, "varlen")
        except Exception as error:  # recorded with the way that needs it
            models["varlen"] = f"{type(error).__name__}: {str(error)[:500]}"
    return models


def describe(config: TrainConfig, chunks: list[Any]) -> dict[str, Any]:
    """The model and the device."""
    cuda = config.device == "cuda"
    device = torch.cuda.get_device_name() if cuda else "cpu"
    return {
        "model": config.name,
        "parameters": sum(p.numel() for chunk in chunks for p in chunk.parameters()),
        "recompute": config.model.recompute,
        "dtype": config.model.dtype,
        "device": device,
        "peak_flops": peak_flops(device),
        "static_bytes": torch.cuda.memory_allocated() if cuda else None,
        "cells": [],
    }


def _vocab_size(model: ModelConfig) -> int:
    assert model.vocab_size is not None
    return model.vocab_size


def _reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def _peak_bytes() -> int | None:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("seconds", type=float, help="all traces together")
    parser.add_argument("config", type=Path)
    parser.add_argument("tokens", type=int, help="per step")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--trace", type=Path, action="append")
    parser.add_argument("--rounds", type=int, default=7, help="at most, for each trace")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    config = load_config(options.config, options.overrides, TrainConfig)
    launch.quiet_known_warnings()
    launch.start(config.device)
    initialize_parallel(Layout(), seed=1)
    vocab_size = config.model.vocab_size or ByteTokenizer().vocab_size
    model = dataclasses.replace(config.model, vocab_size=vocab_size)
    config = dataclasses.replace(config, model=model)
    models = build_all(model)
    found = describe(config, next(iter(models.values())))
    traces = options.trace or [None]
    for number, trace in enumerate(traces):
        now = time.monotonic()
        until = now + (end - now) / (len(traces) - number)
        found["cells"].append(
            run_trace(config, models, trace, options.tokens, until, options.rounds)
        )
        options.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
    launch.stop()


if __name__ == "__main__":
    main()
