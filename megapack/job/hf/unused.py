"""Tensors of a folder that a model does not have: their values must allow it.

A name does not say so. A head beside tied embeddings is harmless if it is a copy of them; if it
differs, transformers uses it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist

from megapack.errors import ConfigError, of_all_ranks
from megapack.job.hf.folder import HfFolder
from megapack.job.hf.names import LM_HEAD, VALUE_HEAD, TensorNames
from megapack.ranks.agree import agree, on_any_rank

# Numbers of two tensors that are compared at a time.
_PART = 1 << 24


class LeftOut:
    """What a folder may hold that a model does not have.

    Args:
        model: names of the whole model's tensors.
    """

    def __init__(self, names: TensorNames, model: Collection[str]) -> None:
        self._names = names
        self._model = model
        self._shared = names.shared
        self._has_tower = any(own.startswith(names.tower) for own in model)
        self._trained = {one for one in names.depths if any(own.startswith(one) for own in model)}

    def may_be(self, name: str) -> bool:
        """Whether a folder may hold this tensor; see `check_values` for what it must hold."""
        # A tied model has no head, and a value head replaces it.
        if name == LM_HEAD or self._names.is_rotary_table(name):
            return True
        if self._has_tower and name.startswith(self._names.tower):
            return False
        begin = self._names.depth_of(name)
        if begin in self._trained:
            return name in self._shared
        return begin is not None or self._names.is_kept(name)

    def original(self, name: str) -> str | None:
        """The model's tensor of which it must be a copy; None if it need not be one."""
        begin = self._names.depth_of(name)
        is_replaced = name == LM_HEAD and VALUE_HEAD in self._model
        if is_replaced or (begin is not None and begin not in self._trained):
            return None
        own = self._shared.get(name)
        # Tied, a copy of the head is one of the embedding.
        return own if own is None or own in self._model else self._shared[own]


def check_values(
    ignored: Sequence[str],
    model: Collection[str],
    stored: HfFolder,
    names: TensorNames,
    *,
    device: torch.device,
) -> None:
    """Compare tensors that a model leaves out with what it has in their place.

    A collective of all ranks, each of which reads its share of the rows.

    Args:
        ignored: what `check_tensors` returns.
        model: names of the whole model's tensors.
        device: see `agree`.

    Raises:
        ConfigError: on every rank: one of them differs.
    """
    left_out = LeftOut(names, model)
    pairs = [(name, own) for name in ignored if (own := left_out.original(name)) is not None]
    own_rows = agree(lambda: [_differ(stored, *pair) for pair in pairs], device=device)
    found = on_any_rank(own_rows, device=device)
    for (name, original), differs in zip(pairs, found, strict=True):
        if differs:
            advice = "leave out model.mtp_num_layers"
            if name == LM_HEAD:
                advice = (
                    "set tie_word_embeddings in config.json to false to train this head, as "
                    "transformers uses it, or remove it from the folder"
                )
            raise of_all_ranks(
                ConfigError(
                    f"{stored}: {name} differs from {original}, and the model has one for both; "
                    f"{advice}"
                )
            )


def _differ(stored: HfFolder, name: str, original: str) -> bool:
    """Whether two tensors differ in this rank's share of the rows."""
    one, other = stored.tensors[name], stored.tensors[original]
    if one.shape != other.shape:
        return True
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    rows = one.shape[0]
    step = max(1, _PART * rows // torch.Size(one.shape).numel())
    with stored.open(one.file) as ours, stored.open(other.file) as theirs:
        left, right = ours.get_slice(name), theirs.get_slice(original)
        end = rows * (rank + 1) // world
        for begin in range(rows * rank // world, end, step):
            part = slice(begin, min(begin + step, end))
            if not left[part].double().equal(right[part].double()):
                return True
    return False
