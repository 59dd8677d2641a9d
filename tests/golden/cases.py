"""The inputs of the golden plans."""

from __future__ import annotations

from typing import Any

from megapack import CostModel, Layout, Policy, SharedPrefixes

COST = CostModel(fixed=64.0, per_token=1.0, per_token_sq=1 / 12288)


def spread(count: int, longest: int) -> list[int]:
    """Irregular lengths from 1 to at most `longest`: many short, few long."""
    return [1 + (i * i * 7919 + 31 * i) % longest * ((i * 17) % 11 + 1) // 11 for i in range(count)]


def families(count: int, size: int, shared: int) -> SharedPrefixes:
    """`count` samples in families of `size`, which begin with `shared` common tokens."""
    common = [0 if i % size == 0 else shared for i in range(count)]
    return SharedPrefixes(tuple(range(count)), tuple(common))


# Few evaluations, so that the search without compiled kernels takes seconds.
FEW = {"search": 64}

CASES: dict[str, tuple[list[int], dict[str, Any]]] = {
    "dp4": (spread(40, 900), {"layout": Layout(dp=4), "max_tokens_per_gpu": 1024}),
    "dp2_pp4": (
        spread(48, 900),
        {"layout": Layout(dp=2, pp=4), "max_tokens_per_gpu": 1024, "cost": COST},
    ),
    "dp2_pp2_vpp2_groups": (
        spread(60, 700),
        {
            "layout": Layout(dp=2, pp=2, vpp=2, microbatch_group_size=3),
            "max_tokens_per_gpu": 1024,
            "cost": COST,
            "rollout_ids": [f"r{i // 3}" for i in range(60)],
            "num_steps": 2,
            "policy": Policy(step_split="balanced"),
        },
    ),
    "dp4_pp2_cp2_fp8": (
        spread(30, 900),
        {
            "layout": Layout(dp=4, pp=2, cp=2, fp8=True),
            "max_tokens_per_gpu": 512,
            "cost": COST,
        },
    ),
    "dp2_experts_uniform_drop": (
        [300] * 21,
        {
            "layout": Layout(dp=2, ep=2, pp=2, vpp=2),
            "max_tokens_per_gpu": 512,
            "cost": COST,
            "policy": Policy(row_shape="uniform", unreachable="drop"),
        },
    ),
    "dp2_count_based_oversize": (
        [5000, *spread(13, 300)],
        {"layout": Layout(dp=2, pp=2), "micro_batch_size": 3},
    ),
    "dp2_pp4_shared_prefixes": (
        [300 + n for n in spread(32, 500)],
        {
            "layout": Layout(dp=2, pp=4),
            "max_tokens_per_gpu": 2048,
            "cost": COST,
            "prefixes": families(32, 4, 256),
            "policy": Policy(search=512),
        },
    ),
    "dp4_pp2_dynamic_cp": (
        [2600, 1500, *spread(18, 900)],
        {
            "layout": Layout(dp=4, pp=2),
            "max_tokens_per_gpu": 1024,
            "cost": COST,
            "policy": Policy(context_parallel="dynamic", **FEW),
        },
    ),
    # Two blocks of two ranks, each with an order of its own.
    "dp4_pp2_dynamic_cp_split_backward": (
        [1100, 1050, *spread(24, 900)],
        {
            "layout": Layout(dp=4, pp=2),
            "max_tokens_per_gpu": 1024,
            "cost": COST,
            "policy": Policy(context_parallel="dynamic", backward="split", **FEW),
        },
    ),
    # All ranks wait for each other, so their rows over two are at the same positions.
    "dp4_experts_dynamic_cp": (
        [1300, 1300, *[700] * 12],
        {
            "layout": Layout(dp=4, pp=2, ep=4),
            "max_tokens_per_gpu": 1024,
            "cost": COST,
            "policy": Policy(context_parallel="dynamic", **FEW),
        },
    ),
    "dp2_pp4_pieces": (
        [2600, 1500, *spread(18, 900)],
        {
            "layout": Layout(dp=2, pp=4),
            "max_tokens_per_gpu": 1024,
            "cost": COST,
            "policy": Policy(split_samples="auto", **FEW),
        },
    ),
    "dp2_pp2_vpp2_split_backward": (
        spread(20, 900),
        {
            "layout": Layout(dp=2, pp=2, vpp=2),
            "max_tokens_per_gpu": 1024,
            "cost": COST,
            "policy": Policy(backward="split", **FEW),
        },
    ),
    "dp2_pp4_vpp2_pieces_split_backward": (
        [1900, *spread(18, 900)],
        {
            "layout": Layout(dp=2, pp=4, vpp=2),
            "max_tokens_per_gpu": 1024,
            "cost": COST,
            "policy": Policy(split_samples="auto", backward="split", **FEW),
        },
    ),
}
