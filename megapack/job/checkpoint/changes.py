"""Which settings a run may change when it resumes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megapack.job.checkpoint import folders

# Settings that must not change on resume: tensors, or the order of the data, would not fit. A
# section stands for all of its settings, except for those in `_FREE`.
_FIXED = (
    *("seed", "model", "data.prompts_per_batch", "data.shuffle", "data.balance_window"),
    *("optim.name", "optim.distributed_optimizer"),
)
_FREE = (
    *("model.recompute", "model.attention", "model.bias_activation_fusion"),
    *("model.gradient_accumulation_fusion", "model.moe_grouped_gemm", "model.moe_permute_fusion"),
    # The folder may have moved; its sizes are keys of their own.
    "model.hf_path",
)


def changed_settings(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Descriptions of the settings that differ from a checkpoint's and must not."""
    saved, now = (with_later_keys(config) for config in (saved, now))
    found = folders.differences(saved, now, _FIXED)
    if now["data"]["balance_window"] > 1:
        # It decides what the work of a sample is, and so the batches.
        found += folders.differences(saved, now, ("plan.balance",))
    kinds = folders.differences(saved, now, ("objective.kind",))
    # A value head does not fit a model with a vocabulary head.
    found += [text for text in kinds if '"reward"' in text]
    return [text for text in found if not text.startswith(_FREE)]


def with_later_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with the keys that those of earlier checkpoints lack: from before Muon, and from
    before batches exchanged prompt groups."""
    later = {"optim": {"name": "adam"}, "data": {"balance_window": 1}}
    return dict(folders.with_later_keys(config, later))
