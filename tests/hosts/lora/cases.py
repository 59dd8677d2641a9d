"""The layouts and rows on which adapters are compared, as data."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

from megapack.base.choices import Kernel
from megapack.layout import Layout
from megapack.policy import Policy

RANK = 4
NUM_ADAPTERS = 2
ALPHA = 8
TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


@dataclass(frozen=True, kw_only=True)
class LoraCase:
    """A tiny folder's model with adapters, on a layout."""

    layout: Layout
    family: str = "qwen3"
    """One of `tests.hf_models.FAMILIES`."""
    attention: Kernel = "sdpa"
    """With "te" layers are Transformer Engine's, on stand-ins of its kernels."""
    max_tokens: int = 128
    policy: Policy = field(default_factory=Policy)
    keys: dict[str, Any] = field(default_factory=dict)
    """Keys of `ModelConfig`."""
    shares_prefixes: bool = False
    splits_backward: bool = False
    """Whether Transformer Engine's layers are built to put off their weight gradients, which frozen
    ones need not."""
    distributed_optimizer: bool = False
    several: bool = False
    """Whether samples are of `NUM_ADAPTERS` adapters in turn."""


_TP2_SP = Layout(tp=2, sequence_parallel=True)
_SPLIT = Policy(backward="split")
_FULL = {"recompute": "full"}
_MLP = {"recompute": "selective", "recompute_modules": ("mlp",)}
CASES = {
    "single": LoraCase(layout=Layout()),
    "recompute": LoraCase(layout=Layout(), keys=_FULL),
    "prefixes_recompute_mlp": LoraCase(layout=Layout(), shares_prefixes=True, keys=_MLP),
    "tp2": LoraCase(layout=Layout(tp=2)),
    "tp2_sp": LoraCase(layout=_TP2_SP),
    "tp2_sp_prefixes": LoraCase(layout=_TP2_SP, shares_prefixes=True),
    "pp2_vpp2": LoraCase(layout=Layout(pp=2, vpp=2)),
    "pp2_vpp2_split": LoraCase(layout=Layout(pp=2, vpp=2), policy=_SPLIT),
    "pp2_split_recompute": LoraCase(layout=Layout(pp=2), policy=_SPLIT, keys=_FULL),
    "pp2_pieces_recompute": LoraCase(
        layout=Layout(pp=2), max_tokens=64, policy=Policy(split_samples="auto"), keys=_FULL
    ),
    "ep2": LoraCase(layout=Layout(dp=2, ep=2), family="qwen3_moe"),
    "te_tp2": LoraCase(layout=Layout(tp=2), attention="te"),
    "te_tp2_sp": LoraCase(layout=_TP2_SP, attention="te"),
    "te_pp2_split": LoraCase(layout=Layout(pp=2), policy=_SPLIT, attention="te"),
    "te_pp2_vpp2_split": LoraCase(
        layout=Layout(pp=2, vpp=2), policy=_SPLIT, attention="te", splits_backward=True
    ),
    "dp2": LoraCase(layout=Layout(dp=2)),
    "dp2_sharded": LoraCase(layout=Layout(dp=2), distributed_optimizer=True),
}
_ONE = Policy(adapters="one")
# With this budget rows of one adapter each would cost time, so most cases have rows of several.
_several = functools.partial(LoraCase, several=True, max_tokens=152)
SEVERAL = {
    "several": _several(layout=Layout()),
    "several_prefixes": _several(layout=Layout(), shares_prefixes=True),
    "several_recompute": _several(layout=Layout(), keys=_FULL),
    "several_recompute_mlp": _several(layout=Layout(), keys=_MLP),
    "several_dp2": _several(layout=Layout(dp=2)),
    "several_dp2_wide": _several(
        layout=Layout(dp=2), max_tokens=60, policy=Policy(context_parallel="dynamic")
    ),
    "several_cp2": _several(layout=Layout(cp=2), max_tokens=60),
    "several_tp2": _several(layout=Layout(tp=2)),
    "several_tp2_sp": _several(layout=_TP2_SP),
    "several_pp2_vpp2_recompute": _several(layout=Layout(pp=2, vpp=2), keys=_FULL),
    "several_pp2_pieces": _several(
        layout=Layout(pp=2), max_tokens=64, policy=Policy(split_samples="auto"), keys=_FULL
    ),
    "several_pp2_split": _several(layout=Layout(pp=2), policy=_SPLIT),
    "several_dp2_one": _several(layout=Layout(dp=2), policy=_ONE),
}
CASES |= SEVERAL
TRAINED = ("dp2", "dp2_sharded")
"""Cases that are compared after steps of Adam."""
SAVED, RESUMED = ("tp2", "pp2_vpp2")
"""Cases of which the first writes a checkpoint, and the second continues from it."""
