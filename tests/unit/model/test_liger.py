"""Liger's kernel for the vocabulary head: the glue, when it is chosen, and what is reported.

Liger's native kernels need a Hopper or Blackwell GPU. Here its function runs its own torch fallback
on the CPU, which in fp32 gives the numbers of the native kernels without their rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megapack.errors import ConfigError
from megapack.model import liger
from megapack.model.liger import LigerLogprobs, choose_head, largest_error, obstacle
from megapack.model.logprobs import VocabHead, vocab_parallel_logprobs
from tests.groups import RankOf
from tests.liger_python import liger_ops, needs_liger

pytestmark = pytest.mark.unit

R, H, V = 12, 6, 37


@pytest.fixture
def group() -> Iterator[Any]:
    """A tensor-parallel group of this process alone."""
    owns = not dist.is_initialized()
    if owns:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    if owns:
        dist.destroy_process_group()


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Liger's function run its fallback on a CPU, which it otherwise refuses."""
    monkeypatch.setattr(liger_ops(), "_validate_tp_inputs", lambda *_: None)


def problem() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden_RH = torch.randn(R, H, generator=generator).requires_grad_()
    weight_VH = torch.randn(V, H, generator=generator).requires_grad_()
    return hidden_RH, weight_VH, torch.randint(0, V, (R,), generator=generator)


@needs_liger
@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("max_tokens", [5, R, 64])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_values_and_gradients_equal_those_of_the_torch_head(
    max_tokens: int, with_entropy: bool, group: Any
) -> None:
    hidden_RH, weight_VH, labels_R = problem()
    head = VocabHead(
        weight_VH=weight_VH, tp_group=group, temperature=0.7, with_entropy=with_entropy
    )
    factors_R = torch.linspace(-1.0, 2.0, R)
    results = []
    for logprobs in (LigerLogprobs(max_tokens), vocab_parallel_logprobs):
        logprobs_R, entropy_R = logprobs(hidden_RH, labels_R, head)
        loss = (factors_R * logprobs_R).sum()
        if entropy_R is not None:
            loss = loss + (factors_R.flip(0) * entropy_R).sum()
        gradients = torch.autograd.grad(loss, (hidden_RH, weight_VH))
        results.append((logprobs_R, entropy_R, *gradients))
    assert (results[0][1] is not None) is with_entropy
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=1e-5)


@needs_liger
@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("tied", [True, False])
def test_gradients_of_all_calls_are_added_to_the_main_gradient(tied: bool, group: Any) -> None:
    added = []
    for logprobs in (LigerLogprobs(5), vocab_parallel_logprobs):
        hidden_RH, weight_VH, labels_R = problem()
        weight: Any = weight_VH
        weight.main_grad = torch.ones(V, H)
        weight.grad_added_to_main_grad = False
        head = VocabHead(weight_VH=weight_VH, tp_group=group, tied=tied)
        logprobs_R, _ = logprobs(hidden_RH, labels_R, head)
        (rest_VH,) = torch.autograd.grad(logprobs_R.sum(), weight_VH)
        added.append(weight.main_grad)
        assert weight.grad_added_to_main_grad is not tied
        if tied:
            assert not rest_VH.any()
    torch.testing.assert_close(added[0], added[1], atol=1e-5, rtol=1e-5)
    assert (added[0] - 1).abs().max() > 0.1


@needs_liger
@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("has_main_gradient", [False, True])
def test_rows_of_padding_do_not_count(has_main_gradient: bool, group: Any) -> None:
    results = []
    for logprobs in (LigerLogprobs(5), vocab_parallel_logprobs):
        hidden_RH, weight_VH, labels_R = problem()
        weight: Any = weight_VH
        if has_main_gradient:
            weight.main_grad = torch.zeros(V, H)
            weight.grad_added_to_main_grad = False
        head = VocabHead(weight_VH=weight_VH, num_ids=30, tp_group=group, tied=False)
        logprobs_R, _ = logprobs(hidden_RH, labels_R % 30, head)
        grad_RH, grad_VH = torch.autograd.grad(logprobs_R.sum(), (hidden_RH, weight_VH))
        results.append((logprobs_R, grad_RH, weight.main_grad if has_main_gradient else grad_VH))
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=1e-5)
    assert not results[0][2][30:].any()


def test_padding_that_splits_ids_unequally_keeps_the_kernel_from_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(liger, "obstacle", lambda _: None)
    monkeypatch.setattr(liger, "agree", lambda check, **_: check())
    chunk: Any = SimpleNamespace(vocab_size=384)
    config = SimpleNamespace(bf16=True)
    options: dict[str, Any] = {"chunk_tokens": None, "device": torch.device("cpu")}
    found = choose_head("auto", chunk, config, RankOf(0, 2), num_ids=320, **options)
    assert found.kernel == "torch"
    assert "320 ids is padded to 384 rows" in str(found)
    with pytest.raises(ConfigError, match="padded to 384 rows"):
        choose_head("liger", chunk, config, RankOf(0, 2), num_ids=320, **options)


@needs_liger
@pytest.mark.usefixtures("on_the_cpu")
def test_a_label_outside_the_vocabulary_has_no_logprob(group: Any) -> None:
    hidden_RH, weight_VH, labels_R = problem()
    labels_R[1] = V
    labels_R[2] = -100
    head = VocabHead(weight_VH=weight_VH, tp_group=group)
    logprobs_R, _ = LigerLogprobs(64)(hidden_RH, labels_R, head)
    assert torch.isfinite(logprobs_R).tolist() == [True, False, False, *[True] * (R - 3)]


@needs_liger
@pytest.mark.usefixtures("on_the_cpu")
def test_the_comparison_sees_logits_that_are_rounded_to_bf16(group: Any) -> None:
    generator = torch.Generator().manual_seed(4)
    weight_VH = torch.randn(512, 64, generator=generator)
    head = VocabHead(weight_VH=weight_VH, tp_group=group)
    assert largest_error(LigerLogprobs(256), head) < liger.MOST_ERROR_NATS / 10
    # The fallback rounds logits to the dtype of the weights.
    rounded = largest_error(
        LigerLogprobs(256), VocabHead(weight_VH=weight_VH.bfloat16(), tp_group=group)
    )
    assert rounded > 5 * liger.MOST_ERROR_NATS


def test_rows_without_responses_run_in_torch(group: Any) -> None:
    hidden_RH, weight_VH, labels_R = problem()
    head = VocabHead(weight_VH=weight_VH, tp_group=group, with_entropy=True)
    logprobs_R, entropy_R = LigerLogprobs(64)(hidden_RH[:0], labels_R[:0], head)
    assert entropy_R is not None
    (grad_VH,) = torch.autograd.grad((logprobs_R + entropy_R).sum(), weight_VH)
    assert torch.equal(grad_VH, torch.zeros(V, H))


def gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], *packages: str) -> None:
    """Pretend that there is a GPU, with these packages only."""
    monkeypatch.setattr(liger.cpu, "uses_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(
        liger.importlib.util, "find_spec", lambda name: object() if name in packages else None
    )


def test_what_keeps_the_kernel_from_running(monkeypatch: pytest.MonkeyPatch) -> None:
    both = ("liger_kernel", "liger_cute_kernels")
    monkeypatch.setattr(liger.cpu, "uses_cuda", lambda: False)
    assert obstacle(torch.bfloat16) == "the device is not CUDA"
    gpu(monkeypatch, (9, 0))
    assert obstacle(torch.float32) == "its kernels take bf16, the model is float32"
    assert "liger-kernel is not installed" in str(obstacle(torch.bfloat16))
    gpu(monkeypatch, (9, 0), "liger_kernel")
    assert "liger-cute-kernels is not installed" in str(obstacle(torch.bfloat16))
    gpu(monkeypatch, (8, 0), *both)
    assert obstacle(torch.bfloat16) == "the GPU has compute capability 8.0, it needs 9.0 or 10.x"


def chosen(choice: Any, monkeypatch: pytest.MonkeyPatch, error_nats: float | Exception) -> Any:
    """`choose_head` where Liger's kernel can run, with this error."""

    def compared(*_: Any) -> float:
        if isinstance(error_nats, Exception):
            raise error_nats
        return error_nats

    monkeypatch.setattr(liger, "obstacle", lambda _: None)
    monkeypatch.setattr(liger, "reserve", lambda *_: LigerLogprobs(64))
    monkeypatch.setattr(liger, "largest_error", compared)
    layer = SimpleNamespace(weight=torch.zeros(V, H), bias=None)
    chunk: Any = SimpleNamespace(post_process=True, output_layer=layer)
    config = SimpleNamespace(bf16=True)
    device = torch.device("cpu")
    return choose_head(choice, chunk, config, None, chunk_tokens=None, device=device)


@pytest.mark.usefixtures("group")
def test_auto_takes_the_kernel_only_if_its_logprobs_are_those_of_fp32_logits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exact = chosen("auto", monkeypatch, 2e-5)
    assert exact.kernel == "liger"
    assert isinstance(exact.logprobs, LigerLogprobs)
    assert "2.0e-05 nats" in str(exact)
    for bad in (0.02, float("nan"), RuntimeError("no memory")):
        refused = chosen("auto", monkeypatch, bad)
        assert refused.kernel == "torch"
        assert refused.logprobs is vocab_parallel_logprobs
        assert str(refused).startswith("head torch (not liger: its log-probs differ")
    # Requested by name it runs all the same, and the run's first lines say by how much it differs.
    forced = chosen("liger", monkeypatch, 0.02)
    assert forced.kernel == "liger"
    assert "2.0e-02 nats" in str(forced)
    with pytest.raises(RuntimeError, match="no memory"):
        chosen("liger", monkeypatch, RuntimeError("no memory"))


@pytest.mark.usefixtures("group")
def test_on_a_cpu_the_head_is_torch() -> None:
    config = SimpleNamespace(bf16=False, params_dtype=torch.float32)
    options: dict[str, Any] = {"chunk_tokens": None, "device": torch.device("cpu")}
    found = choose_head("auto", torch.nn.Module(), config, None, **options)
    assert str(found) == "head torch (not liger: the device is not CUDA)"
    assert str(choose_head("torch", torch.nn.Module(), config, None, **options)) == "head torch"
    with pytest.raises(ConfigError, match=r"model\.head_kernel=liger cannot run here: the device"):
        choose_head("liger", torch.nn.Module(), config, None, **options)
