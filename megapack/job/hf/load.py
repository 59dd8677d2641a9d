"""Weights from a Hugging Face folder into a model's chunks, on any layout.

Each rank reads its own rows; no weights are sent between ranks. Before any tensor is read, the
whole model's tensors are compared with the folder's.
"""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megapack.cost.options import ModelOptions
from megapack.errors import ConfigError
from megapack.job.config.hf_config import HfConfig, read_hf_config
from megapack.job.config.hf_families import FAMILIES
from megapack.job.hf.blocks import Block, RowSpan, gather_distinct, hf_shapes, own_blocks, row_spans
from megapack.job.hf.folder import HfFolder
from megapack.job.hf.names import VALUE_HEAD, TensorNames
from megapack.job.hf.unused import LeftOut, check_values
from megapack.ranks.agree import agree

Shapes = dict[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class LoadedWeights:
    """What a load has done; prints as one line."""

    folder: Path
    num_tensors: int
    """Hugging Face tensors of the whole model."""
    num_bytes: int
    """Bytes that this rank read."""
    seconds: float
    num_ignored: int
    """Tensors of the folder that the model does not have."""

    def __str__(self) -> str:
        ignored = ""
        if self.num_ignored:
            ignored = (
                f"; {self.num_ignored} tensors of the folder are not used (multi-token prediction, "
                "tied or replaced output layer, rotary tables, vision)"
            )
        if (self.folder / "adapter_config.json").exists():
            ignored += "; its adapter_config.json is not used, though peft would add that adapter"
        return (
            f"{self.num_tensors} tensors of {self.folder} in {self.seconds:.1f} s, "
            f"{self.num_bytes / 1e6:,.0f} MB on this rank{ignored}"
        )


def load_hf_weights(
    chunks: Sequence[Any], folder: str | Path, *, device: torch.device
) -> LoadedWeights:
    """Fill this rank's chunks from a Hugging Face folder; a collective of all ranks.

        chunks = build_model(model, layout, ..., draws_weights=False)
        load_hf_weights(chunks, "models/Qwen3-0.6B", device=device)

    Values are cast to the parameters' types. Rows of the padded vocabulary become zeros, and so
    does a value head if the folder has none. Call it before the optimizer is built, which copies
    the weights.

    Args:
        chunks: this rank's GPT chunks, and its tower if it has one, in DDP or not, of the folder's
            sizes.
        folder: with config.json, and safetensors in one file or several.
        device: the device of the collectives, as `launch.start` returns it.

    Raises:
        ConfigError, ScheduleError: on every rank, before any weight has changed: missing or damaged
            files, or tensors that are missing, left over, quantized or of another shape.
    """
    started = time.perf_counter()
    stored = agree(lambda: HfFolder(folder), device=device)
    held = list(own_blocks(chunks))
    names = agree(lambda: names_of(stored, (block.key for block, _ in held)), device=device)
    shapes = agree(lambda: hf_shapes((block for block, _ in held), names), device=device)
    model: Shapes = {}
    for part in gather_distinct(shapes):
        model |= part
    ignored = agree(lambda: check_tensors(model, stored, names), device=device)
    check_values(ignored, model, stored, names, device=device)
    num_bytes = agree(lambda: read_blocks(held, stored, names), device=device)
    return LoadedWeights(
        folder=stored.path,
        num_tensors=len(model),
        num_bytes=num_bytes,
        seconds=time.perf_counter() - started,
        num_ignored=len(ignored),
    )


def names_of(
    stored: HfFolder,
    keys: Iterable[str] = (),
    *,
    is_value_model: bool = False,
    kind: type[TensorNames] = TensorNames,
) -> TensorNames:
    """The table for a folder's model.

    Args:
        keys, is_value_model: see `TensorNames`.
    """
    config = read_hf_config(stored.path)
    return kind(
        config.model_type,
        config.values,
        stored.tensors,
        keys,
        is_value_model=is_value_model,
        num_mtp_layers=config.num_mtp_layers,
        has_expert_columns=_has_expert_columns(stored, config),
    )


def _has_expert_columns(stored: HfFolder, config: HfConfig) -> bool:
    """Whether stacked experts are [experts, columns, rows], as in published folders of Qwen3-VL.

    A square matrix does not tell; then the other one of its layer does.
    """
    family, model = FAMILIES[config.model_type], ModelOptions(**config.values)
    if model.num_experts is None or family.has_expert_columns:
        return False
    hidden, width = model.routed_width, model.expert_width
    told = {
        one.shape[1:] == (columns, rows)
        for end, rows, columns in zip(
            family.stacked.values(), (2 * width, hidden), (hidden, width), strict=True
        )
        for name, one in stored.tensors.items()
        if name.endswith(end) and rows != columns
    }
    if len(told) == 2:
        raise ConfigError(
            f"{stored} has experts as [experts, rows, columns] and as [experts, columns, rows]; "
            "download the folder again, or write it anew by transformers"
        )
    return told == {True}


def check_tensors(model: Shapes, stored: HfFolder, names: TensorNames) -> list[str]:
    """Compare a model's tensors with a folder's.

    Args:
        model: the whole model's, by Hugging Face name.

    Returns:
        The folder's tensors that the model does not have and need not have.

    Raises:
        ConfigError: a tensor is missing, left over, or has another shape.
    """
    missing = sorted(model.keys() - stored.tensors.keys() - {VALUE_HEAD})
    if missing:
        raise ConfigError(
            f"{stored} lacks {len(missing)} of the model's {len(model)} tensors, such as "
            f"{missing[0]}; set model.hf_path to a whole folder, and keys of model that fit it"
        )
    for name in model.keys() & stored.tensors.keys():
        found = stored.tensors[name].shape
        if found != model[name]:
            raise ConfigError(
                f"{stored}: {name} has the shape {list(found)}, the model needs "
                f"{list(model[name])}; its config.json is of another model"
            )
    extra = sorted(stored.tensors.keys() - model.keys())
    left_out = LeftOut(names, model)
    unused = [name for name in extra if not left_out.may_be(name)]
    if unused:
        raise ConfigError(
            f"{stored} has {len(unused)} tensors that the model would not use, such as "
            f"{unused[0]}; {names.why_unknown(unused[0])}"
        )
    return extra


def read_blocks(held: list[tuple[Block, Tensor]], stored: HfFolder, names: TensorNames) -> int:
    """Read this rank's blocks, file by file; returns the bytes read."""
    by_file: dict[str, list[tuple[RowSpan, Tensor]]] = defaultdict(list)
    for block, values in held:
        found = [span for span in row_spans(block, names) if span.name in stored.tensors]
        if sum(span.count for span in found) < block.shape[0]:
            values.zero_()
        for span in found:
            by_file[stored.tensors[span.name].file].append((span, span.of(values)))
    num_bytes = 0
    # A file is closed before the next one is opened: the pages of a file that is open count as
    # this process's memory.
    for file in sorted(by_file):
        with stored.open(file) as tensors:
            for span, values in by_file[file]:
                part = tensors.get_slice(span.name)[span.place]
                values.copy_(span.arranged(span.rows_in(part)))
                num_bytes += part.nbytes
    return num_bytes
