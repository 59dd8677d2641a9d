"""The attention kernel that Transformer Engine would run for packed rows, and rows without one.

Transformer Engine chooses among flash-attn, cuDNN's fused attention and its own unfused attention
when a layer first runs. The last one pads every sample to the longest: 100 samples, the longest of
16384 tokens, are scores of 100 x 16384 x 16384 per head. It is what remains on an A100 without
flash-attn, or with an old cuDNN.

What its releases 2.9 to 2.20 run of packed rows:

| | one rank | several ranks |
|---|---|---|
| samples alone | yes | p2p; a2a since 2.10, all_gather since 2.18 |
| with a window | yes | a2a and all_gather as above, never p2p |
| with sinks | since 2.12 with cuDNN 9.18 | the same, a2a only |
| more keys than queries | yes; windows are aligned with the first key before 2.12 | no |

Of the rest `te_rows` runs ours in its place.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from dataclasses import dataclass
from typing import Any, Literal

import torch

Backend = Literal["flash", "fused", "unfused"]

# Compute capability of Hopper (H100, H200).
_HOPPER = (9, 0)


@dataclass(frozen=True, kw_only=True)
class AttentionSizes:
    """What the choice of a kernel depends on."""

    heads: int
    """Query heads of one tensor-parallel rank."""
    groups: int
    """Heads of keys and values of one tensor-parallel rank."""
    head_width: int
    """Channels of a head's queries and keys."""
    value_width: int | None = None
    """Channels of a head's values; None = as many."""
    cp: int = 1
    """Number of context-parallel ranks."""
    most_cp: int | None = None
    """Number of ranks that share the widest row; None = cp."""
    cp_comm_type: str = "p2p"
    """How these ranks exchange keys in Transformer Engine's attention."""
    windows: tuple[int | None, ...] = (None,)
    """Kinds of layers: tokens that a token sees; None = all before it."""
    others: tuple[AttentionSizes, ...] = ()
    """Kinds of layers with other heads. Those that torch's SDPA runs whatever the kernel are left
    out."""
    softmax_type: Literal["vanilla", "learnable"] = "vanilla"
    """Megatron's; "learnable" = sinks."""
    is_sparse: bool = False
    """Whether an indexer chooses the keys of each query."""
    is_capped: bool = False
    """Whether scores are capped before the softmax."""

    def __str__(self) -> str:
        """For messages, such as "32 heads (8 of keys) of 128 channels, cp=1"."""
        special = "".join(f", windows of {window}" for window in self.windows if window)
        special += ", sinks" if self.has_sinks else ""
        return (
            f"{self.heads} heads ({self.groups} of keys) of {self.head_width} channels, "
            f"cp={self.cp}{special}"
        )

    @property
    def has_windows(self) -> bool:
        """Whether some layers have a window."""
        return any(any(kind.windows) for kind in self.kinds)

    @property
    def has_sinks(self) -> bool:
        """Whether the softmax has more logits than keys."""
        return self.softmax_type != "vanilla"

    @property
    def kinds(self) -> tuple[AttentionSizes, ...]:
        """The sizes of each kind of layers."""
        own = (dataclasses.replace(self, windows=(w,), others=()) for w in self.windows)
        others = (
            dataclasses.replace(kind, cp=self.cp, most_cp=self.most_cp) for kind in self.others
        )
        return (*own, *others)

    @property
    def widest(self) -> AttentionSizes:
        """The sizes of the row that the most ranks share."""
        return dataclasses.replace(self, cp=self.most_cp or self.cp, most_cp=None)


def is_deterministic() -> bool:
    """Whether Transformer Engine is asked for a backward whose bits do not change."""
    allows = os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1") != "0"
    return not allows or torch.are_deterministic_algorithms_enabled()


@functools.cache
def te_backend(
    sizes: AttentionSizes,
    deterministic: bool = False,
    more_keys: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Backend | None:
    """The kernel for packed rows that trains on this GPU.

    Args:
        sizes: of one kind of layers.
        more_keys: whether sequences have more keys than queries (see `te_rows`).

    Returns:
        None if this version of Transformer Engine cannot be asked.
    """
    try:
        from transformer_engine.pytorch.attention.dot_product_attention import utils

        question = _question(utils, sizes, deterministic, more_keys, dtype)
        answer = utils.get_attention_backend(question)
        flash, _, fused, _, _, _ = answer
    except Exception:
        # The function is not part of its public interface, so that a version may fail in any way.
        # Transformer Engine then chooses by itself.
        return None
    return "flash" if flash else "fused" if fused else "unfused"


def _question(
    utils: Any, sizes: AttentionSizes, deterministic: bool, more_keys: bool, dtype: torch.dtype
) -> Any:
    """Transformer Engine's `AttentionParams`, with the fields of the installed version.

    2.9 has 27 fields; later ones also `cp_size`, `bottom_right_diagonal` and others. The values are
    those that its attention takes from a packed row: causal in each sample, no padding between.
    With more keys than queries the last query sees the last key.
    """
    tokens = 4096  # Rows differ in length; a kernel is chosen for all of them.
    (window,) = sizes.windows
    values = {
        "qkv_dtype": dtype,
        "qkv_layout": "thd_thd_thd",
        "batch_size": 8,
        "num_heads": sizes.heads,
        "num_gqa_groups": sizes.groups,
        "max_seqlen_q": tokens,
        "max_seqlen_kv": tokens,
        "head_dim_qk": sizes.head_width,
        "head_dim_v": sizes.value_width or sizes.head_width,
        "attn_mask_type": "padding_causal_bottom_right" if more_keys else "padding_causal",
        "window_size": (-1 if window is None else window - 1, 0),
        "softmax_type": sizes.softmax_type,
        "bottom_right_diagonal": more_keys,
        "core_attention_bias_requires_grad": False,
        "context_parallel": sizes.cp > 1,
        "cp_comm_type": sizes.cp_comm_type,
        "cp_size": sizes.cp,
        "deterministic": deterministic,
        "is_training": True,
    }
    known = {field.name for field in dataclasses.fields(utils.AttentionParams)}
    return utils.AttentionParams(**{k: v for k, v in values.items() if k in known})


def te_runs(
    sizes: AttentionSizes, *, more_keys: bool = False, dtype: torch.dtype = torch.bfloat16
) -> bool:
    """Whether Transformer Engine's attention runs the rows of a kind of layers.

    Args:
        sizes: cp is the number of ranks that share a row.
        more_keys: see `te_backend`.
    """
    has_windows, has_sinks, comm = sizes.has_windows, sizes.has_sinks, sizes.cp_comm_type
    if sizes.is_capped:
        return False
    if more_keys and (sizes.cp > 1 or has_windows or has_sinks):
        return False
    if sizes.cp > 1 and ((has_windows and comm == "p2p") or (has_sinks and comm != "a2a")):
        return False
    # It runs samples alone in any way that is left to it.
    is_asked = more_keys or has_sinks
    return not is_asked or te_backend(sizes, is_deterministic(), more_keys, dtype) != "unfused"


def te_obstacle(sizes: AttentionSizes) -> str | None:
    """Why Transformer Engine's attention should not run packed rows here; None if it can."""
    return next(filter(None, map(_kind_obstacle, sizes.kinds)), None)


def _kind_obstacle(sizes: AttentionSizes) -> str | None:
    if not te_runs(sizes):
        return None
    deterministic = is_deterministic()
    backend = te_backend(sizes, deterministic)
    if backend == "unfused":
        return (
            f"it has only unfused attention for {sizes}"
            f"{' with a deterministic backward' if deterministic else ''} on this GPU, which pads "
            "every sample to the longest; install flash-attn 2, or a newer cuDNN"
        )
    if backend == "fused" and deterministic and torch.cuda.get_device_capability() == _HOPPER:
        # Transformer Engine 2.20 turns it off there: cuDNN asks for 128 bytes times batch, heads
        # and the squared longest sample, which is 128 GiB at 2^30.
        return (
            "NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 asks for a deterministic backward, for which cuDNN "
            "takes 128 GiB and more on Hopper; install flash-attn 2, or unset it"
        )
    return None
