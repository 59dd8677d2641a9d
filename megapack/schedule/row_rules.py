"""Which models run which rows: what a plan's rows may have, and what of a model contradicts it.

`policy` has the same table for the settings of a plan. Every rank refuses before any collective.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from megapack.errors import ConfigError
from megapack.model.attention.mixers import stock_mixers
from megapack.model.attention.packed import PackedAttention
from megapack.model.attention.rotary import position_obstacle
from megapack.model.attention.rotary_tables import tables_of
from megapack.model.attention.sdpa import PackedSDPA
from megapack.model.attention.sparse import SparseAttention
from megapack.model.attention.te_rows import te_attentions
from megapack.model.attention.varlen import PackedVarlen
from megapack.model.head import unwrapped
from megapack.model.mtp import num_depths

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
_KNOWN_KERNELS = (PackedSDPA.attend, PackedVarlen.attend, SparseAttention.attend)


@dataclass(frozen=True, kw_only=True)
class _Facts:
    """What a rule may ask; "" where something is not so."""

    chunks: Sequence[Any]
    config: Any
    is_training: bool

    def setting(self, *names: str) -> str:
        """The first of these settings of the config that is set, such as "window_size=128"."""
        values = {name: getattr(self.config, name, None) for name in names}
        return next((f"{name}={value!r}" for name, value in values.items() if value), "")

    def dropout(self, *names: str) -> str:
        """The first of these settings that drops values in the pass."""
        return self.setting(*names) if self.is_training else ""

    @property
    def dropping_module(self) -> str:
        """A module that drops values in the pass, such as an adapter's."""
        modules = (named for chunk in self.chunks for named in chunk.named_modules())
        found = (f"{name} (dropout of {m.p:g})" for name, m in modules if _drops(m))
        return next(found, "") if self.is_training else ""

    @property
    def ahead(self) -> str:
        """Layers of multi-token prediction."""
        return self.setting("mtp_num_layers") if num_depths(self.config) else ""

    @property
    def positions(self) -> str:
        """Rotary embeddings that do not follow the row's description."""
        return next(filter(None, map(position_obstacle, self.chunks)), "")

    @property
    def rotation_by_length(self) -> str:
        """Rotary embeddings that differ between long samples and short ones."""
        found = (tables for tables in map(tables_of, self.chunks) if tables is not None)
        limits = (tables.short_tokens for tables in found if tables.short_tokens is not None)
        return next((f"rope_scaling.kind=longrope from {tokens} tokens" for tokens in limits), "")

    @property
    def other_kernel(self) -> str:
        """An attention class that is not known."""
        modules = (module for chunk in self.chunks for module in chunk.modules())
        kernels = (module for module in modules if isinstance(module, PackedAttention))
        others = (k for k in kernels if type(k).attend not in _KNOWN_KERNELS)
        return next((type(kernel).__name__ for kernel in others), "")

    @property
    def stock_mixer(self) -> str:
        """A layer with a state that runs plain rows only."""
        mixers = (mixer for chunk in self.chunks for _, mixer in stock_mixers(chunk))
        return next((type(mixer).__name__ for mixer in mixers), "")

    def on_te(self, fact: str) -> str:
        """The fact, of a model with Transformer Engine's attention."""
        has_te = any(any(te_attentions(chunk)) for chunk in self.chunks)
        return f"Transformer Engine's attention, {fact}" if fact and has_te else ""

    @property
    def divided_heads(self) -> str:
        """An exchange of keys that divides heads by the ranks of a row."""
        given = self.config.cp_comm_type
        kinds = given if isinstance(given, list) else [given]
        others = (kind for kind in kinds if kind not in (None, "p2p", "all_gather"))
        return next((f"cp_comm_type={kind!r}" for kind in others), "")


class _Rule(NamedTuple):
    """A feature of rows and a fact of the model that contradict each other."""

    features: Sequence[Feature]
    fact: Callable[[_Facts], str]
    why: str
    """The reason, and what to set."""


_RULES = (
    _Rule(
        ("prefixes",),
        lambda facts: facts.dropout("attention_dropout", "hidden_dropout"),
        "samples that share a prefix would drop the same of its values; set it to 0",
    ),
    _Rule(
        ("prefixes",),
        lambda facts: facts.dropping_module,
        "samples that share a prefix would drop the same of its values; set it to 0",
    ),
    _Rule(
        ("pieces",),
        lambda facts: facts.dropout("attention_dropout"),
        "attention to a sample's earlier pieces has none; set it to 0",
    ),
    _Rule(
        ("pieces",),
        lambda facts: facts.ahead,
        "multi-token prediction needs tokens of a sample's next piece; set it to None",
    ),
    _Rule(
        ("prefixes", "wide", "pieces"),
        lambda facts: facts.positions,
        "it finds positions from cu_seqlens, which would be wrong; use Megatron's self attention, "
        "without apply_rope_fusion if it is multi-latent",
    ),
    _Rule(
        ("prefixes",),
        lambda facts: facts.rotation_by_length,
        "a prefix has other keys in longer samples; set max_position_embeddings to no more",
    ),
    _Rule(
        ("prefixes", "wide", "pieces"),
        lambda facts: facts.other_kernel,
        "it is not known to run them; set PackedSDPA or PackedVarlen",
    ),
    _Rule(
        ("prefixes", "wide", "pieces"),
        lambda facts: facts.stock_mixer,
        "it knows rows of whole samples only; build the model with PackedGatedDeltaNet or "
        "PackedMambaMixer of megapack.model.recurrent",
    ),
    _Rule(
        ("wide",),
        lambda facts: facts.on_te(facts.divided_heads),
        "rows lie over different numbers of ranks, which need not divide the heads; set 'p2p'",
    ),
    # FP8 kernels take no packed rows with that mask.
    _Rule(
        ("prefixes", "pieces"),
        lambda facts: facts.on_te(
            facts.setting("fp8_dot_product_attention", "fp8_multi_head_attention")
        ),
        "it is not supported; unset it",
    ),
)


def _drops(module: Any) -> bool:
    return isinstance(module, torch.nn.Dropout) and module.training and module.p > 0


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
    facts = _Facts(
        chunks=[unwrapped(chunk) for chunk in chunks],
        config=config,
        is_training=is_training,
    )
    for rule in _RULES:
        for feature in rule.features:
            if feature in features and (fact := rule.fact(facts)):
                name, advice = _TEXTS[feature]
                raise ConfigError(f"{fact} with {name}: {rule.why}, or {instead or advice}")
