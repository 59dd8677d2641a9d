"""A block of a data file -> its token block: the token ids of its samples, and their index rows.

Token blocks are made one by one, in any process. Each depends on its block and the settings alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megapack.base.choices import Overlong
from megapack.job.data.files import Block
from megapack.job.data.images.reader import ImageReader, SampleImage
from megapack.job.data.lines import LineParser
from megapack.job.data.messages import BadLine
from megapack.job.data.rollouts import ROUTES, TOKEN_COLUMNS, Rollout
from megapack.job.data.tokenizer import ByteTokenizer, Tokenizer

Tokens = npt.NDArray[np.int32]
"""Token ids of samples one after another. A response token that does not count in the loss is
stored as -1 - id: 7 becomes -8, and 0 becomes -1."""
Routes = npt.NDArray[np.uint16]

INDEX_DTYPE = np.dtype(
    [
        ("file", "<i4"),  # number of the file, from 0 in the order of names
        ("number", "<i8"),  # line or row, from 1
        ("part", "<i4"),  # number of the sample within its line, from 0
        ("start", "<i8"),  # position of its first token among the tokens of all samples
        ("prompt_tokens", "<i4"),
        ("response_tokens", "<i4"),
        ("loss_tokens", "<i4"),  # response tokens that count in the loss
        ("pair_sign", "<i1"),  # 1 = preferred, -1 = the other, 0 = no pair
        ("group", "<i8"),  # prompt group, from 0 by first appearance
        ("rollout", "<i8"),  # from 0 by first appearance in the data set
        ("reward", "<f8"),  # NaN = not given
        ("advantage", "<f8"),  # NaN = not given
        ("route_start", "<i8"),  # position of its first token among the routes; -1 = none
        ("response_start", "<i8"),  # response tokens of the samples before it
        ("images", "<i4"),  # number of its images
        ("image_start", "<i8"),  # images of the samples before it
    ]
)
Index = npt.NDArray[np.void]
ARRAYS: dict[str, npt.DTypeLike] = {ROUTES: "<u2", **TOKEN_COLUMNS}
"""Arrays of values per token, and the type that they are stored with."""
BITS = {name: 1 << k for k, name in enumerate(ARRAYS)}


@dataclass(frozen=True, kw_only=True)
class ReadSettings:
    """How samples are read."""

    tokenizer: Tokenizer = dataclasses.field(default_factory=ByteTokenizer)
    images: ImageReader | None = None
    """None: images are refused."""
    vocab_size: int | None = None
    """Token ids must be below it; None = the tokenizer's."""
    max_length: int | None = None
    """Largest length of a sample in tokens; None = no limit."""
    overlong: Overlong = "error"
    """How a sample above `max_length` is treated: "error" refuses it, "truncate" keeps its first
    `max_length` tokens, "skip" leaves it out, as "truncate" does if no token would be left that
    counts in the loss. Of a preference pair both samples are left out. A warning says how many were
    truncated or skipped."""

    def parser(self) -> LineParser:
        """A parser with this tokenizer and vocabulary."""
        size = self.tokenizer.vocab_size if self.vocab_size is None else self.vocab_size
        return LineParser(self.tokenizer, size, self.images)

    def fit(self, samples: list[Rollout]) -> list[Rollout]:
        """Apply `overlong` to the samples of one line: those that are kept, perhaps shorter.

        If nothing changes, the list itself is returned.

        Raises:
            BadLine: one is too long, and `overlong` is "error".
        """
        most = self.max_length
        if most is None or all(sample.num_tokens <= most for sample in samples):
            return samples
        if self.overlong == "error":
            longest = max(sample.num_tokens for sample in samples)
            raise BadLine(
                f"{longest} tokens, max_length is {most}; raise it, or set overlong to truncate or "
                "skip"
            )
        kept = [sample for sample in samples if sample.num_tokens <= most]
        if self.overlong == "truncate":
            cut = [sample.cut(most) for sample in samples]
            kept = [
                after
                for after, before in zip(cut, samples, strict=True)
                if before.num_tokens <= most or after.num_loss_tokens
            ]
        is_pair = any(sample.pair_sign for sample in samples)
        return [] if is_pair and len(kept) < len(samples) else kept


@dataclass
class TokenBlock:
    """The samples of a block in order."""

    rows: Index
    """Their index rows, but for what depends on the samples before the block: the starts, and the
    numbers of `groups` and `rollouts`."""
    groups: list[int | str]
    """Each sample's prompt group, as the file names it."""
    rollouts: list[int | str]
    """Each sample's rollout within its prompt group, as the file names it."""
    tokens: Tokens
    """Of all samples, one after another: prompt, then response."""
    given: npt.NDArray[np.int8]
    """Of each sample; bit k: it has the k-th of `ARRAYS`."""
    arrays: dict[str, list[npt.NDArray[Any]]]
    """By name in `ARRAYS`, those of the samples that have one: [tokens or response tokens, ...]."""
    images: list[SampleImage]
    """Of all samples, one after another."""
    num_skipped: int = 0
    num_truncated: int = 0
    error: str = ""
    """Line number and reason of the first line that is refused; "" without one."""


def read_block(block: Block, file: int, settings: ReadSettings, parser: LineParser) -> TokenBlock:
    """Parse and tokenize the rows of a block.

    Args:
        file: the file's number; it and the row's number identify a sample without `group`.
        parser: of the settings; made once, because a tokenizer may take seconds to load.
    """
    samples: list[tuple[int, Rollout]] = []
    num_skipped = 0
    num_truncated = 0
    error = ""
    for number, row in block.rows():
        try:
            whole = parser.parse(row, f"{file} line-{number}")
            kept = settings.fit(whole)
        except BadLine as bad:
            error = f"{number}: {bad}"
            break
        if kept is not whole:
            num_skipped += len(whole) - len(kept)
            before = {sample.part: sample.num_tokens for sample in whole}
            num_truncated += sum(sample.num_tokens < before[sample.part] for sample in kept)
        samples += [(number, sample) for sample in kept]
    token_block = make_token_block(samples, file)
    token_block.num_skipped = num_skipped
    token_block.num_truncated = num_truncated
    token_block.error = error
    return token_block


def make_token_block(samples: Iterable[tuple[int, Rollout]], file: int = 0) -> TokenBlock:
    """The token block of these samples, each with the number of its line."""
    nan = float("nan")
    rows = []
    groups: list[int | str] = []
    rollouts: list[int | str] = []
    tokens: list[npt.NDArray[np.int64]] = [np.zeros(0, dtype=np.int64)]
    given: list[int] = []
    arrays: dict[str, list[npt.NDArray[Any]]] = {}
    images: list[SampleImage] = []
    for number, sample in samples:
        tokens += [sample.prompt_ids, _signed(sample)]
        for name, values in sample.arrays.items():
            arrays.setdefault(name, []).append(values)
        images += sample.images
        given.append(sum(map(BITS.__getitem__, sample.arrays)))
        rows.append(
            (
                *(file, number, sample.part, 0),
                *(len(sample.prompt_ids), len(sample.response_ids)),
                *(sample.num_loss_tokens, sample.pair_sign, 0, 0),
                nan if sample.reward is None else sample.reward,
                nan if sample.advantage is None else sample.advantage,
                *(-1, 0, len(sample.images), 0),
            )
        )
        groups.append(sample.group)
        rollouts.append(sample.rollout)
    return TokenBlock(
        np.array(rows, dtype=INDEX_DTYPE),
        groups,
        rollouts,
        np.concatenate(tokens).astype(np.int32),
        np.array(given, dtype=np.int8),
        arrays,
        images,
    )


def _signed(sample: Rollout) -> npt.NDArray[np.int64]:
    if sample.loss_mask is None:
        return sample.response_ids
    return np.where(sample.loss_mask, sample.response_ids, -1 - sample.response_ids)
