"""Chunked log-probs and entropies against torch's: values, gradients and memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from megapack.cost.head import default_chunk_tokens
from megapack.model.logprobs import VocabHead, vocab_parallel_logprobs
from tests.groups import RankOf

pytestmark = pytest.mark.unit

R, H, V = 10, 6, 37


def problem(num_tokens: int = R, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    hidden_RH = torch.randn(num_tokens, H, generator=generator).to(dtype).requires_grad_()
    weight_VH = torch.randn(V, H, generator=generator).to(dtype).requires_grad_()
    labels_R = torch.randint(0, V, (num_tokens,), generator=generator)
    return hidden_RH, weight_VH, labels_R


def whole(
    hidden_RH: Tensor,
    weight_VH: Tensor,
    labels_R: Tensor,
    temperature: float = 1.0,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies from the logits of all positions at once."""
    logits_RV = (hidden_RH @ weight_VH.t()).float()
    if cap is not None:
        logits_RV = cap * torch.tanh(logits_RV / cap)
    log_p_RV = F.log_softmax(logits_RV / temperature, dim=-1)
    return log_p_RV.gather(1, labels_R[:, None])[:, 0], -(log_p_RV.exp() * log_p_RV).sum(-1)


def gradients(scalar: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(scalar, inputs)


class LargestTensor(TorchDispatchMode):
    """Records the size of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_flatten(out)[0]:
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


@pytest.mark.parametrize(("temperature", "cap"), [(1.0, None), (0.7, None), (0.7, 2.5)])
@pytest.mark.parametrize("chunk_tokens", [1, 3, R, 64])
def test_values_and_gradients_equal_log_softmax(
    chunk_tokens: int, temperature: float, cap: float | None
) -> None:
    hidden_RH, weight_VH, labels_R = problem()
    head = VocabHead(
        weight_VH=weight_VH,
        logit_cap=cap,
        chunk_tokens=chunk_tokens,
        temperature=temperature,
        with_entropy=True,
    )
    logprobs_R, entropy_R = vocab_parallel_logprobs(hidden_RH, labels_R, head)
    expected_R, expected_entropy_R = whole(hidden_RH, weight_VH, labels_R, temperature, cap)
    assert entropy_R is not None
    torch.testing.assert_close(logprobs_R, expected_R, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(entropy_R, expected_entropy_R, atol=2e-6, rtol=1e-5)

    # A different factor at each position detects a chunk that got its neighbour's gradient.
    factors_R = torch.linspace(-1.0, 2.0, R)
    got = gradients(
        (factors_R * logprobs_R + factors_R.flip(0) * entropy_R).sum(), hidden_RH, weight_VH
    )
    want = gradients(
        (factors_R * expected_R + factors_R.flip(0) * expected_entropy_R).sum(),
        hidden_RH,
        weight_VH,
    )
    assert min(g.abs().max() for g in want) > 0.1
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


def test_each_output_alone_has_the_right_gradient() -> None:
    hidden_RH, weight_VH, labels_R = problem()
    head = VocabHead(weight_VH=weight_VH, chunk_tokens=4, with_entropy=True)
    for which in (0, 1):
        got = vocab_parallel_logprobs(hidden_RH, labels_R, head)[which]
        assert got is not None
        want = whole(hidden_RH, weight_VH, labels_R)[which]
        torch.testing.assert_close(
            gradients(got.square().sum(), hidden_RH, weight_VH),
            gradients(want.square().sum(), hidden_RH, weight_VH),
            atol=1e-5,
            rtol=1e-4,
        )


def test_no_positions_give_no_values_and_zero_gradients() -> None:
    hidden_RH, weight_VH, labels_R = problem(0)
    head = VocabHead(weight_VH=weight_VH, with_entropy=True)
    logprobs_R, entropy_R = vocab_parallel_logprobs(hidden_RH, labels_R, head)
    assert entropy_R is not None
    assert logprobs_R.shape == entropy_R.shape == (0,)
    grad_RH, grad_VH = gradients((logprobs_R + entropy_R).sum(), hidden_RH, weight_VH)
    assert grad_RH.shape == (0, H)
    # In a padding micro-batch the weight's gradient must be 0, not None, because ranks reduce it.
    assert torch.equal(grad_VH, torch.zeros(V, H))


def test_bf16_weights_give_the_logprobs_of_exact_products() -> None:
    # Logits with a standard deviation of 4, as those of a trained model: a bf16 logit of 16 to 32
    # is a multiple of 0.125.
    generator = torch.Generator().manual_seed(7)
    num_tokens, hidden, vocabulary = 64, 256, 4096
    hidden_RH = torch.randn(num_tokens, hidden, generator=generator).bfloat16()
    weight_VH = (torch.randn(vocabulary, hidden, generator=generator) / 4).bfloat16()
    labels_R = torch.randint(0, vocabulary, (num_tokens,), generator=generator)
    exact_RV = hidden_RH.double() @ weight_VH.double().t()

    def of_labels(logits_RV: Tensor) -> Tensor:
        return F.log_softmax(logits_RV, dim=-1).gather(1, labels_R[:, None])[:, 0]

    def error(logprobs_R: Tensor) -> float:
        return (logprobs_R - of_labels(exact_RV)).abs().max().item()

    head = VocabHead(weight_VH=weight_VH, chunk_tokens=24, with_entropy=True)
    logprobs_R, entropy_R = vocab_parallel_logprobs(hidden_RH, labels_R, head)
    assert entropy_R is not None
    assert logprobs_R.dtype == entropy_R.dtype == torch.float32
    assert error(logprobs_R) < 1e-5
    # Logits that are rounded to bf16 lose four digits.
    assert error(of_labels(exact_RV.bfloat16().float())) > 0.02


def test_bf16_weights_have_bf16_gradients() -> None:
    hidden_RH, weight_VH, labels_R = problem(dtype=torch.bfloat16)
    head = VocabHead(weight_VH=weight_VH, chunk_tokens=3)
    logprobs_R, _ = vocab_parallel_logprobs(hidden_RH, labels_R, head)
    grads = gradients(logprobs_R.sum(), hidden_RH, weight_VH)
    assert [g.dtype for g in grads] == [torch.bfloat16, torch.bfloat16]
    exact = gradients(
        whole(*[x.float() for x in (hidden_RH, weight_VH)], labels_R)[0].sum(), hidden_RH, weight_VH
    )
    torch.testing.assert_close(grads, exact, atol=0.1, rtol=0.05)


@pytest.mark.parametrize("tied", [True, False])
def test_weight_gradients_are_added_to_the_main_gradient(tied: bool) -> None:
    hidden_RH, weight_VH, labels_R = problem(dtype=torch.bfloat16)
    before_VH = torch.randn(V, H, generator=torch.Generator().manual_seed(8))
    weight: Any = weight_VH
    weight.main_grad = before_VH.clone()
    weight.grad_added_to_main_grad = False
    head = VocabHead(weight_VH=weight_VH, chunk_tokens=3, tied=tied)
    logprobs_R, _ = vocab_parallel_logprobs(hidden_RH, labels_R, head)
    (for_hook_VH,) = gradients(logprobs_R.sum(), weight_VH)

    wide = [x.detach().float().requires_grad_() for x in (hidden_RH, weight_VH)]
    (exact_VH,) = gradients(whole(wide[0], wide[1], labels_R)[0].sum(), wide[1])
    # Only the gradient of the logits is bf16: the sum over positions is not.
    torch.testing.assert_close(weight.main_grad - before_VH, exact_VH, atol=0.02, rtol=0.01)
    # DDP's hook ignores autograd's gradient of an untied weight, and adds that of a tied one, which
    # autograd has added to the embedding's.
    assert weight.grad_added_to_main_grad is not tied
    assert for_hook_VH.shape == weight_VH.shape
    if tied:
        assert not for_hook_VH.any()


def test_a_16_bit_main_gradient_gets_the_rounded_sum_from_autograd() -> None:
    hidden_RH, weight_VH, labels_R = problem(dtype=torch.bfloat16)
    weight: Any = weight_VH
    weight.main_grad = torch.zeros(V, H, dtype=torch.bfloat16)
    weight.grad_added_to_main_grad = False
    head = VocabHead(weight_VH=weight_VH, tied=False)
    logprobs_R, _ = vocab_parallel_logprobs(hidden_RH, labels_R, head)
    (grad_VH,) = gradients(logprobs_R.sum(), weight_VH)
    assert not weight.main_grad.any()
    assert grad_VH.any()
    assert not weight.grad_added_to_main_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_do_not_depend_on_the_chunk(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(9)
    hidden_RH = torch.randn(48, 64, generator=generator).to(dtype)
    weight_VH = torch.randn(1000, 64, generator=generator).to(dtype)
    labels_R = torch.randint(0, 1000, (48,), generator=generator)

    def of_chunks(chunk_tokens: int | None) -> Tensor:
        head = VocabHead(weight_VH=weight_VH, chunk_tokens=chunk_tokens, with_entropy=True)
        logprobs_R, entropy_R = vocab_parallel_logprobs(hidden_RH, labels_R, head)
        assert entropy_R is not None
        return torch.stack([logprobs_R, entropy_R])

    for chunk_tokens in (16, 32):
        assert torch.equal(of_chunks(chunk_tokens), of_chunks(None))


def test_the_default_chunk_follows_the_vocabulary() -> None:
    weight_VH = torch.zeros(151_936 // 2, 1)
    head = VocabHead(weight_VH=weight_VH, tp_group=RankOf(0, 2))
    assert next(head.chunks(100_000)) == slice(0, default_chunk_tokens(151_936, 2))
    assert next(head.chunks(10)) == slice(0, 10)


def test_logits_of_a_thousand_do_not_overflow() -> None:
    hidden_RH = torch.full((2, 1), 1000.0)
    weight_VH = torch.tensor([[1.0], [-1.0], [0.999]])
    head = VocabHead(weight_VH=weight_VH, with_entropy=True)
    logprobs_R, entropy_R = vocab_parallel_logprobs(hidden_RH, torch.tensor([0, 1]), head)
    assert entropy_R is not None
    assert torch.isfinite(logprobs_R).all()
    assert torch.isfinite(entropy_R).all()
    assert logprobs_R[1].item() == pytest.approx(-2000.3133, rel=1e-6)


def test_the_largest_tensor_is_one_chunk_of_logits() -> None:
    num_tokens, vocabulary, hidden, chunk = 64, 512, 4, 8
    hidden_RH = torch.randn(num_tokens, hidden, requires_grad=True)
    weight_VH = torch.randn(vocabulary, hidden, requires_grad=True)
    labels_R = torch.randint(0, vocabulary, (num_tokens,))

    def largest(chunk_tokens: int) -> int:
        head = VocabHead(weight_VH=weight_VH, chunk_tokens=chunk_tokens, with_entropy=True)
        with LargestTensor() as seen:
            logprobs_R, entropy_R = vocab_parallel_logprobs(hidden_RH, labels_R, head)
            assert entropy_R is not None
            (logprobs_R + entropy_R).sum().backward()
        return seen.numel

    assert chunk * vocabulary > vocabulary * hidden, "a chunk is the largest tensor of this case"
    assert largest(chunk) == chunk * vocabulary
    # Proof that the counter includes logits: with a single chunk they are the largest tensor.
    assert largest(num_tokens) == num_tokens * vocabulary


def test_two_numbers_per_position_are_saved_for_backward() -> None:
    kept: list[int] = []
    hidden_RH, weight_VH, labels_R = problem()
    given = {x.data_ptr() for x in (hidden_RH, weight_VH, labels_R)}

    def note(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in given:
            kept.append(tensor.numel())
        return tensor

    head = VocabHead(weight_VH=weight_VH, chunk_tokens=3, with_entropy=True)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        vocab_parallel_logprobs(hidden_RH, labels_R, head)
    assert kept == [R, R]


def padded(weight_VH: Tensor, rows: int) -> Tensor:
    """The weight with rows of padding, whose logits would be the largest."""
    padding = 10 * torch.ones(rows, H, dtype=weight_VH.dtype)
    return torch.cat([weight_VH.detach(), padding]).requires_grad_()


@pytest.mark.parametrize(("temperature", "cap"), [(1.0, None), (0.7, None), (0.7, 2.5)])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("chunk_tokens", [3, 64])
def test_rows_of_padding_have_neither_probability_nor_gradient(
    chunk_tokens: int, with_entropy: bool, temperature: float, cap: float | None
) -> None:
    """Under a cap too: their logits are -inf, of which a slope of the tanh would be no number."""
    hidden_RH, ids_VH, labels_R = problem()
    weight_VH = padded(ids_VH, 5)
    head = VocabHead(
        weight_VH=weight_VH,
        num_ids=V,
        logit_cap=cap,
        chunk_tokens=chunk_tokens,
        temperature=temperature,
        with_entropy=with_entropy,
    )
    logprobs_R, entropy_R = vocab_parallel_logprobs(hidden_RH, labels_R, head)
    expected_R, expected_entropy_R = whole(hidden_RH, ids_VH, labels_R, temperature, cap)
    torch.testing.assert_close(logprobs_R, expected_R, atol=2e-6, rtol=1e-5)
    counted_R, _ = vocab_parallel_logprobs(hidden_RH, labels_R, VocabHead(weight_VH=weight_VH))
    assert (counted_R - expected_R).abs().max() > 1
    loss = logprobs_R.square().sum()
    expected_loss = expected_R.square().sum()
    if entropy_R is not None:
        torch.testing.assert_close(entropy_R, expected_entropy_R, atol=2e-6, rtol=1e-5)
        loss = loss + entropy_R.square().sum()
        expected_loss = expected_loss + expected_entropy_R.square().sum()
    grad_RH, grad_VH = gradients(loss, hidden_RH, weight_VH)
    assert torch.equal(grad_VH[V:], torch.zeros(5, H))
    want = gradients(expected_loss, hidden_RH, ids_VH)
    torch.testing.assert_close((grad_RH, grad_VH[:V]), want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_adds_nothing_to_the_main_gradient(dtype: torch.dtype) -> None:
    hidden_RH, ids_VH, labels_R = problem(dtype=dtype)
    weight: Any = padded(ids_VH, 5)
    weight.main_grad = torch.ones(V + 5, H)
    weight.grad_added_to_main_grad = False
    head = VocabHead(weight_VH=weight, num_ids=V, chunk_tokens=3, with_entropy=True)
    logprobs_R, entropy_R = vocab_parallel_logprobs(hidden_RH, labels_R, head)
    assert entropy_R is not None
    (logprobs_R + entropy_R).sum().backward()
    assert torch.equal(weight.main_grad[V:], torch.ones(5, H))
    assert (weight.main_grad[:V] - 1).abs().min() > 0


def test_rows_of_each_rank_that_are_ids() -> None:
    weight_VH = torch.zeros(96, H)
    heads = [
        VocabHead(weight_VH=weight_VH, num_ids=200, tp_group=RankOf(rank, 4)) for rank in range(4)
    ]
    assert [head.num_rows for head in heads] == [96, 96, 8, 0]
    assert VocabHead(weight_VH=weight_VH).num_rows == 96


@pytest.mark.parametrize("label", [-1, V, V + 4, V + 1000])
def test_a_label_that_is_no_id_has_no_logprob(label: int) -> None:
    """Ids end before five rows of padding."""
    hidden_RH, ids_VH, labels_R = problem(3)
    labels_R[1] = label
    head = VocabHead(weight_VH=padded(ids_VH, 5), num_ids=V)
    logprobs_R, _ = vocab_parallel_logprobs(hidden_RH, labels_R, head)
    assert torch.isfinite(logprobs_R).tolist() == [True, False, True]


@pytest.mark.parametrize("chunk_tokens", [1, 4, R])
@pytest.mark.parametrize("num_labels", [1, 5, V])
def test_several_labels_of_a_position_equal_log_softmax(num_labels: int, chunk_tokens: int) -> None:
    hidden_RH, weight_VH, _ = problem()
    generator = torch.Generator().manual_seed(num_labels)
    labels_RK = torch.stack([torch.randperm(V, generator=generator)[:num_labels] for _ in range(R)])
    head = VocabHead(weight_VH=weight_VH, chunk_tokens=chunk_tokens, with_entropy=True)
    logprobs_RK, entropy_R = vocab_parallel_logprobs(hidden_RH, labels_RK, head)
    log_p_RV = F.log_softmax(hidden_RH @ weight_VH.t(), dim=-1)
    expected_RK = log_p_RV.gather(1, labels_RK)
    expected_entropy_R = -(log_p_RV.exp() * log_p_RV).sum(-1)
    assert entropy_R is not None
    torch.testing.assert_close(logprobs_RK, expected_RK, atol=2e-6, rtol=1e-5)
    factors_RK = torch.randn(R, num_labels, generator=generator)
    got = (factors_RK * logprobs_RK).sum() + entropy_R.sum()
    want = (factors_RK * expected_RK).sum() + expected_entropy_R.sum()
    pairs = zip(*(gradients(x, hidden_RH, weight_VH) for x in (got, want)), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)
