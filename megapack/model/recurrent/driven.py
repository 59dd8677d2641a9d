"""Recurrent layers that others have built, on rows of shared prefixes, of pieces, and on wide rows.

Their own forward knows rows of whole samples. `driving` gives them another one for a while, in two
ways; weights, gradients and checkpoints stay theirs:

- Megatron's GatedDeltaNet and MambaMixer run the forward of our layers, on their parameters.
- Some frameworks' own layers call kernels of flash-linear-attention, and see each token by itself
  elsewhere. They keep their forward. Of a row that shares prefixes, it reaches stand-ins of the
  kernels, which call them once per level of the row's trees, with the states that segments begin
  with.

Shape suffixes: T tokens of the whole row, C tokens of the longer row (see `segments`), D channels,
W tokens that an output of the convolution sees.
"""

from __future__ import annotations

import contextlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from megatron.core import parallel_state
from torch import Tensor

from megapack.model.attention.mixers import Driven, calls_fla, stock_class, stock_mixers
from megapack.model.attention.row import RowView
from megapack.model.recurrent.convolution import convolve_row
from megapack.model.recurrent.scan import scan_row
from megapack.model.recurrent.segments import Level, Segments
from megapack.model.replaced import replaced

# Where our class for one of Megatron's is. It is imported where there is such a layer, as that of
# Mamba needs Triton.
_MODULES = {"GatedDeltaNet": "gated_delta", "MambaMixer": "mamba"}
# What our forward takes for granted of Megatron's layers.
_TAKEN = {
    **{"use_qk_l2norm": True, "conv_bias": False, "activation": "silu"},
    **{"rmsnorm": True, "D_has_hdim": False, "norm_before_gate": False},
}
_SCANS = ("chunk_gated_delta_rule", "chunk_kda")
# Arguments of these with an entry per token, in their order.
_TOKENS = ("q", "k", "v", "g", "beta")


def obstacle(mixer: Any) -> str:
    """Why a layer cannot run rows that share prefixes; "" if it can."""
    if stock_class(mixer) is not None:
        other = [n for n, value in _TAKEN.items() if getattr(mixer, n, value) != value]
        return f"its {other[0]}={getattr(mixer, other[0])!r} is not supported" if other else ""
    if not calls_fla(mixer):
        return "it is not known to begin with a state"
    if getattr(mixer, "gdn_backend", "fla") != "fla":
        return "its kernel is not known to give gradients of states; set the backend fla"
    is_whole = _is_told(mixer) or parallel_state.get_context_parallel_world_size() < 2
    return "" if is_whole else "its exchange between cp ranks loses gradients of states; set cp=1"


def _is_told(mixer: Any) -> bool:
    """Whether it is told the row; some layers are inside of one that is."""
    return "packed_seq_params" in inspect.signature(type(mixer).forward).parameters


@contextlib.contextmanager
def driving(chunks: Sequence[Any]) -> Iterator[None]:
    """Within the block, layers with a state that others have built run the rows that megapack
    describes. `row_rules` has refused those that cannot."""
    with contextlib.ExitStack() as stack:
        for chunk in chunks:
            prepare_stock([chunk])
            modules = dict(chunk.named_modules())
            for name, mixer in list(stock_mixers(chunk)):
                owner = mixer if _is_told(mixer) else modules[name.rpartition(".")[0]]
                stack.enter_context(replaced(owner, forward=Driven(_run, mixer, owner.forward)))
        yield


def prepare_stock(chunks: Sequence[Any]) -> None:
    """Let Megatron's own layers know their heads, as ours do."""
    for _, mixer in (named for chunk in chunks for named in stock_mixers(chunk)):
        if stock_class(mixer) is not None:
            _ours(mixer).prepare(mixer)


def _ours(mixer: Any) -> Any:
    name = getattr(stock_class(mixer), "__name__", "")
    return pkgutil.resolve_name(f"megapack.model.recurrent.{_MODULES[name]}:Packed{name}")


def _run(mixer: Any, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The forward of what is told the row; another framework's rows have no view with lengths."""
    params = kwargs.get("packed_seq_params")
    row: RowView | None = None if params is None else vars(params).get("_megapack")
    if row is None or row.lengths is None:
        return own(*args, **kwargs)
    if stock_class(mixer) is not None:
        return _ours(mixer).forward(mixer, *args, **kwargs)
    with contextlib.ExitStack() as stack:
        for holder, name, kernel in _by_segments(mixer, row.segments):
            stack.enter_context(replaced(holder, **{name: kernel}))
        return own(*args, **kwargs)


def _by_segments(mixer: Any, segments: Segments) -> Iterator[tuple[Any, str, Any]]:
    """The stand-ins of a layer's kernels: what has one as an attribute, its name, the stand-in."""
    module = sys.modules[type(mixer).forward.__module__]
    for name in ("causal_conv1d", *_SCANS):
        holder = mixer if hasattr(mixer, name) else module
        if kernel := getattr(holder, name, None):
            yield (
                holder,
                name,
                partial(_scanned if name in _SCANS else _convolved, kernel, segments),
            )
    for child in mixer.children():
        if type(child).__name__ == "ShortConvolution":
            yield child, "forward", partial(_convolved, child.forward, segments, child.weight)


def _convolved(kernel: Any, segments: Segments, taps: Any = None, *, x: Tensor, **kw: Any) -> Any:
    """fla's convolution of [1, T, D] by segments.

    Args:
        taps: [D, 1, W], of a module that has its own.
    """
    kw["cu_seqlens"] = None
    weight_DW = kw["weight"] if taps is None else taps.squeeze(1)
    out = convolve_row(
        lambda x_CD, *_: kernel(x=x_CD[None], **kw)[0][0], x[0], weight_DW, None, segments, None
    )
    return out[0][None], None


def _scanned(kernel: Any, segments: Segments, *args: Any, **kw: Any) -> Any:
    """A kernel of fla over [1, T, heads, ...] by segments."""
    kw |= zip(_TOKENS, args, strict=False)
    inputs = [kw.pop(name)[0] for name in _TOKENS]

    def scan(own: Sequence[Tensor], level: Level, initial: Tensor | None) -> Any:
        named = {name: values[None] for name, values in zip(_TOKENS, own, strict=True)}
        states = {"initial_state": initial, "output_final_state": level.hands_on}
        out, ends = kernel(**{**kw, **named, **states, "cu_seqlens": level.ends_N1})
        return out[0], ends

    return scan_row(scan, inputs, segments, None)[0][None], None
