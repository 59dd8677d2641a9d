"""A whole model on rows of one shape, and on others, as a graph would capture it.

python -m tests.rehearsal.captured_rows

Prints JSON: by case what differs between the runs of two rows, "" if nothing does.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import sys
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state
from torch import Tensor

from megapack import Policy, build_dp_schedule, launch
from megapack.layout import Layout
from megapack.model.attention import choice, varlen
from megapack.model.attention.packed import row_params
from megapack.model.attention.rotary import gather_rotary_tables
from megapack.model.attention.row import row_view
from megapack.model.head import deferred_head
from megapack.plan import Plan
from megapack.rows.packed import PackedRow, pack_row
from tests.dist import problem
from tests.dist.setup import build_chunks
from tests.rehearsal.capture import Capture, HostError
from tests.rehearsal.flash import register_on_cpu

LAYOUT = Layout()
BUDGET = 96


class StaticRow:
    """A row whose tensors stay at their addresses; later rows are copied to them."""

    def __init__(self, row: PackedRow) -> None:
        self.row = row
        self.params = row_params(row)

    def fill(self, row: PackedRow) -> None:
        """Take over a row; ValueError if a shape or a number is another."""
        new = row_params(row)
        view, new_view = row_view(self.params), row_view(new)
        _copy(self.row, {name: getattr(row, name) for name in ("tokens_T", "position_ids_T")})
        _copy(self.params, {k: v for k, v in vars(new).items() if not k.startswith("_")})
        _copy(view, {k: v for k, v in vars(new_view).items() if isinstance(v, Tensor)})
        # What the host knows of a row, and what the first layer has made of it.
        view.lengths = new_view.lengths
        for name in vars(view).keys() - vars(new_view).keys():
            del vars(view)[name]


def _copy(target: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        own = getattr(target, name)
        if not isinstance(value, Tensor):
            if own != value:
                raise ValueError(f"{name}={value}, captured with {own}")
        elif own.shape != value.shape:
            raise ValueError(
                f"{name} of shape {list(value.shape)}, captured with {list(own.shape)}"
            )
        else:
            own.copy_(value)


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """torch's `varlen_attn`: one operation forward, and one backward."""
    out: Tensor = torch.ops.aten._flash_attention_forward(
        *(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, 0.0, True, False),
        scale=scale,
        window_size_left=window_size[0],
        window_size_right=window_size[1],
    )[0]
    return out


def pass_of(chunk: Any, static: StaticRow) -> list[Any]:
    """The operations of a forward and a backward."""
    row = static.row
    with Capture() as captured, deferred_head(chunk):
        hidden = chunk(
            input_ids=row.tokens_T[None],
            position_ids=row.position_ids_T[None],
            attention_mask=None,
            packed_seq_params=static.params,
        )
        hidden.float().square().sum().backward()
    return captured.operations


def difference(chunk: Any, first: PackedRow, second: PackedRow) -> str:
    """What differs between the runs of two rows."""
    static = StaticRow(first)
    try:
        # Tables are made at their first use, as before a graph is captured.
        pass_of(chunk, StaticRow(copy.copy(first)))
        one = pass_of(chunk, static)
        static.fill(second)
        other = pass_of(chunk, static)
    except (HostError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    if one == other:
        return "" if len(one) > 100 else f"only {len(one)} operations"
    pairs = zip(one, other, strict=False)
    return next((f"{a} != {b}" for a, b in pairs if a != b), f"{len(one)} and {len(other)}")


def two_rows(row_shapes: int | None, *, with_segments: bool = True) -> list[PackedRow]:
    """Two rows of different samples."""
    batch = problem.make_batch(16)
    plan: Plan = build_dp_schedule(
        batch.lengths,
        layout=LAYOUT,
        max_tokens_per_gpu=BUDGET,
        policy=Policy(row_shapes=row_shapes, search=0),
    )
    rows = sorted(plan.steps[0].microbatches, key=lambda mb: len(mb.samples))
    chosen = rows[0], rows[-1]
    assert len(chosen[0].samples) < len(chosen[1].samples)
    return [
        pack_row(batch, mb, LAYOUT, shape=plan.shape_of(mb) if with_segments else None)
        for mb in chosen
    ]


def main() -> None:
    library = register_on_cpu()
    found = {}
    with (
        mock.patch.object(choice, "obstacle", return_value=None),
        mock.patch.object(varlen, "varlen_kernel", return_value=varlen_attn),
        contextlib.redirect_stdout(sys.stderr),
    ):
        launch.start("cpu")
        model = dataclasses.replace(problem.BF16_MODEL, num_layers=2, attention="varlen")
        (chunk,) = build_chunks(LAYOUT, model=model)
        one_shape, any_length = two_rows(1), two_rows(None)
        found["megatron's rotation"] = difference(chunk, *one_shape)
        gather_rotary_tables([chunk])
        found["one shape"] = difference(chunk, *one_shape)
        found["any length"] = difference(chunk, *any_length)
        found["one length"] = difference(chunk, *two_rows(1, with_segments=False))
        parallel_state.destroy_model_parallel()
        sdpa = dataclasses.replace(model, attention="sdpa")
        (chunk,) = build_chunks(LAYOUT, model=sdpa)
        gather_rotary_tables([chunk])
        found["sdpa"] = difference(chunk, *one_shape)
        launch.stop()
    del library
    print(json.dumps(found))


if __name__ == "__main__":
    main()
