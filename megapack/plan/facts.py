"""What is said about a plan: the counts of its steps, and the one table that all printers read.

    steps -> Counts -> FACTS, FEATURES -> tables, JSON, metrics, pages, pictures

A feature is what a plan may do beside packing whole samples into rows of one DP rank. Commands,
metrics, pages and pictures iterate over `FEATURES`: what has an entry here is shown everywhere,
where a plan has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from megapack.plan.microbatch import MicroBatch


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Rows, samples and tokens of optimizer steps, summed over steps and DP ranks."""

    num_steps: int
    num_microbatches: tuple[int, int]
    """Smallest and largest M of any DP rank in any step."""
    num_rows: int
    """Micro-batches with samples."""
    num_padding_rows: int
    """Micro-batches without samples."""
    num_samples: int
    """Samples that the steps train on."""
    num_rollouts: int
    """Rollouts that the steps train on."""
    num_dropped_rollouts: int
    """Rollouts that unreachable="drop" left out."""
    tokens: int
    """Real tokens."""
    row_tokens: int
    """Tokens of all rows, padding included."""
    shared_tokens: int
    """Tokens that rows do not hold again, because another sample of the row begins with them."""
    wide_rows: dict[int, int]
    """Rows that lie over several DP ranks: their number by width, the narrowest first. Other
    numbers count each row once."""
    wide_tokens: int
    """Real tokens of their samples."""
    num_pieces: int
    """Rows that have a piece of a sample."""
    num_split_samples: int
    """Samples that are cut into pieces."""
    piece_tokens: int
    """Real tokens of these samples."""
    num_split_backwards: int
    """Backwards of a micro-batch through a chunk whose weight gradients are apart."""
    num_ordered_steps: int
    """Steps that run in an order of their own, not in Megatron's."""
    num_images: int
    """Different images of a step."""
    num_image_uses: int
    """Images of its samples, each as often as a sample has it."""
    image_patches: int
    """Patches of the different images."""
    image_tokens: int
    """Image tokens of the samples."""
    most_patches: int
    """Patches that a GPU encodes ahead of a step, the most of any; 0 where rows encode images."""

    @property
    def num_wide_rows(self) -> int:
        """Rows that lie over several DP ranks."""
        return sum(self.wide_rows.values())

    @property
    def widest(self) -> int:
        """DP ranks of the row that lies over the most."""
        return max(self.wide_rows, default=1)

    @property
    def wide_fraction(self) -> float:
        """Share of the samples' tokens that are in rows over several DP ranks."""
        return self.wide_tokens / self.tokens if self.tokens else 0.0

    @property
    def piece_fraction(self) -> float:
        """Share of the samples' tokens that are in pieces."""
        return self.piece_tokens / self.tokens if self.tokens else 0.0

    @property
    def packing_efficiency(self) -> float:
        """Real tokens that rows hold over row tokens; 1 is perfect."""
        return self.held_tokens / self.row_tokens if self.row_tokens else 1.0

    @property
    def held_tokens(self) -> int:
        """Real tokens that rows hold: those of their samples, shared ones once."""
        return self.tokens - self.shared_tokens

    @property
    def shared_fraction(self) -> float:
        """Share of the samples' tokens that rows do not hold again."""
        return self.shared_tokens / self.tokens if self.tokens else 0.0

    @property
    def padding_fraction(self) -> float:
        """Share of the row tokens that are not real."""
        return 1 - self.packing_efficiency

    @property
    def most_microbatches(self) -> int:
        """The largest M."""
        return self.num_microbatches[1]

    @property
    def microbatch_span(self) -> str:
        """`num_microbatches` as text: "24", or "7-15" if M differs."""
        least, most = self.num_microbatches
        return f"{least}" if least == most else f"{least}-{most}"


@dataclass(frozen=True)
class Fact:
    """A number about steps, and what it is called where."""

    key: str
    """Attribute of `Counts` or of `outlook.stats.Report`."""
    metric: str | None = None
    """Its key in the metrics of a step; None: it is no metric."""
    column: str = ""
    """Its head in tables."""
    form: str = ""
    """Its format in tables, such as ".1%"."""

    def cell(self, counts: Counts) -> str:
        """The number as text; "-" for None."""
        value = getattr(counts, self.key)
        return "-" if value is None else f"{value:{self.form}}"


# Facts of all steps.
_FACTS = (
    Fact("num_steps", column="steps"),
    Fact("most_microbatches", metric="num_microbatches_per_rank"),
    Fact("microbatch_span", column="M"),
    Fact("num_rows", column="rows"),
    Fact("num_padding_rows", metric="num_padding_microbatches"),
    Fact("num_samples", metric="num_samples"),
    Fact("num_rollouts", metric="num_rollouts"),
    Fact("num_dropped_rollouts", metric="num_dropped_rollouts"),
    Fact("tokens", metric="tokens"),
    Fact("packing_efficiency", metric="packing_efficiency"),
    Fact("fill", metric="fill", column="fill", form=".1%"),
    Fact("padding_fraction", metric="padding_fraction", column="padding", form=".1%"),
    Fact("imbalance", metric="imbalance", column="imbalance", form=".3f"),
    Fact("bubble_fraction", metric="bubble_fraction", column="bubble", form=".1%"),
    Fact("seconds", column="seconds", form=".4g"),
    Fact("tokens_per_gpu_second", column="tokens/s/GPU", form=".0f"),
    Fact("time_over_equal_work", column="time/equal work", form=".3f"),
    Fact("slowest_rank", column="slowest rank"),
    Fact("peak_live_tokens", "peak_live_row_tokens_per_gpu", "live tokens", ".0f"),
    Fact("peak_in_flight", column="in flight", form=".3g"),
)


@dataclass(frozen=True)
class RowFact:
    """What one row may have of a feature."""

    key: str
    """Its key in traces and pages."""
    value: Callable[[MicroBatch], int | str]
    """0 or "" if the row has nothing of it."""
    form: str
    """The value as a phrase: "ranks {}"."""
    mark: Callable[[MicroBatch], str] = lambda mb: ""
    """Its mark in a cell of the grid, of a row that has it."""
    legend: str = ""
    """The name of its frame in pictures; "": rows have no frame."""

    def text(self, mb: MicroBatch) -> str:
        """The phrase about a row that has it: "ranks 4-7"."""
        return self.form.format(self.value(mb))


@dataclass(frozen=True)
class Feature:
    """What a plan may do beside packing whole samples into rows of one DP rank."""

    name: str
    setting: str
    """The field of `Policy` that allows it."""
    off: str
    """The setting's value in plans that must not have it."""
    on: str
    """Its value in plans that may have it."""
    text: Callable[[Counts], str]
    """How much of it steps have, for people."""
    facts: tuple[Fact, ...]
    """The first one says how much of it there is; it is 0 in steps without the feature."""
    row: RowFact | None = None
    """None: single rows do not have it."""
    rival: str = ""
    """Name of the plan without it that `megapack plan` compares with; "": none."""

    def shown(self, counts: Counts) -> bool:
        """Whether steps have the feature."""
        return bool(getattr(counts, self.share.key))

    @property
    def share(self) -> Fact:
        """The fact that says how much of it there is."""
        return self.facts[0]

    def line(self, counts: Counts) -> str:
        """The name and the text: "split backwards: 20"."""
        return f"{self.name}: {self.text(counts)}"


def _widths_text(counts: Counts) -> str:
    """The rows over several ranks by their width: "3 over 2 ranks, 1 over 4"."""
    (width, count), *others = counts.wide_rows.items()
    return ", ".join([f"{count} over {width} ranks", *(f"{n} over {w}" for w, n in others)])


def _ranks_text(mb: MicroBatch) -> str:
    return f"{mb.dp_ranks[0]}-{mb.dp_ranks[-1]}" if mb.dp_ranks else ""


def _pieces_text(mb: MicroBatch) -> str:
    return "; ".join(f"sample {i}, tokens {begin} to {end}" for i, begin, end in mb.pieces)


def _images_text(c: Counts) -> str:
    if not c.most_patches:
        return f"{c.num_image_uses} are encoded in rows"
    return (
        f"{c.num_images} of {c.num_image_uses} are encoded, {c.image_patches} patches, "
        f"{c.most_patches} on the busiest GPU"
    )


FEATURES = (
    Feature(
        "shared prefixes",
        "share_prefixes",
        "off",
        "auto",
        lambda c: f"{c.shared_tokens} of {c.tokens} tokens ({c.shared_fraction:.1%})",
        (
            Fact("shared_fraction", "shared_tokens_fraction", "shared", ".1%"),
            Fact("shared_tokens", "shared_tokens"),
        ),
        RowFact("shared_tokens", lambda mb: mb.shared_tokens, "{} tokens shared"),
    ),
    Feature(
        "wide micro-batches",
        "context_parallel",
        "fixed",
        "dynamic",
        lambda c: f"{_widths_text(c)} ({c.wide_fraction:.1%} of the tokens)",
        (
            Fact("wide_fraction", "wide_tokens_fraction", "wide", ".1%"),
            Fact("widest", "widest_microbatch_ranks", "widest"),
            Fact("num_wide_rows", "num_wide_microbatches"),
            Fact("wide_rows"),
        ),
        RowFact(
            "dp_ranks",
            _ranks_text,
            "ranks {}",
            lambda mb: f"@{_ranks_text(mb)}",
            "over several ranks",
        ),
        "fixed CP",
    ),
    Feature(
        "split samples",
        "split_samples",
        "off",
        "auto",
        lambda c: (
            f"{c.num_split_samples} in {c.num_pieces} pieces ({c.piece_fraction:.1%} of the tokens)"
        ),
        (
            Fact("piece_fraction", "piece_tokens_fraction", "split", ".1%"),
            Fact("num_pieces", "num_pieces", "pieces"),
        ),
        RowFact(
            "piece",
            _pieces_text,
            "{}",
            lambda mb: "".join(f"[{begin}:{end}]" for _, begin, end in mb.pieces),
            "piece of a sample",
        ),
        "Megatron's order",
    ),
    Feature(
        "split backwards",
        "backward",
        "joint",
        "split",
        lambda c: f"{c.num_split_backwards}",
        (Fact("num_split_backwards", "num_split_backwards", "split B"),),
        rival="Megatron's order",
    ),
    Feature(
        "images",
        "images",
        "row",
        "ahead",
        _images_text,
        (
            Fact("num_images", "num_images", "images"),
            Fact("num_image_uses", "num_image_uses"),
            Fact("image_patches", "image_patches"),
            Fact("image_tokens", "image_tokens"),
            Fact("most_patches", "most_patches_per_gpu"),
        ),
        rival="images in rows",
    ),
)


def features_of(*counts: Counts) -> list[Feature]:
    """The features that any of these steps has."""
    return [feature for feature in FEATURES if any(map(feature.shown, counts))]


def row_facts(mb: MicroBatch) -> list[RowFact]:
    """What a row has of the features."""
    facts = (feature.row for feature in FEATURES)
    return [fact for fact in facts if fact is not None and fact.value(mb)]


def feature_numbers(counts: Counts) -> dict[str, Any]:
    """The numbers of all features by name, for JSON."""
    return {fact.key: getattr(counts, fact.key) for feature in FEATURES for fact in feature.facts}


def step_metrics(counts: Counts) -> dict[str, Any]:
    """The facts that are metrics, by their keys. Some need an `outlook.stats.Report`."""
    facts = [*_FACTS, *(fact for feature in FEATURES for fact in feature.facts)]
    return {fact.metric: getattr(counts, fact.key) for fact in facts if fact.metric}


def columns_named(*heads: str) -> list[Fact]:
    """The columns of all steps that have these heads."""
    of_head = {fact.column: fact for fact in _FACTS if fact.column}
    return [of_head[head] for head in heads]


def feature_columns(features: Iterable[Feature]) -> list[Fact]:
    """The columns of these features."""
    return [fact for feature in features for fact in feature.facts if fact.column]
