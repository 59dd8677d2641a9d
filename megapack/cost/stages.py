"""How a model's transformer layers are split over the chunks of a pipeline.

`LayerSplit` has the keys of Megatron-Core's TransformerConfig, with their meaning there:

    LayerSplit + num_layers + pp, vpp -> StageLayers: the number of layers of each chunk

Refused are also settings that Megatron accepts and then fails with, such as a negative number of
layers for the middle stages.
"""

from __future__ import annotations

import heapq
import math
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import accumulate
from typing import NoReturn

from megapack.errors import ConfigError, brief
from megapack.layout import Layout

# No model has as many layers: `t*9999999999` must not allocate all memory.
_MAX_REPEAT = 1000
# Halvings of the interval in which the cost of the costliest chunk lies.
_BISECTIONS = 40
# Megatron-Core unrolls groups before single letters, so that a group may contain `t*3`.
_REPEATS = (re.compile(r"\(([^)]+)\)\*(\d+)"), re.compile(r"(.)\*(\d+)"))


@dataclass(frozen=True)
class StageLayers:
    """The number of transformer layers of each of the pp * vpp chunks.

    The first chunk also has the embedding; the last one also has the layers of multi-token
    prediction (MTP) and the output layer with the loss. Either may have no transformer layers.

    Raises:
        ConfigError: chunks that do not divide over the stages, or a chunk without any layer.
    """

    num_layers: tuple[int, ...]
    """By chunk in model order: stage s holds chunks s, s + pp, s + 2 * pp, ..."""
    pp: int
    """Pipeline stages."""

    def __post_init__(self) -> None:
        chunks = len(self.num_layers)
        if not chunks or chunks % self.pp:
            raise ConfigError(f"{chunks} chunks on pp={self.pp} stages; set a multiple of pp")
        for chunk, layers in enumerate(self.num_layers):
            if layers < (0 if chunk in (0, chunks - 1) else 1):
                raise ConfigError(
                    f"chunk {chunk} of {chunks} has {layers} transformer layers; set 1 or more, "
                    "on the first and last chunk 0 or more"
                )

    @classmethod
    def even(cls, num_layers: int, *, pp: int, vpp: int = 1) -> StageLayers:
        """The same number of layers on each chunk.

        Raises:
            ConfigError: the layers do not divide; the message has a split that works.
        """
        return LayerSplit().stage_layers(num_layers, pp=pp, vpp=vpp)

    @classmethod
    def balanced(
        cls, num_layers: int, *, pp: int, vpp: int = 1, embedding: float = 0.0, head: float = 0.0
    ) -> StageLayers:
        """The split whose costliest chunk costs the least.

        Of chunks that cost the same, the one on the cheapest stage gets the next layer.

        >>> str(StageLayers.balanced(37, pp=4))
        'Et*9|t*10|t*9|t*9L'
        >>> str(StageLayers.balanced(37, pp=4, head=3.0))
        'Et*10|t*10|t*10|t*7L'

        Args:
            embedding, head: cost of the embedding and of the output layer with the loss, in
                transformer layers. `embedding` may be below 0: first layers that cost less.

        Raises:
            ConfigError: fewer layers than chunks between the first and the last.
        """
        chunks = pp * vpp
        least = [
            0 if chunk in (0, chunks - 1) else 1 for chunk in range(min(chunks, num_layers + 3))
        ]
        if num_layers < sum(least):
            raise ConfigError(
                f"num_layers={num_layers} over pp * vpp = {chunks} chunks; set pp * vpp to at most "
                f"{num_layers + 2}"
            )
        # No chunk gets less than the mean without the costs at the ends.
        floor = num_layers // chunks - math.ceil(max(abs(embedding), head))
        layers = [max(floor, count) for count in least]
        cost = [float(count) for count in layers]
        cost[0] += embedding
        cost[-1] += head
        stage_cost = [sum(cost[stage::pp]) for stage in range(pp)]

        def key(chunk: int) -> tuple[float, float, bool, int]:
            # With equal costs a chunk in the middle gets the layer: those at the ends do more.
            return cost[chunk], stage_cost[chunk % pp], chunk in (0, chunks - 1), chunk

        queue = [key(chunk) for chunk in range(chunks)]
        heapq.heapify(queue)
        missing = num_layers - sum(layers)
        while missing:
            chunk = queue[0][-1]
            # An entry is outdated once another chunk of its stage got a layer.
            if key(chunk) == queue[0]:
                layers[chunk] += 1
                cost[chunk] += 1.0
                stage_cost[chunk % pp] += 1.0
                missing -= 1
            heapq.heapreplace(queue, key(chunk))
        return cls(tuple(layers), pp)

    @classmethod
    def of_costs(
        cls,
        costs: Sequence[float],
        *,
        pp: int,
        vpp: int = 1,
        embedding: float = 0.0,
        head: float = 0.0,
    ) -> StageLayers:
        """`balanced` for layers of different costs.

        Later chunks are filled first: earlier stages keep more activations.

        >>> str(StageLayers.of_costs([1.0, 3.0, 1.0, 1.0, 1.0, 1.0], pp=2))
        'Et*2|t*4L'

        Args:
            costs: of each layer.
            embedding, head: of the embedding, and of the output layer with the loss.

        Raises:
            ConfigError: fewer layers than chunks between the first and the last.
        """
        chunks = pp * vpp
        before = [0.0, *accumulate(costs)]
        if len(costs) < chunks - 2:
            raise ConfigError(
                f"num_layers={len(costs)} over pp * vpp = {chunks} chunks; set pp * vpp to at most "
                f"{len(costs) + 2}"
            )

        def cut(limit: float) -> list[int]:
            """Layers of each chunk, from the last one; more than there are if some exceeds it."""
            layers = []
            end = len(costs)
            for chunk in range(chunks - 1, 0, -1):
                room = limit - (head if chunk == chunks - 1 else 0.0)
                # Chunks before this one, but for the first, need a layer each.
                first = min(max(bisect_left(before, before[end] - room), chunk - 1), end)
                first = first if chunk == chunks - 1 else min(first, end - 1)
                layers.append(end - first)
                end = first
            fits = embedding + before[end] + (head if chunks == 1 else 0.0) <= limit
            return [*layers, end] if fits else []

        low, high = max(*costs, embedding, head), before[-1] + embedding + head
        found = cut(high)
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            split = cut(middle)
            low, high, found = (low, middle, split) if split else (middle, high, found)
        return cls(tuple(reversed(found)), pp)

    @property
    def total(self) -> int:
        """Transformer layers of the whole model."""
        return sum(self.num_layers)

    @property
    def vpp(self) -> int:
        """Chunks per stage."""
        return len(self.num_layers) // self.pp

    @property
    def is_even(self) -> bool:
        """Whether all chunks have equally many layers."""
        return len(set(self.num_layers)) == 1

    @property
    def offsets(self) -> tuple[int, ...]:
        """For each chunk, the number of layers before it in the model."""
        return (0, *accumulate(self.num_layers[:-1]))

    def of_stage(self, stage: int) -> tuple[int, ...]:
        """The number of layers of each chunk of a pipeline stage."""
        return self.num_layers[stage :: self.pp]

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, num_mtp_layers: int = 0) -> str:
        """The split as Megatron-Core's `pipeline_model_parallel_layout`.

        >>> StageLayers((3, 4, 4, 0), pp=2).to_text(num_mtp_layers=1)
        'Et*3|t*4|t*4|mL'
        """
        chunks = [_repeated("t", layers) for layers in self.num_layers]
        chunks[0] = f"E{chunks[0]}"
        chunks[-1] += f"{_repeated('m', num_mtp_layers)}L"
        return "|".join(chunks)


def stage_layers_of(
    num_layers: int, layout: Layout, stage_layers: StageLayers | None
) -> StageLayers:
    """The given split, checked against a model and a layout; None = equally many layers.

    Raises:
        ConfigError: another number of layers or chunks, or layers that do not divide.
    """
    if stage_layers is None:
        return StageLayers.even(num_layers, pp=layout.pp, vpp=layout.vpp)
    split = (stage_layers.total, stage_layers.pp, stage_layers.vpp)
    needed = (num_layers, layout.pp, layout.vpp)
    if split != needed:
        names = ("num_layers", "pp", "vpp")
        texts = (
            ", ".join(f"{name}={n}" for name, n in zip(names, numbers, strict=True))
            for numbers in (split, needed)
        )
        raise ConfigError(
            "stage_layers splits {}; the model and layout have {}: set it to match".format(*texts)
        )
    return stage_layers


def _repeated(letter: str, times: int) -> str:
    return letter * times if times < 2 else f"{letter}*{times}"


@dataclass(frozen=True, kw_only=True)
class LayerSplit:
    """Keys that split layers over pipeline stages, named as in Megatron-Core's TransformerConfig.

    Without any of them, all chunks have equally many layers.
    """

    num_layers_in_first_pipeline_stage: int | None = None
    """Transformer layers of the first stage, over its chunks; the other stages share the rest
    equally. null = as many as theirs."""
    num_layers_in_last_pipeline_stage: int | None = None
    """The same for the last stage."""
    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as a layer of the first chunk, which then has one transformer layer
    less."""
    account_for_loss_in_pipeline_split: bool = False
    """Count the output layer and loss as a layer of the last chunk, which then has one transformer
    layer less."""
    pipeline_model_parallel_layout: str | None = None
    """The content of each chunk in model order, separated by `|`: E embedding, t transformer layer,
    m multi-token prediction layer, L output layer and loss; `t*3` and `(tt|)*3` repeat. For 37
    layers on pp=4: `Et*9|t*10|t*10|t*8L`. Excludes the four keys above."""

    def stage_layers(
        self, num_layers: int, *, pp: int, vpp: int = 1, num_mtp_layers: int = 0
    ) -> StageLayers:
        """The layers of each chunk.

        Args:
            num_layers: transformer layers of the whole model, without MTP layers.
            num_mtp_layers: MTP layers; they are on the last chunk.

        Raises:
            ConfigError: keys that exclude each other, or a split that does not add up; the message
                has a split that works.
        """
        task = _Task(num_layers, pp, vpp, num_mtp_layers)
        first = self.num_layers_in_first_pipeline_stage
        last = self.num_layers_in_last_pipeline_stage
        self._check_exclusive()
        if self.pipeline_model_parallel_layout is not None:
            return _parse(self.pipeline_model_parallel_layout, task)
        if first is not None or last is not None:
            return _with_ends(first, last, task)
        embedding = self.account_for_embedding_in_pipeline_split
        loss = self.account_for_loss_in_pipeline_split
        return _counting(embedding, loss, task)

    def _check_exclusive(self) -> None:
        given = [field.name for field in fields(LayerSplit) if getattr(self, field.name)]
        counts = [name for name in given if name.startswith("num_layers_in")]
        rest = [name for name in given if name not in counts]
        if len(given) > 1 and "pipeline_model_parallel_layout" in given:
            raise ConfigError(
                f"{', '.join(given)} set; unset all but pipeline_model_parallel_layout"
            )
        if counts and rest:
            raise ConfigError(f"{', '.join(given)} set; unset {' and '.join(rest)}")


@dataclass(frozen=True)
class _Task:
    """What is split over what."""

    num_layers: int
    pp: int
    vpp: int
    num_mtp_layers: int

    @property
    def chunks(self) -> int:
        return self.pp * self.vpp

    def refuse(self, problem: str, *, instead: bool = True) -> NoReturn:
        """Raise ConfigError with a split that works, to be set instead of other keys."""
        split = StageLayers.balanced(self.num_layers, pp=self.pp, vpp=self.vpp)
        text = split.to_text(self.num_mtp_layers)
        end = " instead" if instead else ""
        raise ConfigError(f"{problem}; set pipeline_model_parallel_layout='{text}'{end}")


def _with_ends(first: int | None, last: int | None, task: _Task) -> StageLayers:
    """Given numbers of layers on the first and the last stage, equal ones in the middle."""
    given = {"first": first, "last": last}
    text = ", ".join(
        f"num_layers_in_{which}_pipeline_stage={layers}"
        for which, layers in given.items()
        if layers is not None
    )
    if task.pp == 1:
        raise ConfigError(f"{text} with pp=1; set pp > 1, or unset it")
    ends = [layers for layers in given.values() if layers is not None]
    num_middle = task.pp - len(ends)
    rest = task.num_layers - sum(ends)
    each = rest // num_middle if num_middle else 0
    if each * num_middle != rest or rest < num_middle or min(ends) < 1:
        task.refuse(
            f"{text}: {rest} of num_layers={task.num_layers} remain for {num_middle} other "
            f"stage{'s' * (num_middle != 1)}, which need equally many, and each stage 1 or more"
        )
    stages = [each] * task.pp
    stages[0] = each if first is None else first
    stages[-1] = each if last is None else last
    for stage, layers in enumerate(stages):
        if layers % task.vpp:
            task.refuse(
                f"{text}: the {layers} layers of stage {stage} do not divide over vpp={task.vpp}"
            )
    return StageLayers(tuple(layers // task.vpp for layers in stages) * task.vpp, task.pp)


def _counting(embedding: bool, loss: bool, task: _Task) -> StageLayers:
    """Equal chunks, in which the embedding and the loss may count as a layer each."""
    counted = task.num_layers + embedding + loss
    if counted % task.chunks:
        ends = [name for name, counts in (("embedding", embedding), ("loss", loss)) if counts]
        more = f" with {' and '.join(ends)}, {counted} layers," if ends else ""
        task.refuse(
            f"num_layers={task.num_layers}{more} does not divide over pp * vpp = {task.chunks} "
            "chunks",
            instead=bool(ends),
        )
    layers = [counted // task.chunks] * task.chunks
    layers[0] -= embedding
    layers[-1] -= loss
    return StageLayers(tuple(layers), task.pp)


def _parse(text: str, task: _Task) -> StageLayers:
    """Read Megatron's text form and compare it with the model."""
    refuse = partial(task.refuse, instead=False)
    name = f"pipeline_model_parallel_layout={brief(text)}"
    chunks = _unrolled(text, name).split("|")
    whole = "".join(chunks)
    unknown = sorted(set(whole) - set("EtmL"))
    if unknown:
        refuse(f"{name} has {brief(unknown[0])}, which is none of E, t, m, L, |, *n and ()*n")
    if len(chunks) != task.chunks:
        refuse(f"{name} has {len(chunks)} chunks (separated by |), pp * vpp is {task.chunks}")
    needed = {"E": 1, "L": 1, "t": task.num_layers, "m": task.num_mtp_layers}
    source = {"t": " (num_layers)", "m": " (mtp_num_layers)"}
    for letter, count in needed.items():
        found = whole.count(letter)
        if found != count:
            refuse(
                f"{name} has {found} {letter}, the model {count} {letter}{source.get(letter, '')}"
            )
    shape = re.compile(rf"Et*(\|t*){{{task.chunks - 1}}}m*L")
    if not shape.fullmatch("|".join(chunks)):
        refuse(
            f"{name} must begin with E and end with L, with m between the last t and L in the last "
            "chunk"
        )
    for number, chunk in enumerate(chunks):
        if not chunk:
            refuse(f"{name}: chunk {number} of {task.chunks} is empty")
    return StageLayers(tuple(chunk.count("t") for chunk in chunks), task.pp)


def _unrolled(text: str, name: str) -> str:
    """The text without commas and repetitions."""

    def repeat(match: re.Match[str]) -> str:
        times = int(match[2]) if len(match[2]) < 5 else _MAX_REPEAT + 1
        if times > _MAX_REPEAT:
            raise ConfigError(f"{name} repeats {brief(match[0])}; set at most {_MAX_REPEAT} times")
        return match[1] * times

    text = text.replace(",", "")
    for pattern in _REPEATS:
        text = pattern.sub(repeat, text)
    return text
