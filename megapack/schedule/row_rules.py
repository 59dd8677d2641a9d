"""Which models run which rows: what a plan's rows may have, and what of a model contradicts it.

`policy` has the same table for the settings of a plan. Every rank refuses before any collective.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Literal

import torch

from megapack.errors import ConfigError
from megapack.model.attention.mixers import stock_class, stock_mixers
from megapack.model.attention.packed import PackedAttention
from megapack.model.attention.rotary import position_obstacle
from megapack.model.attention.rotary_tables import tables_of
from megapack.model.attention.sdpa import PackedSDPA
from megapack.model.attention.sparse import SparseAttention
from megapack.model.attention.te_rows import te_attentions
from megapack.model.attention.varlen import PackedVarlen
from megapack.model.head import unwrapped
from megapack.model.mtp import num_depths
from megapack.model.recurrent import driven
from megapack.plan.microbatch import MicroBatch
from megapack.plan.plan import Plan
from megapack.rows.chain import has_piece

Feature = Literal["prefixes", "wide", "pieces"]

# Feature -> its name in messages, and how to plan without it.
_TEXTS: dict[Feature, tuple[str, str]] = {
    "prefixes": ("shared prefixes", "plan.share_prefixes=off (Policy(share_prefixes='off'))"),
    "wide": (
        "rows over several ranks",
        "plan.context_parallel=fixed (Policy(context_parallel='fixed'))",
    ),
    "pieces": ("samples in pieces", "plan.split_samples=off (Policy(split_samples='off'))"),
}
_ALL: tuple[Feature, ...] = ("prefixes", "wide", "pieces")
_KNOWN_KERNELS = (PackedSDPA.attend, PackedVarlen.attend, SparseAttention.attend)


def _contradictions(
    chunks: Sequence[Any], config: Any, *, is_training: bool
) -> Iterator[tuple[Sequence[Feature], str, str]]:
    """Features of rows and a fact of the model that contradict each other, and why, with what to
    set; "" where something is not so."""
    named = [item for chunk in chunks for item in chunk.named_modules()]

    def setting(*names: str) -> str:
        """The first of these settings of the config that is set, such as "window_size=128"."""
        values = {name: getattr(config, name, None) for name in names}
        return next((f"{name}={value!r}" for name, value in values.items() if value), "")

    if is_training:
        of_modules = (f"{name} (dropout of {m.p:g})" for name, m in named if _drops(m))
        drops = setting("attention_dropout", "hidden_dropout") or next(of_modules, "")
        why = "samples that share a prefix would drop the same of its values; set it to 0"
        yield ("prefixes",), drops, why
        why = "attention to a sample's earlier pieces has none; set it to 0"
        yield ("pieces",), setting("attention_dropout"), why
    why = "multi-token prediction needs tokens of a sample's next piece; set it to None"
    yield ("pieces",), setting("mtp_num_layers") if num_depths(config) else "", why
    yield (
        _ALL,
        next(filter(None, map(position_obstacle, chunks)), ""),
        "it finds positions from cu_seqlens, which would be wrong; use Megatron's self attention, "
        "without apply_rope_fusion if it is multi-latent",
    )
    tables = (tables for tables in map(tables_of, chunks) if tables is not None)
    limits = (one.short_tokens for one in tables if one.short_tokens is not None)
    yield (
        ("prefixes",),
        next((f"rope_scaling.kind=longrope from {tokens} tokens" for tokens in limits), ""),
        "a prefix has other keys in longer samples; set max_position_embeddings to no more",
    )
    kernels = (module for _, module in named if isinstance(module, PackedAttention))
    unknown = (type(k).__name__ for k in kernels if type(k).attend not in _KNOWN_KERNELS)
    yield _ALL, next(unknown, ""), "it is not known to run them; set PackedSDPA or PackedVarlen"
    for mixer in (mixer for chunk in chunks for _, mixer in stock_mixers(chunk)):
        why = driven.obstacle(mixer)
        inside: Sequence[Feature] = () if stock_class(mixer) else ("wide", "pieces")
        yield (
            _ALL if why else inside,
            type(mixer).__name__,
            f"{why or 'its kernels are given states inside of a row only'}; build the model with "
            "PackedGatedDeltaNet or PackedMambaMixer of megapack.model.recurrent",
        )
    if any(any(te_attentions(chunk)) for chunk in chunks):
        given = getattr(config, "cp_comm_type", None)
        kinds = given if isinstance(given, list) else [given]
        others = [kind for kind in kinds if kind not in (None, "p2p", "all_gather")]
        yield (
            ("wide",),
            f"Transformer Engine's attention, cp_comm_type={others[0]!r}" if others else "",
            "rows lie over different numbers of ranks, which need not divide the heads; set 'p2p'",
        )
        # FP8 kernels take no packed rows with that mask.
        fp8 = setting("fp8_dot_product_attention", "fp8_multi_head_attention")
        fact = f"Transformer Engine's attention, {fp8}" if fp8 else ""
        yield ("prefixes", "pieces"), fact, "it is not supported; unset it"


def _drops(module: Any) -> bool:
    return isinstance(module, torch.nn.Dropout) and module.training and module.p > 0


def row_features(plan: Plan, rows: Iterable[MicroBatch]) -> set[Feature]:
    """The features that a plan's rows may have; pieces if some of these `rows` hold one."""
    has: dict[Feature, bool] = {
        "prefixes": plan.prefixes is not None,
        "wide": plan.policy.context_parallel == "dynamic",
        "pieces": any(map(has_piece, rows)),
    }
    return {feature for feature, is_so in has.items() if is_so}


def check_rows(
    chunks: Sequence[Any],
    config: Any,
    features: Collection[Feature],
    *,
    is_training: bool,
    instead: str = "",
) -> None:
    """Raise ConfigError if the model would be wrong on a plan's rows, or hang.

    Args:
        chunks: of this rank, wrapped in DDP or not.
        config: the model's TransformerConfig.
        features: of the plan's rows: samples that share prefixes, rows that several DP ranks share,
            samples in pieces.
        instead: what to set for rows without these features; "" = settings of the plan.
    """
    if not features:
        return
    models = [unwrapped(chunk) for chunk in chunks]
    for contradicting, fact, why in _contradictions(models, config, is_training=is_training):
        for feature in contradicting:
            if fact and feature in features:
                name, advice = _TEXTS[feature]
                raise ConfigError(f"{fact} with {name}: {why}, or {instead or advice}")
