"""Warnings of what is known to be wrong with the towers of hosts' models."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from megapack.hosts import patching

logger = logging.getLogger(__name__)

# What hosts call the tower of a model for images.
_TOWERS = (".visual", ".vision_model")
_DEEPSTACK = """DeepStack's gradients are wrong under sequence parallelism: apply the patch \
bridge_deepstack (Megatron-Bridge), or set sequence_parallel=False"""
_OVERLAP = """overlap_grad_reduce ends a step whose last micro-batch has no image at an assertion \
of Megatron's: turn it off"""
_ANGLES = "the tower's inv_freq has lost its precision: make it fp32 again"
_seen: weakref.WeakSet[Any] = weakref.WeakSet()


def warning_of_towers(schedule: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's schedule, which warns of a model's tower before the first call."""

    @functools.wraps(schedule)
    def run(*, model: Any, **step: Any) -> Any:
        chunk = model[0] if isinstance(model, Sequence) else model
        if chunk not in _seen:
            _seen.add(chunk)
            for fault in faults_of_tower(chunk):
                logger.warning("%s (docs/patched_run.md, Where hosts are wrong)", fault)
        return schedule(model=model, **step)

    return run


def faults_of_tower(chunk: Any) -> list[str]:
    """What a step of a model with a tower gets wrong, and what to set."""
    tower = next((part for name, part in chunk.named_modules() if name.endswith(_TOWERS)), None)
    if tower is None:
        return []
    has_levels = any("deepstack" in name for name, _ in tower.named_modules())
    is_right = any(status.host == "bridge_deepstack" for status in patching.status())
    ddp = getattr(chunk, "ddp_config", None)
    angles = (buffer for name, buffer in tower.named_buffers() if "inv_freq" in name)
    found = (
        (_DEEPSTACK, has_levels and chunk.config.sequence_parallel and not is_right),
        (_OVERLAP, getattr(ddp, "overlap_grad_reduce", False)),
        (_ANGLES, any(buffer.element_size() < 4 for buffer in angles)),
    )
    return [fault for fault, is_there in found if is_there]
