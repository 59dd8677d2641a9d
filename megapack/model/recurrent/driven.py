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
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from megapack.model.attention.mixers import calls_fla, stock_class, stock_mixers
from megapack.model.attention.row import RowView, planned_view
from megapack.model.recurrent.convolution import convolve_row
from megapack.model.recurrent.scan import scan_row
from megapack.model.recurrent.segments import Level, Segments
from megapack.model.replaced import replaced

# Of Megatron's layers: what ours takes for granted.
_TAKEN: dict[str, dict[str, object]] = {
    "GatedDeltaNet": {"use_qk_l2norm": True, "conv_bias": False, "activation": "silu"},
    "MambaMixer": {"rmsnorm": True, "D_has_hdim": False, "norm_before_gate": False},
}
_SCANS = ("chunk_gated_delta_rule", "chunk_kda")
# Arguments of these with an entry per token, in their order.
_TOKENS = ("q", "k", "v", "g", "beta")


def obstacle(mixer: Any) -> tuple[str, bool]:
    """Why a layer cannot run rows that share prefixes, "" if it can; and whether it runs pieces of
    samples and wide rows as well."""
    stock = stock_class(mixer)
    if stock is not None:
        taken = _TAKEN[stock.__name__].items()
        other = [name for name, value in taken if getattr(mixer, name, value) != value]
        text = f"its {other[0]}={getattr(mixer, other[0])!r} is not supported" if other else ""
        return text, True
    if not calls_fla(mixer):
        return "it is not known to begin with a state", False
    if getattr(mixer, "gdn_backend", "fla") != "fla":
        return "its kernel is not known to give gradients of states; set the backend fla", False
    if getattr(mixer, "cp_group", None) is not None:
        return "its ranks scan contiguous parts of the row; switch its own cp off", False
    return "", False


@contextlib.contextmanager
def driving(chunks: Sequence[Any], *, is_on: bool = True) -> Iterator[None]:
    """Within the block, layers with a state that others have built run the rows that megapack
    describes. `row_rules` has refused those that cannot."""
    with contextlib.ExitStack() as stack:
        for chunk in chunks if is_on else ():
            modules = dict(chunk.named_modules())
            for name, mixer in list(stock_mixers(chunk)):
                # Some layers are inside of one that is told the row.
                owner = mixer
                if "packed_seq_params" not in inspect.signature(type(mixer).forward).parameters:
                    owner = modules[name.rpartition(".")[0]]
                forward = partial(_run, owner.forward, _planned_forward(mixer, owner.forward))
                stack.enter_context(replaced(owner, forward=forward))
        yield


def prepare_stock(chunks: Sequence[Any]) -> None:
    """Let Megatron's own layers know their heads, which `heads.check_heads` reads."""
    for chunk in chunks:
        for _, mixer in stock_mixers(chunk):
            if stock_class(mixer) is not None:
                _packed_class(mixer).prepare(mixer)


def _run(own: Callable[..., Any], planned: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    row = planned_view(kwargs.get("packed_seq_params"))
    return own(*args, **kwargs) if row is None else planned(row, *args, **kwargs)


def _planned_forward(mixer: Any, own: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a row that megapack describes, whose first argument is its view."""
    if stock_class(mixer) is not None:
        packed = _packed_class(mixer)
        packed.prepare(mixer)
        return lambda row, *args, **kwargs: packed.forward(mixer, *args, **kwargs)

    def forward(row: RowView, *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for holder, name, kernel in _by_segments(mixer, row.segments):
                stack.enter_context(replaced(holder, **{name: kernel}))
            return own(*args, **kwargs)

    return forward


def _packed_class(mixer: Any) -> Any:
    # Where there is such a layer, what these import is there: Triton for Mamba.
    if getattr(stock_class(mixer), "__name__", "") == "MambaMixer":
        from megapack.model.recurrent.mamba import PackedMambaMixer

        return PackedMambaMixer
    from megapack.model.recurrent.gated_delta import PackedGatedDeltaNet

    return PackedGatedDeltaNet


def _by_segments(
    mixer: Any, segments: Segments
) -> Iterator[tuple[Any, str, Callable[..., tuple[Tensor, None]]]]:
    """The stand-ins of a layer's kernels: what has one as an attribute, its name, the stand-in."""
    module = sys.modules[type(mixer).forward.__module__]
    for name in ("causal_conv1d", *_SCANS):
        holder = mixer if hasattr(mixer, name) else module
        if kernel := getattr(holder, name, None):
            stand_in = _scanned if name in _SCANS else _convolved
            yield holder, name, partial(stand_in, kernel, segments)
    for child in mixer.children():
        if type(child).__name__ == "ShortConvolution":
            yield child, "forward", partial(_convolved, child.forward, segments, taps=child.weight)


def _convolved(
    kernel: Callable[..., Any],
    segments: Segments,
    *,
    x: Tensor,
    taps: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """fla's convolution of [1, T, D] by segments.

    Args:
        taps: [D, 1, W], of a module that has its own.
    """
    others["cu_seqlens"] = None
    weight_DW = others["weight"] if taps is None else taps.squeeze(1)

    def convolve(x_CD: Tensor, *_: Any) -> Tensor:
        return kernel(x=x_CD[None], **others)[0][0]  # type: ignore[no-any-return]

    return convolve_row(convolve, x[0], weight_DW, None, segments, None)[0][None], None


def _scanned(
    kernel: Callable[..., Any], segments: Segments, *args: Any, **others: Any
) -> tuple[Tensor, None]:
    """A kernel of fla over [1, T, heads, ...] by segments."""
    others |= zip(_TOKENS, args, strict=False)
    inputs = [others.pop(name)[0] for name in _TOKENS]

    def scan(
        own: Sequence[Tensor], level: Level, initial: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        named = {name: values[None] for name, values in zip(_TOKENS, own, strict=True)}
        states = {"initial_state": initial, "output_final_state": level.hands_on}
        out, ends = kernel(**{**others, **named, **states, "cu_seqlens": level.ends_N1})
        return out[0], ends

    return scan_row(scan, inputs, segments, None)[0][None], None
