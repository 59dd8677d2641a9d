"""Megatron's own layers with a state, in packed rows: which are right, and what Mamba must be told.

A gated delta net and a Mamba-2 layer carry a state, and the inputs of a short convolution, along
the row. At the first token of a sample both must begin anew. Megatron's GatedDeltaNet reads
`cu_seqlens` for that. Its MambaMixer reads `PackedSeqParams.seq_idx`, and where that is None, the
samples of the row are one sequence to it, without an error. Megatron makes `seq_idx` if the row's
description has `total_tokens`, and waits for the device to do so. Here it is made without waiting,
by `packed` for our rows and by `describing_samples` for those of another framework.

Their own forward knows plain rows only: no shared prefixes, no samples in pieces, no ranks of their
own per row. `recurrent.driven` runs other rows on them, and on some layers of frameworks.

Shape suffix: S1 samples plus one.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.ssm import mamba_context_parallel
from torch import Tensor

from megapack.errors import ConfigError
from megapack.model.replaced import replaced

logger = logging.getLogger(__name__)

# Attribute of a layer that keeps the samples of any row apart, as ours do.
_MARK = "runs_packed_rows"
# The parameter by which layers with a state are known, Megatron's and those of frameworks: decays.
_DECAYS = "A_log"
# Methods that do not change what Megatron's layers compute.
_BESIDE = ("sharded_state_dict", "reset_parameters", "backward_dw")
# Modules of frameworks with layers around flash-linear-attention's kernels, which tell these where
# samples begin and else see each token by itself.
_FLA_LAYERS = (
    *("slime_plugins.models.qwen3_", "miles_plugins.models.qwen3_"),
    *("mcore_bridge.model.modules.gated_delta_net", "skyrl.backends.skyrl_train.patches."),
)


class Driven(functools.partial[Any]):
    """The forward that `recurrent.driven` gives a layer for a while."""


def sample_indices(cu_seqlens_S1: Tensor, row_tokens: int) -> Tensor:
    """int32 [1, row_tokens]: the index of each token's sample, as `PackedSeqParams.seq_idx`.

    Tokens after the last sample are one more. The host does not wait for the device.

    >>> sample_indices(torch.tensor([0, 3, 4], dtype=torch.int32), 6)
    tensor([[0, 0, 0, 1, 2, 2]], dtype=torch.int32)
    """
    tokens = torch.arange(row_tokens, dtype=cu_seqlens_S1.dtype, device=cu_seqlens_S1.device)
    return torch.bucketize(tokens, cu_seqlens_S1[1:], out_int32=True, right=True)[None]


def stock_mixers(chunk: Any) -> Iterator[tuple[str, Any]]:
    """The layers of a chunk that carry a state and do not say that they run every packed row."""
    for name, module in chunk.named_modules():
        if hasattr(module, _DECAYS) and not getattr(module, _MARK, False):
            yield name, module


def stock_class(mixer: Any) -> type | None:
    """Megatron's class whose forward a layer runs; None: it computes something else."""
    kinds = (kind for kind in type(mixer).__mro__ if kind.__module__.startswith("megatron.core."))
    for stock in (kind for kind in kinds if kind.__name__ in ("GatedDeltaNet", "MambaMixer")):
        names = (n for n in dir(stock) if not n.startswith("__") and n not in _BESIDE)
        is_same = all(getattr(type(mixer), n) is getattr(stock, n) for n in names)
        return stock if is_same and not _is_replaced(mixer) else None
    return None


def calls_fla(mixer: Any) -> bool:
    """Whether it is a known layer of a framework, around flash-linear-attention's kernels."""
    return type(mixer).forward.__module__.startswith(_FLA_LAYERS) and not _is_replaced(mixer)


def _is_replaced(mixer: Any) -> bool:
    """Whether someone else has replaced the layer's forward. The next rows are checked while
    these run."""
    return not isinstance(vars(mixer).get("forward"), Driven | None)


def refuse_unpacked_mixers(chunk: Any) -> None:
    """Check that no layer with a state mixes the samples of a plain packed row.

    Raises:
        ConfigError: one does, or its gradients would be wrong; the message names it.
    """
    for name, mixer in stock_mixers(chunk):
        if obstacle := _obstacle(mixer):
            raise ConfigError(
                f"{name} is {type(mixer).__name__}, {obstacle}; or build the model with "
                "PackedGatedDeltaNet or PackedMambaMixer of megapack.model.recurrent"
            )


def _obstacle(mixer: Any) -> str:
    """Why plain packed rows would be wrong in this layer, and what to set; "" if they are right,
    or Megatron's layer refuses them itself."""
    stock = stock_class(mixer)
    if stock is None:
        unknown = (
            "which is not known to keep packed samples apart; use Megatron's GatedDeltaNet or "
            f"MambaMixer, set {_MARK} = True in a class that does"
        )
        return "" if calls_fla(mixer) else unknown
    return _mamba_obstacle(mixer) if stock.__name__ == "MambaMixer" else _delta_net_obstacle(mixer)


def _delta_net_obstacle(mixer: Any) -> str:
    config = mixer.config
    # Each tensor-parallel rank sees its heads only, and Megatron adds up what it marks.
    is_marked = getattr(mixer.out_norm.weight, "sequence_parallel", False)
    is_added = config.sequence_parallel and is_marked
    if config.tensor_model_parallel_size > 1 and not is_added:
        return (
            "whose out_norm would get the gradient of one tensor-parallel rank's heads with tp="
            f"{config.tensor_model_parallel_size} and sequence_parallel="
            f"{config.sequence_parallel}; set sequence_parallel=True"
        )
    return ""


def _mamba_obstacle(mixer: Any) -> str:
    ranks = mixer.config.context_parallel_size
    if ranks > 1 and mamba_context_parallel.tex is None:
        return (
            f"which puts rows of cp={ranks} ranks together with Transformer Engine; install it, "
            "set cp=1"
        )
    return ""


@contextlib.contextmanager
def describing_samples() -> Iterator[None]:
    """Within the block, packed rows that reach Megatron's MambaMixer without `seq_idx` get it.

    For the steps of other frameworks, which make their own descriptions of rows. The first time,
    a warning says so. The class has another forward meanwhile, so no model is searched for its
    layers in each step.
    """
    # Its import needs Triton.
    module: Any = sys.modules.get("megatron.core.ssm.mamba_mixer")
    if module is None:
        yield
        return
    forward = module.MambaMixer.forward

    @functools.wraps(forward)
    def described(mixer: Any, *args: Any, **kwargs: Any) -> Any:
        _describe(mixer, args, kwargs)
        return forward(mixer, *args, **kwargs)

    with replaced(module.MambaMixer, forward=described):
        yield


def _describe(mixer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    params = kwargs.get("packed_seq_params")
    if params is None or params.qkv_format != "thd" or getattr(mixer, _MARK, False):
        return
    # Without the field, MambaMixer reads `cu_seqlens` itself: Megatron-Core 0.16.
    if getattr(params, "seq_idx", 0) is not None:
        return
    (hidden, *_) = args or (kwargs["hidden_states"],)
    config = mixer.config
    shards = config.tensor_model_parallel_size if config.sequence_parallel else 1
    row_tokens = len(hidden) * shards * mixer.cp.cp_size
    padded = params.cu_seqlens_q_padded
    ends = params.cu_seqlens_q if padded is None else padded
    params.seq_idx = sample_indices(ends, row_tokens).to(hidden.device)
    _warn_once(
        f"packed rows came to {type(mixer).__name__} without seq_idx: its state and its "
        "convolution would have run from each sample into the next; megapack sets seq_idx in "
        "every row of this step"
    )


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)
