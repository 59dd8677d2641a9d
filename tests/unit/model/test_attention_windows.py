"""Attention over samples, shared prefixes and slices equals attention that is written out with a
mask, in each kernel, with sliding windows and sinks or without."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megapack.layout import Layout
from megapack.model import carried
from megapack.model.attention import sdpa, varlen
from megapack.model.attention.packed import PackedAttention, layer_window, row_params
from megapack.model.attention.paths import key_paths
from megapack.model.attention.sdpa import PackedSDPA
from megapack.model.attention.varlen import PackedVarlen
from megapack.plan import MicroBatch, Part
from megapack.rows.chain import link_rows
from megapack.rows.packing import pack_row
from megapack.rows.slices import slice_positions
from megapack.samples import SampleBatch
from tests.forests import (
    Forest,
    error,
    forest,
    masked_attention,
    random_forest,
    row_tensors,
    with_gradients,
)
from tests.rehearsal.flash import band, flash_backward, flash_forward, sequences

pytestmark = pytest.mark.unit

HEADS, GROUPS, D = 4, 2, 8
SCALE = 0.3
WINDOWS = [None, 2, 3, 8, 1000]
KERNELS = ["sdpa", "varlen"]
PLAIN = ("sdpa", "vanilla", None)
"""PackedSDPA without windows and sinks."""


def varlen_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """torch 2.12's varlen attention."""
    assert window_size[1] == 0
    out = []
    for q, k in sequences(cu_seq_q, cu_seq_k):
        seen = band(q.stop - q.start, k.stop - k.start, window_size[0])
        out.append(masked_attention(query[q], key[k], value[k], seen, scale))
    return torch.cat(out)


@pytest.fixture(autouse=True)
def replaced_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's kernels need CUDA."""
    monkeypatch.setattr(varlen, "varlen_kernel", lambda: varlen_kernel)
    monkeypatch.setattr(varlen, "flash_kernels", lambda: (flash_forward, flash_backward))


def core(
    name: str = "sdpa", window: int | None = None, sinks: str = "vanilla", **changes: Any
) -> PackedAttention:
    values = {
        "attention_dropout": 0.0,
        "kv_channels": D,
        "num_attention_heads": HEADS,
        "context_parallel_size": 1,
        "tensor_model_parallel_size": 1,
        "window_size": None if window is None else (window - 1, 0),
        "window_attn_skip_freq": None,
        "softmax_type": sinks,
        "params_dtype": torch.float64,
        "use_cpu_initialization": True,
    }
    config = SimpleNamespace(**{**values, **changes})
    kind = PackedVarlen if name == "varlen" else PackedSDPA
    module = kind(config, 1, AttnMaskType.causal, "self", softmax_scale=SCALE)
    if sinks == "learnable":
        with torch.no_grad():
            module.softmax_offset.copy_(torch.tensor([-1.0, 0.5, 2.0, 4.0]))
    return module


def compared(module: PackedAttention, row: Forest, inputs: tuple[Tensor, ...]) -> float:
    """The largest error of outputs and of gradients, those of sinks among them."""
    sink = module.softmax_offset
    learned = () if sink is None else (sink,)
    found = with_gradients(module.attend(*inputs, row.view()), (*inputs, *learned))
    seen = row.windowed_TT(module.window)
    wanted = masked_attention(*inputs, seen, SCALE, sink)
    return error(found, with_gradients(wanted, (*inputs, *learned)))


@pytest.mark.parametrize(
    ("name", "sinks", "window"),
    [*itertools.product(KERNELS, ("vanilla", "learnable"), WINDOWS)],
)
def test_samples_and_prefixes_equal_a_mask(name: str, sinks: str, window: int | None) -> None:
    for seed, depth in enumerate((0, 1, 3, 4)):
        row = random_forest(seed, depth=depth)
        inputs = row_tensors(row.tokens, HEADS, GROUPS, D, seed=seed)
        assert compared(core(name, window, sinks), row, inputs) < 1e-12


@pytest.mark.parametrize(
    ("name", "sinks", "window"), [*((name, "learnable", 4) for name in KERNELS), PLAIN]
)
@pytest.mark.parametrize(("heads", "groups", "value_width"), [(4, 4, 8), (4, 1, 8), (4, 2, 5)])
def test_heads_may_differ(
    name: str, sinks: str, window: int | None, heads: int, groups: int, value_width: int
) -> None:
    row = random_forest(3)
    inputs = row_tensors(row.tokens, heads, groups, D, value_width)
    assert compared(core(name, window, sinks), row, inputs) < 1e-12


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize(
    ("name", "sinks", "window"),
    [*itertools.product(KERNELS, ("learnable",), (3, None)), PLAIN],
)
def test_slices_attend_as_the_whole_row_does(
    name: str, sinks: str, window: int | None, cp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = random_forest(5, cp, depth=3)
    q, k, v = row_tensors(row.tokens, HEADS, GROUPS, D)
    module = core(name, window, sinks)
    sink = module.softmax_offset
    inputs = (q, k, v) if sink is None else (q, k, v, sink)
    whole = masked_attention(q, k, v, row.windowed_TT(window), SCALE, sink)
    weights = torch.linspace(-1, 1, q.numel(), dtype=q.dtype).view_as(q).sin()
    wanted = torch.autograd.grad((whole * weights).sum(), inputs)
    slices = [slice_positions(row.spans, cp, rank) for rank in range(cp)]

    def gather(key: Tensor, value: Tensor, order_K: Tensor, group: Any) -> tuple[Tensor, Tensor]:
        """Concatenated slices of all ranks, as the collective returns them."""
        return k[torch.cat(slices)][order_K], v[torch.cat(slices)][order_K]

    monkeypatch.setattr(sdpa, "gather_rows", gather)
    monkeypatch.setattr(varlen, "gather_rows", gather)
    total = [torch.zeros_like(x) for x in inputs]
    for rank, mine in enumerate(slices):
        out = module.attend(q[mine], k[mine], v[mine], row.view(rank, cp))
        assert error([out.detach()], [whole[mine].detach()]) < 1e-12
        grads = torch.autograd.grad((out * weights[mine]).sum(), inputs)
        total = [a + b for a, b in zip(total, grads, strict=True)]
    assert error(total, list(wanted)) < 1e-12


LENGTHS = [20, 6]
PIECES = [(0, 8), (8, 12), (12, 20)]
"""Of sample 0; sample 1 follows the second one."""


def in_pieces(
    name: str, window: int | None, recompute: str = "none"
) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of queries, keys, values and sinks: of pieces, and of whole samples."""
    module = core(name, window, "learnable")
    row = Forest((), tuple(LENGTHS))
    inputs = row_tensors(sum(LENGTHS), HEADS, GROUPS, D)
    sink = module.softmax_offset
    whole = masked_attention(*inputs, row.windowed_TT(window), SCALE, sink)
    weights = torch.linspace(-1, 1, whole.numel(), dtype=whole.dtype).view_as(whole).sin()
    wanted = torch.autograd.grad((whole * weights).sum(), (*inputs, sink))

    batch = SampleBatch([list(range(n)) for n in LENGTHS])
    rows = []
    for piece in PIECES:
        samples = (0, 1) if piece == PIECES[1] else (0,)
        tokens = piece[1] - piece[0] + (LENGTHS[1] if len(samples) > 1 else 0)
        micro_batch = MicroBatch(samples, tokens, tokens, 0, tokens, pieces=(Part(0, *piece),))
        rows.append(pack_row(batch, micro_batch, Layout()))
    losses = []
    links = link_rows(rows, keeps_gradients=True)
    for packed, link in zip(rows, links, strict=True):
        params = row_params(packed, link=link)
        held = packed.positions_N >= 0
        indices = torch.full((packed.row_tokens,), -1)
        indices[packed.positions_N[held]] = torch.arange(sum(packed.lengths))[held]
        # Times 1: between a piece's inputs and its keys is a graph, as in a model.
        qkv = [x[indices] * 1.0 for x in inputs]
        run = functools.partial(module, packed_seq_params=params)
        if recompute == "none":
            out = run(*qkv)
        else:
            out = checkpoint(run, *qkv, use_reentrant=recompute == "reentrant")
        out = out.unflatten(1, (HEADS, D))
        assert error([out.detach()], [whole[indices].detach()]) < 1e-12
        losses.append((out * weights[indices]).sum())
    for loss in reversed(losses):
        loss.backward()
    # Backwards have freed all keys.
    assert links[0] is not None
    assert not any(links[0].chain.kept.values())
    return [x.grad for x in (*inputs, sink) if x.grad is not None], list(wanted)


@pytest.mark.parametrize(
    ("name", "window", "recompute"),
    [
        # Without sinks a window of one key has no gradient.
        *(("sdpa", window, "none") for window in (1, 3, 11, None)),
        *(("varlen", window, "none") for window in (3, None)),
        *(("sdpa", 3, recompute) for recompute in ("reentrant", "not reentrant")),
    ],
)
def test_pieces_attend_as_the_whole_sample_does(
    name: str, window: int | None, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In float64, which the real varlen kernel refuses.
    monkeypatch.setattr(PackedVarlen, "forward", PackedAttention.forward)
    assert error(*in_pieces(name, window, recompute)) < 1e-12


def test_gradients_of_later_pieces_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carried, "_leaf", lambda value, link: value.detach().clone())
    found, wanted = in_pieces("sdpa", None)
    assert error(found[:1], wanted[:1]) < 1e-12
    for one, other in zip(found[1:3], wanted[1:3], strict=True):
        assert error([one], [other]) > 1e-2


def test_a_sink_keeps_its_digits_in_bf16() -> None:
    """A logit of one channel, 5.987 / 0.3, would be rounded to 20, which is 0.013 nats more."""
    module = core(sinks="learnable", params_dtype=torch.float32)
    with torch.no_grad():
        module.softmax_offset.fill_(5.987)
    row = forest([[1, 2, 3, 4, 5]])
    inputs = [torch.zeros_like(x) for x in row_tensors(row.tokens, HEADS, GROUPS, D)]
    inputs[2] += 1
    out = module.attend(*(x.bfloat16() for x in inputs), row.view()).float()
    wanted = masked_attention(*inputs, row.mask_TT, SCALE, module.softmax_offset).float()
    # The kernel rounds weights and results to 8 bits, relative errors of at most 2^-9 each.
    torch.testing.assert_close(out, wanted, rtol=6e-3, atol=0)


def test_one_more_in_the_denominator() -> None:
    """Megatron's softmax_type="off-by-one" is a sink of logit 0, which is not trained."""
    module = core(sinks="off-by-one")
    assert not list(module.parameters())
    assert not module.state_dict()
    row = random_forest(2)
    q, k, v = row_tensors(row.tokens, HEADS, GROUPS, D)
    wanted = masked_attention(q, k, v, row.mask_TT, SCALE, torch.zeros(HEADS))
    out = module.attend(q, k, v, row.view())
    assert error([out.detach()], [wanted.detach()]) < 1e-12


@pytest.mark.parametrize("name", KERNELS)
def test_the_work_of_a_window_is_linear(name: str) -> None:
    """Each query meets at most 2 w - 1 keys, whatever the length of its sample."""
    w = 16
    paths = key_paths([1000], (), window=w, max_queries=w if name == "sdpa" else None)
    assert sum(paths.num_queries) == 1000
    if name == "sdpa":
        assert max(paths.num_keys) == 2 * w - 1
        assert sum(paths.num_keys) < 2 * 1000
    # A piece of 8 tokens after 1000: its keys are those of its windows.
    row = key_paths([8], (BRANCH,), carried=[1000], window=w)
    assert row.num_keys == [8 + w - 1]
    assert row.order_K.tolist() == list(range(985, 1008))


BRANCH = SimpleNamespace(start=0, tokens=8, parent=-2)


def test_equal_blocks_run_as_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []
    torch_sdpa = sdpa.F.scaled_dot_product_attention

    def record(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        shapes.append((len(q), q.shape[2], k.shape[2]))
        return torch_sdpa(q, k, *args, **kwargs)

    monkeypatch.setattr(sdpa.F, "scaled_dot_product_attention", record)
    row = Forest((), (67,))
    core(window=8).attend(*row_tensors(67, HEADS, GROUPS, D), row.view())
    # (blocks, queries, keys)
    assert shapes == [(1, 8, 8), (7, 8, 15), (1, 3, 10)]


@pytest.mark.parametrize(
    ("frequency", "windows"),
    [(None, [5, 5, 5, 5]), (2, [5, None, 5, None]), ([0, 1, 1, 0], [None, 5, 5, None])],
)
def test_layers_have_windows_as_in_megatron(frequency: Any, windows: list[int | None]) -> None:
    config = SimpleNamespace(window_size=(4, 0), window_attn_skip_freq=frequency)
    assert [layer_window(config, number) for number in range(1, 5)] == windows


def test_ranks_split_sinks_by_heads() -> None:
    sinks = core(sinks="learnable", tensor_model_parallel_size=2, num_attention_heads=8)
    offset: Any = sinks.softmax_offset
    assert offset.shape == (4,)
    # So that the gradient norm counts each rank's.
    assert offset.tensor_model_parallel
    assert offset.partition_dim == 0


Change = Callable[[pytest.MonkeyPatch], None]


def without_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    def everything(*args: Any, window: int | None, **kwargs: Any) -> Any:
        return attention(*args, window=None, **kwargs)

    attention = sdpa.path_causal_attention
    monkeypatch.setattr(sdpa, "path_causal_attention", everything)


def with_wider_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    triu = Tensor.triu
    monkeypatch.setattr(Tensor, "triu", lambda mask, diagonal: triu(mask, diagonal - 1))


def without_gradients_of_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    def detached(*args: Any, sink_H: Tensor, **kwargs: Any) -> Any:
        return attention(*args, sink_H=sink_H.detach() + 0 * sink_H, **kwargs)

    attention = sdpa.path_causal_attention
    monkeypatch.setattr(sdpa, "path_causal_attention", detached)


@pytest.mark.parametrize(
    "change", [without_windows, with_wider_windows, without_gradients_of_sinks]
)
def test_a_wrong_kernel_is_found(change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    row = random_forest(4, depth=2)
    inputs = row_tensors(row.tokens, HEADS, GROUPS, D)
    module = core(window=3, sinks="learnable")
    assert compared(module, row, inputs) < 1e-12
    change(monkeypatch)
    assert compared(module, row, inputs) > 1e-3
