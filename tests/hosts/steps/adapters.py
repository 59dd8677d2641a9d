"""LoRA in hosts' steps: imports of adapters, their first values, what a report says of them."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.hosts.steps.job import Report
from tools.hosting import import_stubs, sources

RANK = 4
ALPHA = 8
NUM_SLOTS = 3
SLOT_RANK = 8
"""The most of a slot. Grouped products want multiples of 16 bytes, also of a half."""
TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


def import_bridge() -> None:
    """Import Megatron-Bridge's adapters; the rest of Bridge is a stand-in.

    They import Transformer Engine, so the CPU must already be in CUDA's place.
    """
    import_stubs.install("megatron.bridge")
    bridge = importlib.import_module("megatron.bridge")
    release = sources.installed(sources.release("megatron_bridge"))
    bridge.__path__ = [str(release / "megatron" / "bridge")]
    for name in ("lora", "canonical_lora", "utils"):
        importlib.import_module(f"megatron.bridge.peft.{name}")
    # Later imports of the others find the stand-ins.
    bridge.__path__ = []


def multi_lora_tree() -> Path:
    """The folder of Megatron-Bridge's package in its source tree.

    Raises:
        NoSource: there is none with layers of several adapters.
    """
    tree = sources.source("megatron_bridge") / "src" / "megatron" / "bridge"
    if not (tree / "peft" / "multi_lora.py").is_file():
        raise sources.NoSource(f"no layers of several adapters in {tree}")
    return tree


def import_multi_lora() -> None:
    """Import Megatron-Bridge's layers of several adapters, which only its source tree has.

    Raises:
        NoSource: there is none, or it is older.
    """
    tree = multi_lora_tree()
    import_stubs.install("megatron.bridge")
    bridge = importlib.import_module("megatron.bridge")
    bridge.__path__ = [str(tree)]
    for name in ("multi_lora", "multi_lora_layers", "lora", "canonical_lora"):
        importlib.import_module(f"megatron.bridge.peft.{name}")
    bridge.__path__ = []


def init_slots(chunks: Sequence[Any]) -> None:
    """Give each slot a rank and a scale of its own."""
    from megatron.bridge.peft.multi_lora_layers import init_adapter_slot

    for slot in range(NUM_SLOTS):
        init_adapter_slot(list(chunks), slot, rank=SLOT_RANK - slot, alpha=ALPHA * (1 + slot))


def keep_gradients(chunks: Sequence[Any], path: Path) -> None:
    """Write the gradient of each parameter of an adapter, by its name."""
    import torch

    named = (pair for chunk in chunks for pair in chunk.named_parameters())
    own = {name: p.main_grad.clone() for name, p in named if ".adapters." in name}
    torch.save(own, path)


def draw(chunks: Sequence[Any]) -> None:
    """Draw all weights by their names, so that they do not depend on the layout.

    Both matrices of an adapter get values; hosts begin with zeros in one, which would leave the
    other without a gradient.
    """
    from megatron.core import parallel_state

    from megapack.job.gpt.init import initialize_by_name
    from tests.dist import problem

    for chunk in chunks:
        for name, param in chunk.named_parameters():
            if "linear_fc1.adapter" in name and ".linear_out." in name:
                param.partition_stride = 2  # the gate's rows, then the others, on each rank
    initialize_by_name(
        chunks,
        seed=problem.SEED,
        std=problem.MODEL.init_std,
        num_layers=problem.NUM_LAYERS,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
    )


def watch(report: Report, optimizer: Any, chunks: Iterable[Any]) -> None:
    """From here on, note the gradients of the optimizer's last step, before it clips them.

    In `more["adapter_gradients"]` the norm of each adapter's, in `more["frozen_gradients"]` those
    of frozen parameters; 0 where there is none. Nothing if no parameter is frozen.
    """
    from megapack.model.parameters import global_parameters

    chunks = list(chunks)
    if all(param.requires_grad for chunk in chunks for param in chunk.parameters()):
        return
    step = optimizer.step

    def noted(*args: Any, **kwargs: Any) -> Any:
        adapters = report.more["adapter_gradients"] = {}
        frozen = report.more["frozen_gradients"] = {}
        for chunk in chunks:
            for name, param in global_parameters(chunk):
                gradient = getattr(param, "main_grad", None)
                gradient = param.grad if gradient is None else gradient
                norm = 0.0 if gradient is None else float(gradient.norm())
                (adapters if param.requires_grad else frozen)[name] = norm
        return step(*args, **kwargs)

    optimizer.step = noted
