"""How a model's transformer layers are split over the chunks of a pipeline.

`LayerSplit` has the key of Megatron-Core's TransformerConfig that can express every split:

    LayerSplit + num_layers + pp, vpp -> StageLayers: the number of layers of each chunk
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

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
        cls,
        costs: Sequence[float],
        *,
        pp: int,
        vpp: int = 1,
        embedding: float = 0.0,
        head: float = 0.0,
    ) -> StageLayers:
        """The split whose costliest chunk costs the least, and that is about even besides.

        >>> str(StageLayers.balanced([1.0] * 37, pp=4))
        'Et*9|t*10|t*9|t*9L'
        >>> str(StageLayers.balanced([1.0] * 37, pp=4, head=3.0))
        'Et*10|t*10|t*10|t*7L'
        >>> str(StageLayers.balanced([1.0, 3.0, 1.0, 1.0, 1.0, 1.0], pp=2))
        'Et*2|t*4L'

        Args:
            costs: of each layer.
            embedding, head: of the embedding, and of the output layer with the loss.

        Raises:
            ConfigError: fewer layers than chunks between the first and the last.
        """
        chunks, num_layers = pp * vpp, len(costs)
        if num_layers < chunks - 2:
            raise ConfigError(
                f"num_layers={num_layers} over pp * vpp = {chunks} chunks; set pp * vpp to at most "
                f"{num_layers + 2}"
            )
        before = [0.0, *accumulate(costs)]
        extra = [0.0] * chunks
        extra[0] += embedding
        extra[-1] += head
        # All but the first and the last chunk need a layer.
        least = [int(chunk not in (0, chunks - 1)) for chunk in range(chunks)]

        def earliest(limit: float) -> list[int]:
            """The first layer of each chunk if later ones are filled first; begins above 0 if the
            first chunk is above the limit."""
            firsts = [num_layers]
            for chunk in reversed(range(chunks)):
                end = firsts[-1]
                fitting = bisect_left(before, before[end] - (limit - extra[chunk]))
                firsts.append(min(max(fitting, sum(least[:chunk])), end - least[chunk]))
            return firsts[::-1]

        low, high = max(*costs, embedding, head), before[-1] + embedding + head
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if earliest(middle)[0] else (low, middle)
        firsts = [0, *earliest(high)[1:]]
        for chunk in range(1, chunks):
            first = firsts[chunk - 1]
            # Where an even split would have the next chunk begin, as far as the limit allows.
            even = (before[-1] + sum(extra)) * chunk / chunks - embedding
            nearest = min(range(num_layers, -1, -1), key=lambda n: abs(before[n] - even))
            furthest = bisect_right(before, before[first] + high - extra[chunk - 1]) - 1
            furthest = min(furthest, num_layers - sum(least[chunk:]))
            own = max(firsts[chunk], first + least[chunk - 1])
            firsts[chunk] = max(own, min(nearest, furthest))
        return cls(tuple(end - first for first, end in pairwise(firsts)), pp)

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
        text = "num_layers={}, pp={}, vpp={}"
        raise ConfigError(
            f"stage_layers splits {text.format(*split)}; the model and layout have "
            f"{text.format(*needed)}: set it to match"
        )
    return stage_layers


def _repeated(letter: str, times: int) -> str:
    return letter * times if times < 2 else f"{letter}*{times}"


@dataclass(frozen=True, kw_only=True)
class LayerSplit:
    """How layers are split over pipeline stages, named as in Megatron-Core's TransformerConfig."""

    pipeline_model_parallel_layout: str | None = None
    """Contents of the chunks, separated by `|`: E embedding, t layer, m MTP layer, L output layer.
    For 37 layers on pp=4: `Et*9|t*10|t*10|t*8L`. null = equal chunks."""

    def stage_layers(
        self, num_layers: int, *, pp: int, vpp: int = 1, num_mtp_layers: int = 0
    ) -> StageLayers:
        """The layers of each chunk.

        Args:
            num_layers: transformer layers of the whole model, without MTP layers.
            num_mtp_layers: MTP layers; they are on the last chunk.

        Raises:
            ConfigError: a split that does not add up; the message has one that works.
        """
        chunks, text = pp * vpp, self.pipeline_model_parallel_layout
        needed = {"E": 1, "L": 1, "t": num_layers, "m": num_mtp_layers}
        try:
            if text is not None:
                return StageLayers(_read(text, chunks, needed), pp)
            if num_layers % chunks:
                raise ValueError(
                    f"num_layers={num_layers} does not divide over pp * vpp = {chunks} chunks"
                )
        except ConfigError:
            raise
        except ValueError as problem:
            split = StageLayers.balanced([1.0] * num_layers, pp=pp, vpp=vpp)
            raise ConfigError(
                f"{problem}; set pipeline_model_parallel_layout='{split.to_text(num_mtp_layers)}'"
            ) from None
        return StageLayers((num_layers // chunks,) * chunks, pp)


def _read(text: str, num_chunks: int, needed: Mapping[str, int]) -> tuple[int, ...]:
    """The layers of each chunk of Megatron's text form.

    Args:
        needed: letters of the text, and how many of each the model has.

    Raises:
        ValueError: the text is of another model, or not of this form.
    """
    name = f"pipeline_model_parallel_layout={brief(text)}"
    chunks = _unrolled(text, name).split("|")
    whole = "".join(chunks)
    if unknown := sorted(set(whole) - set(needed)):
        raise ValueError(
            f"{name} has {brief(unknown[0])}, which is none of E, t, m, L, |, *n and ()*n"
        )
    if len(chunks) != num_chunks:
        raise ValueError(
            f"{name} has {len(chunks)} chunks (separated by |), pp * vpp is {num_chunks}"
        )
    source = {"t": " (num_layers)", "m": " (mtp_num_layers)"}
    for letter, count in needed.items():
        found = whole.count(letter)
        if found != count:
            raise ValueError(
                f"{name} has {found} {letter}, the model {count} {letter}{source.get(letter, '')}"
            )
    if not re.fullmatch(r"Et*(\|t*)*m*L", "|".join(chunks)):
        raise ValueError(
            f"{name} must begin with E and end with L, with m between the last t and L in the last "
            "chunk"
        )
    if "" in chunks:
        raise ValueError(f"{name}: chunk {chunks.index('')} of {num_chunks} is empty")
    return tuple(chunk.count("t") for chunk in chunks)


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
