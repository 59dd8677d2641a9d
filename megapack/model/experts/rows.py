"""Packed rows as the routers of a mixture of experts see them.

    samples' choices -> RoutingRow (one per micro-batch) -> routers -> recorded choices -> samples

A router gets the hidden states of a whole row and does not know its samples. A `RoutingRow` says
which token belongs to which samples, so that padding is ignored and each sample has its own losses.
It may hold the choices of an earlier pass, and it records those of this pass.

A token that samples share is routed once, and counts in the losses of each of them.

Auxiliary losses are sums over the step's N real tokens, so that packing cannot change them:

- z-loss (arXiv 2202.08906): sum of logsumexp(logits)^2 / N.
- load balance: the product of an expert's share of the choices and its mean score is not linear in
  tokens, so it must be defined for a set of tokens. Here that set is one sample, as in
  DeepSeek-V3's sequence-wise loss (arXiv 2412.19437, eq. 17 to 20), and a sample of n tokens has
  weight n / N: sum over samples of n / N * E / (K * n^2) * sum over experts of (choices * scores).
  That is a sum over tokens of their scores times the sample's share, E / (K * n) * choices, over N.
  A shared token counts in the choices of each of its samples, and has the sum of their shares.

Shape suffixes: T row tokens, t tokens of the row on this rank, S samples of the row, J its
branches, P pairs of branches and samples, O tokens of samples on this rank, N tokens of all
samples, E experts, L MoE layers of the whole model, K experts per token.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megapack.errors import DataError
from megapack.plan.plan import StepPlan
from megapack.prefixes import Branch
from megapack.rows.outputs import Scope, in_sample_order
from megapack.rows.packed import PackedRow, RoutingRow
from megapack.rows.slices import indices_in
from megapack.rows.transfer import moved


@dataclass(frozen=True, kw_only=True)
class RoutingShape:
    """The sizes of a model's routing."""

    num_layers: int
    """MoE layers of the whole model."""
    num_experts: int
    top_k: int

    @property
    def dtype(self) -> torch.dtype:
        """The smallest dtype for expert indices that all backends can sum."""
        return torch.uint8 if self.num_experts <= 256 else torch.int32


def routing_row(
    row: PackedRow, part: Tensor, choices: Sequence[Tensor | None] | None, shape: RoutingShape
) -> RoutingRow:
    """The row as this rank's routers see it, with the choices of its samples.

    Args:
        row: this context-parallel rank's slice of the row.
        part: int64, the positions of the slice that this rank's routers see.
        choices: per sample of the batch, see `check_choices`; required for the samples of this row.
            Padding tokens are spread round robin over the experts.

    Raises:
        DataError: the choices do not fit the model, or samples share tokens and not their choices.

    >>> from megapack import Layout, MicroBatch
    >>> from megapack.rows.packing import pack_row
    >>> from megapack.samples import SampleBatch
    >>> batch = SampleBatch([[5, 6, 7], [8]])
    >>> micro_batch = MicroBatch((1, 0), row_tokens=6, tokens=4, tokens_sq=10, padded_tokens=4)
    >>> row = pack_row(batch, micro_batch, Layout())
    >>> choices = [torch.tensor([[[2]], [[0]], [[1]]]), torch.tensor([[[1]]])]
    >>> shape = RoutingShape(num_layers=1, num_experts=3, top_k=1)
    >>> routed = routing_row(row, torch.arange(6), choices, shape)
    >>> routed.branches_t
    tensor([0, 1, 1, 1, 2, 2])
    >>> routed.copies_t
    tensor([1, 1, 1, 1, 0, 0])
    >>> routed.offsets_O
    tensor([0, 0, 1, 2])
    >>> routed.choices_tLK.flatten()
    tensor([1, 2, 0, 1, 1, 2], dtype=torch.uint8)
    """
    positions_t = row.row_positions_T[part]
    choices_tLK = None
    if choices is not None:
        choices_tLK = _whole_row_choices(row, choices, shape)[positions_t]
    num_branches = len(row.branches)
    branches_t = row.branch_of_T[part]
    branches_t = torch.where(branches_t < 0, num_branches, branches_t)
    copies_J = torch.tensor([len(branch.samples) for branch in row.branches] + [0])
    samples_of = [sample for branch in row.branches for sample in branch.samples]
    tokens_N = indices_in(positions_t, row.row_tokens)[row.positions_N]
    held_N = (tokens_N >= 0) & (row.positions_N >= 0)
    tokens_O = tokens_N[held_N]
    lengths = torch.tensor(row.lengths, dtype=torch.int64)
    samples_N = torch.arange(lengths.numel()).repeat_interleave(lengths)
    return RoutingRow(
        samples=row.samples,
        lengths_S=lengths.float(),
        num_branches=num_branches,
        branches_t=branches_t,
        copies_t=copies_J[branches_t],
        branch_of_P=torch.arange(num_branches).repeat_interleave(copies_J[:-1]),
        sample_of_P=torch.tensor(samples_of, dtype=torch.int64),
        tokens_O=tokens_O,
        samples_O=samples_N[held_N],
        offsets_O=row.position_ids_T[part][tokens_O],
        choices_tLK=choices_tLK,
    )


def _whole_row_choices(
    row: PackedRow, choices: Sequence[Tensor | None], shape: RoutingShape
) -> Tensor:
    """Choices [T, L, K] at all positions of the whole row."""
    first_T1 = torch.arange(row.row_tokens)[:, None] * shape.top_k
    round_robin_TK = (first_T1 + torch.arange(shape.top_k)) % shape.num_experts
    out_TLK = round_robin_TK.to(shape.dtype)[:, None].repeat(1, shape.num_layers, 1)
    if not row.samples:
        return out_TLK
    positions = torch.split(row.positions_N, list(row.lengths))
    for sample, own, length in zip(row.samples, positions, row.lengths, strict=True):
        value = choices[sample]
        check_choices(value, sample, length, shape)
        assert value is not None
        positions_N = own[: value.shape[0]]
        held = positions_N >= 0
        out_TLK[positions_N[held]] = value[held].to(shape.dtype)
    _check_shared_choices(row, choices)
    return out_TLK


def _check_shared_choices(row: PackedRow, choices: Sequence[Tensor | None]) -> None:
    """Raise DataError if samples share a token that they route to different experts.

    The order of a token's experts does not matter, because the layer adds up their outputs.
    """
    for branch in row.branches:
        samples = (row.samples[k] for k in branch.samples)
        first, *others = sorted(samples, key=lambda i: -len(_of_branch(choices[i], branch)))
        own = _of_branch(choices[first], branch)
        for other in others:
            value = _of_branch(choices[other], branch)
            # A sample that ends here may lack its last token.
            differs = (own[: len(value)] != value).flatten(1).any(1)
            if differs.any():
                raise DataError(
                    f"samples {first} and {other} share token "
                    f"{branch.offset + int(differs.int().argmax())}, and their routing differs "
                    "there; plan with SharedPrefixes.from_samples(..., routing=...)"
                )


def _of_branch(value: Tensor | None, branch: Branch) -> Tensor:
    """A sample's choices in a branch, the experts of each token in order."""
    assert value is not None
    return value[branch.offset : branch.offset + branch.tokens].sort(-1).values


def check_choices(value: Tensor | None, sample: int, length: int, shape: RoutingShape) -> None:
    """Raise DataError unless a sample's choices are distinct experts, [tokens, L, K].

    The last token may be missing, because an inference engine never runs it.
    """
    sizes = (shape.num_layers, shape.top_k)
    if value is None or tuple(value.shape) not in ((length, *sizes), (length - 1, *sizes)):
        given = None if value is None else tuple(value.shape)
        raise DataError(
            f"sample {sample} has routing {given}, not {(length, *sizes)} (its tokens, MoE layers, "
            "experts per token); record it with forward(record_routing=True) on the same model"
        )
    if value.is_floating_point() or (value < 0).any() or (value >= shape.num_experts).any():
        raise DataError(
            f"sample {sample}'s routing has {value.dtype} from {value.min()} to {value.max()}, not "
            f"integers in [0, {shape.num_experts}); record it on the same model"
        )
    ordered = value.sort(-1).values
    if (ordered[..., 1:] == ordered[..., :-1]).any():
        raise DataError(
            f"sample {sample}'s routing names an expert twice for one token; give "
            f"{shape.top_k} different experts per token"
        )


def token_weight(step: StepPlan) -> float:
    """Weight of one real token in a step's auxiliary losses, 1 / N."""
    return 1 / step.counts.tokens


def balance_loss(scores_tE: Tensor, chosen_tE: Tensor, row: RoutingRow, top_k: int) -> Tensor:
    """This rank's part of the sum over the row's samples of n * load balance.

    The ranks of `row.groups` exchange their counts.

    Args:
        scores_tE: scores of the experts for each token; they sum to 1.
        chosen_tE: bool, the top K experts of each token.

    With E = 2, K = 1 and one sample of n = 2 tokens that both choose expert 0, with scores 0.5 and
    0.75, load balance is 2 / (1 * 2^2) * 2 * (0.5 + 0.75) = 1.25:

    >>> row = RoutingRow(
    ...     samples=(0,),
    ...     lengths_S=torch.tensor([2.0]),
    ...     num_branches=1,
    ...     branches_t=torch.tensor([0, 0]),
    ...     copies_t=torch.tensor([1, 1]),
    ...     branch_of_P=torch.tensor([0]),
    ...     sample_of_P=torch.tensor([0]),
    ...     tokens_O=torch.tensor([0, 1]),
    ...     samples_O=torch.tensor([0, 0]),
    ...     offsets_O=torch.tensor([0, 1]),
    ... )
    >>> scores = torch.tensor([[0.5, 0.5], [0.75, 0.25]])
    >>> balance_loss(scores, torch.tensor([[True, False], [True, False]]), row, top_k=1)
    tensor(2.5000)
    """
    counts_SE = sample_counts(chosen_tE, row, scores_tE.dtype)
    share_SE = counts_SE * (scores_tE.shape[1] / top_k) / row.lengths_S[:, None]
    return (scores_tE * branch_shares(share_SE, row)[row.branches_t]).sum()


def sample_counts(chosen_tE: Tensor, row: RoutingRow, dtype: torch.dtype) -> Tensor:
    """How often each sample's tokens in the whole row choose each expert, [S, E].

    The ranks of the row's groups exchange their counts: of samples, of which a row hardly ever has
    more than branches.
    """
    num_experts = chosen_tE.shape[1]
    device = chosen_tE.device
    # The last branch is that of padding.
    counts_JE = torch.zeros(row.num_branches + 1, num_experts, dtype=dtype, device=device)
    counts_JE.index_add_(0, row.branches_t, chosen_tE.to(dtype))
    counts_SE = torch.zeros(len(row.samples), num_experts, dtype=dtype, device=device)
    counts_SE.index_add_(0, row.sample_of_P, counts_JE[row.branch_of_P])
    for group in row.groups:
        if group.size() > 1:
            dist.all_reduce(counts_SE, group=group)
    return counts_SE


def branch_shares(share_SE: Tensor, row: RoutingRow) -> Tensor:
    """The sum of the shares of each branch's samples, and 0 for padding: [J + 1, E]."""
    num_branches = row.num_branches + 1
    if row.branch_of_P.numel() == row.num_branches:
        share_JE = share_SE.new_zeros(num_branches, share_SE.shape[1])
        return share_JE.index_add_(0, row.branch_of_P, share_SE[row.sample_of_P])
    # On a GPU, index_add adds in any order, which changes the last bit. A product does not; in
    # float32 it might be TF32.
    shape = (num_branches, len(row.samples))
    member_JS = torch.zeros(shape, dtype=torch.float64, device=share_SE.device)
    member_JS[row.branch_of_P, row.sample_of_P] = 1.0
    return (member_JS @ share_SE.double()).to(share_SE.dtype)


def z_loss(logits_tE: Tensor, row: RoutingRow) -> Tensor:
    """Sum over the samples' tokens on this rank of logsumexp(logits)^2.

    With logits 0 for two experts it is log(2)^2 = 0.48 per token. Two samples share the first
    token, and the second one is padding:

    >>> import types
    >>> row = types.SimpleNamespace(copies_t=torch.tensor([2, 0]))
    >>> z_loss(torch.zeros(2, 2), row)
    tensor(0.9609)
    """
    squared_t = torch.logsumexp(logits_tE.float(), dim=-1).square()
    return torch.where(row.copies_t > 0, squared_t * row.copies_t, 0.0).sum()


def collect_routing(
    rows: Sequence[RoutingRow],
    lengths: Sequence[int],
    step: StepPlan,
    shape: RoutingShape,
    *,
    dp_rank: int,
    scope: Scope,
    groups: Sequence[Any],
    dp_group: Any,
    device: torch.device,
) -> list[Tensor | None]:
    """Recorded choices in sample order. Collective in each of the groups.

    Args:
        rows: this rank's rows, with the choices recorded for its layers and tokens.
        groups: groups of ranks with other layers or tokens of this DP rank's rows.
        dp_group: the DP ranks, which have other samples, or parts of these.

    Returns:
        Per sample of the batch [tokens, L, K] on the CPU, uint8 up to 256 experts and int32 beyond;
        None for samples that are not in the step or not in the scope.
    """

    def collect(samples: Sequence[int], is_spread: bool) -> Tensor:
        *firsts, num_tokens = itertools.accumulate((lengths[i] for i in samples), initial=0)
        starts = dict(zip(samples, firsts, strict=True))
        sizes = (num_tokens, shape.num_layers, shape.top_k)
        flat = torch.zeros(sizes, dtype=shape.dtype, device=device)
        # A row's samples are all in `samples`, or none of them is.
        held = [row for row in rows if row.samples and row.samples[0] in starts]
        _write_recorded(held, starts, flat)
        for group in [*groups, dp_group] if is_spread else groups:
            if group.size() > 1:
                dist.all_reduce(flat, group=group)
        return flat

    return in_sample_order(collect, lengths, step, dp_rank, scope)


def _write_recorded(rows: Sequence[RoutingRow], starts: Mapping[int, int], flat: Tensor) -> None:
    """Write the rows' recorded choices into `flat`, where sample i begins at `starts[i]`.

    Args:
        rows: the rows on the host. Their indices move to the device in one copy.
    """
    indices = tuple((_indices_in(row, starts), row.tokens_O) for row in rows)
    for row, (indices_O, tokens_O) in zip(rows, moved(indices, flat.device), strict=True):
        for layer, chosen_tK in row.recorded.items():
            flat[indices_O, layer] = chosen_tK[tokens_O].to(flat.dtype)


def _indices_in(row: RoutingRow, starts: Mapping[int, int]) -> Tensor:
    """int64 [O]: where each of the row's tokens on this rank is among all samples' tokens."""
    firsts_S = torch.tensor([starts[i] for i in row.samples], dtype=torch.int64)
    return firsts_S[row.samples_O] + row.offsets_O
