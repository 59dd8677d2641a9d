"""Adapters of Megatron-Bridge's LoRA, out of a model's chunks and back, in the format of peft.

An adapter is two matrices beside the weight that they add to. Of a fused projection

    linear_qkv.weight                      has the rows of q_proj, k_proj and v_proj;
    linear_qkv.adapter.linear_out.weight   has the rows of their lora_B in the same places;
    linear_qkv.adapter.linear_in.weight    is the lora_A of each.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megapack.base.files import read_text, strict_json
from megapack.errors import ConfigError, first_line
from megapack.job.checkpoint.folders import part_path
from megapack.job.hf import output
from megapack.job.hf.blocks import Block, gather_distinct, hf_shapes, own_blocks
from megapack.job.hf.export import Exported, Exporter, in_memory
from megapack.job.hf.export_plan import ExportPlan, plan_export
from megapack.job.hf.folder import HfFolder
from megapack.job.hf.load import names_of, read_blocks
from megapack.job.hf.names import ADAPTER, Rows, TensorNames
from megapack.model.overlap import finish_param_gathers
from megapack.ranks.agree import agree

_CONFIG = "adapter_config.json"
_MAX_BYTES = 1 << 20
_TENSORS = "adapter_model.safetensors"


def export_adapters(
    chunks: Sequence[Any],
    folder: str | Path,
    *,
    like: str | Path,
    device: torch.device,
    replace: bool = False,
) -> Exported:
    """Write LoRA adapters as a folder that peft loads, whole or not at all; a collective.

    Args:
        chunks: this rank's GPT chunks with adapters of Megatron-Bridge's `LoRA`, in DDP or not.
        folder: to write; all ranks see it.
        like: the folder that the model without adapters was loaded from.
        device: the device of the collectives, as `launch.start` returns it.
        replace: replace a folder of that name.

    Raises:
        ConfigError, CheckpointError, ScheduleError: on every rank; there is no folder then. The
            model has no adapters, adapters of several ranks or alphas, or such as peft's format
            has no place for: of experts that the folder stacks, of DoRA, of canonical LoRA.
    """
    finish_param_gathers(chunks)
    dim, alpha = _scale(chunks, device)
    held = agree(lambda: _own_adapters(chunks), device=device)
    exporter = _AdapterExporter(Path(folder), Path(like), None, 0, device, dim, alpha)
    return exporter.export({block: in_memory(data) for block, data in held}, replace=replace)


def load_adapters(
    chunks: Sequence[Any], folder: str | Path, *, like: str | Path, device: torch.device
) -> None:
    """Fill a model's LoRA adapters from a folder of peft's; a collective of all ranks.

    Call it before the optimizer is built, which copies the weights.

    Args:
        chunks: this rank's GPT chunks with adapters of Megatron-Bridge's `LoRA`, in DDP or not.
        folder: with adapter_config.json and adapter_model.safetensors.
        like: the folder that the model without adapters was loaded from.
        device: the device of the collectives, as `launch.start` returns it.

    Raises:
        ConfigError, ScheduleError: on every rank: other adapters than the model's, or a lora_A per
            part of a fused projection, which Bridge's adapters have in common.
    """
    dim, alpha = _scale(chunks, device)
    base = agree(lambda: HfFolder(like), device=device)
    stored = agree(lambda: HfFolder(folder, single=_TENSORS), device=device)
    held = agree(lambda: _own_adapters(chunks), device=device)
    names = agree(lambda: names_of(base, kind=AdapterNames), device=device)
    own = agree(lambda: hf_shapes((block for block, _ in held), names), device=device)
    copies = {name: names.copies(name) for name in own}
    model = {name: shape for part in gather_distinct(own) for name, shape in part.items()}
    all_copies = {name: found for part in gather_distinct(copies) for name, found in part.items()}

    def check() -> None:
        _check_scale(stored, alpha / dim)
        _check_adapters(stored, model, all_copies)

    agree(check, device=device)
    agree(lambda: read_blocks(held, stored, names), device=device)


class AdapterNames(TensorNames):
    """peft's names of the matrices of a model's adapters."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._others: dict[str, list[str]] = {}

    def rows(self, key: str, index: Sequence[int], num_rows: int) -> list[Rows]:
        """The rows that make up a matrix, see `TensorNames.rows`."""
        layer, _, part = key.partition(ADAPTER)
        if part not in ("linear_in.weight", "linear_out.weight"):
            raise self._unknown(key)
        rows = super().rows(f"{layer}.weight", index, num_rows)
        if any(one.expert is not None or one.swaps_halves for one in rows):
            raise self._unknown(key)
        if part == "linear_out.weight":
            return [dataclasses.replace(one, name=_peft_name(one.name, "B")) for one in rows]
        first, *others = dict.fromkeys(_peft_name(one.name, "A") for one in rows)
        self._others[first] = others
        return [Rows(first, 0, num_rows)]

    def copies(self, name: str) -> list[str]:
        """The further tensors with the values of this one, of which `rows` was asked."""
        return self._others.get(name, [])

    def _unknown(self, key: str) -> ConfigError:
        return ConfigError(
            f"{key} has no place among peft's adapters of a {self.model_type} folder; leave its "
            "layer out of target_modules"
        )


def _peft_name(weight: str, matrix: str) -> str:
    return f"base_model.model.{weight.removesuffix('.weight')}.lora_{matrix}.weight"


@dataclasses.dataclass
class _AdapterExporter(Exporter):
    """Writes adapters; the first rank writes them all into one file, as peft wants."""

    dim: int
    alpha: float
    """Of Bridge's LoRA."""

    def _planned(self, blocks: Sequence[Sequence[Block]], stored: HfFolder) -> ExportPlan:
        names = names_of(stored, kind=AdapterNames)
        plan = plan_export(blocks, names, lambda _, own: own, 1)
        return ExportPlan(
            [dataclasses.replace(one, writer=0, file=_TENSORS) for one in plan.targets]
        )

    def _finish(self, plan: ExportPlan, replace: bool) -> None:
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": str(self.like),
            "r": self.dim,
            "lora_alpha": self.alpha,
            "target_modules": sorted({name.split(".")[-3] for name in plan.weight_map}),
        }
        text = json.dumps(config, indent=2) + "\n"
        (part_path(self.folder) / _CONFIG).write_text(text, encoding="utf-8")
        output.finish(self.folder, replace=replace)


def _own_adapters(chunks: Sequence[Any]) -> list[tuple[Block, Tensor]]:
    return [(block, data) for block, data in own_blocks(chunks) if ADAPTER in block.key]


def _scale(chunks: Sequence[Any], device: torch.device) -> tuple[int, float]:
    """Rank and alpha of the adapters of all ranks."""
    modules = [module for chunk in chunks for module in chunk.modules()]
    adapters = [module.adapter for module in modules if hasattr(module, "adapter")]
    own = sorted({(one.dim, one.alpha) for one in adapters if hasattr(one, "alpha")})

    def only(every: list[list[tuple[int, float]]]) -> tuple[int, float]:
        found = sorted({pair for part in every for pair in part})
        if len(found) != 1:
            pairs = ", ".join(f"rank {dim} and alpha {alpha}" for dim, alpha in found)
            raise ConfigError(
                f"the model has {f'adapters of {pairs}' if found else 'no adapters'}; peft's "
                "format takes those of one rank and alpha, of Megatron-Bridge's LoRA"
            )
        return found[0]

    every = gather_distinct(own)
    return agree(lambda: only(every), device=device)


def _check_scale(stored: HfFolder, scale: float) -> None:
    file = stored.path / _CONFIG
    try:
        config = strict_json(read_text(file, _MAX_BYTES))
        rank = int(config["r"])
        found = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
        varies = bool(config.get("alpha_pattern"))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError) as error:
        raise ConfigError(
            f"{file} is not peft's config of a LoRA ({first_line(error)}); copy the folder again"
        ) from None
    if varies or not math.isclose(found, scale):
        raise ConfigError(
            f"{file} scales its adapters by {found:g}{' and others' if varies else ''}, the model "
            f"by {scale:g}; build the model's LoRA with alpha={found:g} * dim"
        )


def _check_adapters(
    stored: HfFolder, model: dict[str, tuple[int, ...]], copies: dict[str, list[str]]
) -> None:
    wanted = {one: shape for name, shape in model.items() for one in (name, *copies[name])}
    found = {name: one.shape for name, one in stored.tensors.items()}
    different = sorted(name for name, _ in wanted.items() ^ found.items())
    if different:
        name = different[0]
        raise ConfigError(
            f"{stored}: {name} is {_shape(found.get(name))}, in the model "
            f"{_shape(wanted.get(name))}; build the model's LoRA with the folder's rank and "
            "target_modules"
        )
    for name, others in copies.items():
        for other in others:
            if not stored.read(name).equal(stored.read(other)):
                raise ConfigError(
                    f"{stored}: {name} and {other} differ, and Megatron-Bridge's LoRA has one "
                    "matrix for both; merge the adapters into the model's folder by peft"
                )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else str(list(shape))
