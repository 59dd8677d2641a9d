"""A judge of plans whose seconds were measured, not computed by the planner's formula.

The tables are in `tools/benching/measured_tables.py`. What they do not have is what is left of
whole steps on an H200 (docs/measured/one_gpu.md) without them. Beside the cost model's terms this
knows documents that leave a GPU unfilled, matrices of short rows, exchanges by bytes and between
nodes, and a host that launches kernels more slowly than the GPU runs them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from megapack import CostModel, Layout, MicroBatch, StepPlan
from megapack.base.arrays import Floats, Ints
from megapack.cost.layers import LayerKind
from megapack.cost.sizes import ModelSizes
from megapack.cost.stages import StageLayers
from megapack.pipeline.simulator import Runner
from tools.benching import measured_tables as tables

# Seconds of a token in a layer, per channel of its hidden states, that neither matrices nor
# attention take (norms, rotary embeddings, activations, residuals), in a forward and in a backward:
# what is left of the rows with `varlen` of docs/measured/one_gpu.md.
REST = (6.1e-11, 1.04e-10)
# What the vocabulary head reaches of an H100's peak in bf16, 989.4 TFLOP/s. Chosen by hand.
HEAD_FLOPS = 0.7 * 989.4e12
# The host's seconds of a layer's forward, at 64 tokens: twice those of an attention block in
# https://github.com/hao-ai-lab/DistCA, distca/profiling/data/compute-profile.jsonl
HOST_SECONDS = 2 * 0.224e-3
# Of its backward, as a part of these: samples alone in docs/measured/one_gpu.md.
HOST_BACKWARD = 1.15


class RowSeconds(NamedTuple):
    """Seconds of a row, each float64 [chunks]."""

    forward: Floats
    backward: Floats
    """With the weight gradients."""
    weights: Floats
    """The weight gradients, where they are apart."""


class Judge(Protocol):
    """Seconds of rows on a layout."""

    layout: Layout

    def row(self, row: MicroBatch) -> RowSeconds:
        """Seconds of a row on each chunk."""

    def p2p(self, step: StepPlan) -> float:
        """Seconds from the end of a chunk to the earliest start of the next one."""


@dataclass
class MeasuredSeconds:
    """The judge of a model on a layout."""

    sizes: ModelSizes
    layout: Layout
    lengths: Ints
    """Tokens of the samples that rows name."""
    host: float = HOST_SECONDS
    noise: float = 0.0
    """Each row's seconds are times 1 + at most this, up or down."""
    seed: int = 0
    _rows: dict[MicroBatch, RowSeconds] = field(default_factory=dict)

    def row(self, row: MicroBatch) -> RowSeconds:
        """Seconds of a row on each chunk."""
        if row not in self._rows:
            self._rows[row] = self._row(row)
        return self._rows[row]

    def _row(self, row: MicroBatch) -> RowSeconds:
        parts = {part.sample: (part.begin, part.end) for part in row.pieces}
        spans = np.array([parts.get(i, (0, self.lengths[i])) for i in row.samples] or [(0, 0)])
        return self.seconds(max(row.row_tokens, 1), spans, row.width)

    def seconds(self, tokens: int, spans: Ints, width: int = 1) -> RowSeconds:
        """Seconds of a row of samples.

        Args:
            tokens: of the whole row.
            spans: int64 [samples, 2], which tokens of each sample it has.
            width: DP ranks that share the row.
        """
        sizes, layout = self.sizes, self.layout
        mine = tokens / (layout.cp * width)
        ((kind, _),) = sizes.layer_kinds()
        layer = self._layer(kind, tokens, spans, width)
        num_layers = np.array(split_layers(sizes, layout).num_layers)[:, None]
        head = np.zeros_like(num_layers, dtype=np.float64)
        head[-1] = 2.0 * sizes.hidden_size * sizes.num_ids * mine / layout.tp / HEAD_FLOPS
        # The head's backward makes the logits again.
        table = num_layers * layer + head * np.array([1.0, 3.0, 0.0])
        floor = num_layers * self.host * np.array([1.0, HOST_BACKWARD, 0.0])
        table = np.maximum(table, floor)
        if self.noise:
            rng = np.random.default_rng([self.seed, tokens, width, *spans.ravel()])
            table = table * (1 + self.noise * rng.uniform(-1, 1))
        return RowSeconds(*table.T)

    def _layer(self, kind: LayerKind, tokens: int, spans: Ints, width: int) -> Floats:
        """float64 [3]: seconds of a layer's forward, backward and weight gradients."""
        sizes, layout = self.sizes, self.layout
        tp, ranks = layout.tp, layout.cp * width
        mine = tokens / ranks
        dense = kind.layer_flops_per_token()
        products = sent = 0.0
        if kind.num_experts:
            experts = 6.0 * sizes.hidden_size * kind.width * sizes.moe_top_k
            dense -= experts
            each = mine * sizes.moe_top_k * layout.ep / kind.num_experts
            # All experts' matrices together, in products of few tokens each.
            products = product_seconds(each, experts) * mine / each
            sent = dispatch_seconds(2.0 * mine * sizes.hidden_size, sizes.moe_top_k, layout.ep)
        products += product_seconds(mine, dense / tp)
        attention, backward = attention_seconds(spans, sizes.num_attention_heads // tp, ranks)
        rest, backward_rest = (mine * sizes.hidden_size / tp * part for part in REST)
        # Hidden states before and after attention and MLP, in the backward too.
        hidden = 2.0 * mine * sizes.hidden_size
        moved = 2 * collective(tables.GATHER_US, hidden, tp, tp) + sent
        moved += 2 * collective(tables.SCATTER_US, hidden, tp, tp)
        # Keys and values; in the backward also their gradients.
        keys = tokens * kind.layer_cp_bytes_per_token() / tp
        exchanged = collective(tables.GATHER_US, keys, ranks, tp * ranks)
        returned = collective(tables.SCATTER_US, keys, ranks, tp * ranks)
        return np.array(
            [
                products + attention + rest + moved + exchanged,
                2 * products + backward + backward_rest + moved + exchanged + returned,
                products,
            ]
        )

    def p2p(self, step: StepPlan) -> float:
        """Seconds to send a mean row to the next stage."""
        if self.layout.pp == 1:
            return 0.0
        layout, rows = self.layout, [row for rank in step.ranks for row in rank]
        tokens = sum(row.row_tokens / row.width for row in rows) / len(rows) / layout.cp / layout.tp
        gpus = layout.world_size
        # Within a node a rank's all-gather over two sends it as many bytes as it gets.
        return collective(tables.GATHER_US, 4.0 * tokens * self.sizes.hidden_size, 2, gpus)


def split_layers(sizes: ModelSizes, layout: Layout) -> StageLayers:
    """The layers of each chunk, as even as they can be."""
    return StageLayers.balanced([1.0] * sizes.num_layers, pp=layout.pp, vpp=layout.vpp)


def step_seconds(step: StepPlan, judge: Judge) -> float:
    """Seconds of a step in the plan's orders, or in Megatron's."""
    layout = judge.layout
    runner = Runner(layout, CostModel(p2p=judge.p2p(step)))
    orders = [step.order(rank, layout) for rank in range(len(step.ranks))]
    firsts = [[row.ranks(rank)[0] for row in rows] for rank, rows in enumerate(step.ranks)]
    # float64 [dp, 3, M, chunks]
    rows = [np.array([judge.row(row) for row in rank]).swapaxes(0, 1) for rank in step.ranks]
    if layout.ep_spans_dp:
        firsts, rows = [[0] * len(firsts[0])] * len(firsts), [np.max(rows, axis=0)] * len(rows)
    seconds = []
    for order, (forward, backward, weights) in zip(orders, rows, strict=True):
        at = order.microbatch, order.chunk
        # A backward whose weight gradients are apart frees nothing.
        joint = backward[at] - np.where(order.held == 0, weights[at], 0.0)
        seconds.append(np.choose(order.kind, [forward[at], joint, weights[at]]))
    ends = []
    for block in step.meeting_ranks(layout):
        own = slice(block.start, block.stop)
        first_DM = np.array(firsts[own]) - block.start
        runs = runner.coupled_timelines(orders[own], seconds[own], first_DM, block.start)
        ends += [run.end.max() for run in runs]
    return float(max(ends))


def attention_seconds(spans: Ints, heads: int, ranks: int) -> tuple[float, float]:
    """A layer's attention on one of the ranks that share a row, forward and backward.

    Documents of a full row add up. A row takes at least as long as its longest document alone.
    A piece takes what its sample takes, without what the tokens before it take.

    Args:
        spans: int64 [samples, 2], which tokens of each sample the row has.
        heads: of one GPU.
    """
    begin, end = spans.T
    packed = _document(tables.PACKED, end, heads, ranks) - _document(
        tables.PACKED, begin, heads, ranks
    )
    ratios = np.interp(end, tables.BACKWARD_TOKENS, tables.BACKWARD_RATIOS)
    forward, backward = float(packed.sum()), float((packed * ratios).sum())
    longest = int(np.argmax(end - begin))
    alone = _document(tables.ALONE, (end - begin)[longest : longest + 1], heads, ranks)[0]
    least = max(1.0, float(alone) / max(forward, 1e-12))
    return forward * least, backward * least


def _document(
    table: tuple[Floats, Floats], lengths: Ints | Floats, heads: int, ranks: int
) -> Floats:
    """Seconds of documents by a table, straight between its lengths in seconds per token."""
    tokens, seconds = table
    by_heads = _doubled(seconds, tables.HEADS[0] / heads)
    per_token = _doubled(by_heads, ranks) / tokens
    last = (per_token[-1] - per_token[-2]) / (tokens[-1] - tokens[-2])
    found = np.interp(lengths, tokens, per_token) + last * np.maximum(lengths - tokens[-1], 0)
    return np.asarray(found * lengths, dtype=np.float64)


def _doubled(table: Floats, factor: float) -> Floats:
    """The column of a table [..., columns..., ] whose second axis is 1, 2, 4 and 8; beyond, each
    doubling changes as much as the last one, and at most halves."""
    power = int(np.log2(factor))
    last = table.shape[1] - 1
    column: Floats = table[:, min(power, last)]
    more = np.maximum(table[:, last] / table[:, last - 1], 0.5)
    return np.asarray(column * more ** max(power - last, 0), dtype=np.float64)


def product_seconds(tokens: float, flops_per_token: float) -> float:
    """A product's forward; its input and weight gradients take as long each.

    Below the table's first tokens and beyond its last ones the lines go on.
    """
    x, y = tables.MATRIX_TOKENS, tables.MATRIX_SECONDS
    k = int(np.clip(np.searchsorted(x, tokens) - 1, 0, len(x) - 2))
    seconds = y[k] + (tokens - x[k]) * (y[k + 1] - y[k]) / (x[k + 1] - x[k])
    return float(seconds) / 3 * flops_per_token / tables.MATRIX_FLOPS


def collective(table_us: dict[int, list[int]], size: float, ranks: int, gpus: int) -> float:
    """Seconds of an all-gather or a reduce-scatter.

    Args:
        table_us: of a node.
        size: bytes that a rank has at the end of an all-gather.
        ranks: that take part.
        gpus: that the ranks and what is between them span; beyond a node, each receives through
            its own adapter.
    """
    if ranks == 1 or size == 0:
        return 0.0
    x, y = tables.COLLECTIVE_BYTES, 1e-6 * np.array(table_us[min(ranks, 8)])
    # The line through the first two points gives the latency.
    latency = y[0] - x[0] * (y[1] - y[0]) / (x[1] - x[0])
    if gpus > tables.NODE_GPUS:
        return float(latency + size * (ranks - 1) / ranks / tables.NODE_BYTES_PER_SECOND)
    return float(np.interp(size, [0.0, *x], [latency, *y]))


def dispatch_seconds(size: float, top_k: int, ep: int) -> float:
    """Seconds in which a GPU's tokens reach their experts and come back.

    A token goes once to each rank that has some of its experts: with ep=8 and 8 experts that any
    rank may have, to 8 * (1 - (7/8)^8) = 5.25 ranks.

    Args:
        size: bytes of the tokens.
    """
    sent = size * ep * (1 - (1 - 1 / ep) ** top_k)
    per_byte = 1 / tables.DISPATCH_BYTES_PER_SECOND + 1 / tables.COMBINE_BYTES_PER_SECOND
    return sent * per_byte if ep > 1 else 0.0
