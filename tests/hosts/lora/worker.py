"""Runs models with Megatron-Bridge's adapters on this rank and compares them with peft's results.

torchrun --nproc-per-node 2 -m tests.hosts.lora.worker FOLDER OUT CASE ...
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megapack import launch
from megapack.dp_schedule import build_dp_schedule
from megapack.job.checkpoint.state import RunState
from megapack.job.config.model import ModelConfig
from megapack.job.config.sections import OptimConfig
from megapack.job.gpt import build_model, initialize_parallel
from megapack.job.gpt.optimizer import build_optimizer
from megapack.job.hf import export_adapters, export_hf, load_adapters, load_hf_weights
from megapack.loss import SFT
from megapack.model.adapters import token_adapters
from megapack.model.parameters import global_parameters
from megapack.model.weight_gradients import WeightGradients
from megapack.prefixes import SharedPrefixes
from megapack.samples import SampleBatch
from megapack.schedule import ScheduleAdapter
from tests.dist.groups import end_model_parallel
from tests.dist.hf.hf_cases import samples
from tests.dist.setup import error_of
from tests.hosts.lora import packages
from tests.hosts.lora.cases import (
    ALPHA,
    CASES,
    NUM_ADAPTERS,
    RANK,
    RESUMED,
    SAVED,
    TARGETS,
    TRAINED,
    LoraCase,
)


def run_case(name: str, folder: Path, device: torch.device) -> dict[str, Any]:
    """Passes and a step of the folder's model with adapters; returns errors and facts.

    Those in `TRAINED` make steps of Adam, and return sums of the adapters' tensors instead.
    """
    case = CASES[name]
    source = folder / case.family
    want = torch.load(folder / ("several.pt" if case.several else f"{case.family}.pt"))
    model = ModelConfig.from_hf(str(source), attention=case.attention, **case.keys)
    assert model.vocab_size is not None
    initialize_parallel(case.layout, seed=1)
    lora = packages.lora(dim=RANK, alpha=ALPHA, target_modules=list(TARGETS))

    def adapt(chunks: list[Any]) -> None:
        load_hf_weights(chunks, source, device=device)
        lora(chunks)
        if case.several:
            add_adapters(chunks, lora)
        with torch.no_grad():
            for key, param in adapters(chunks):
                param.copy_(own_part(key, want["weights"][key]))

    chunks = build_model(
        model,
        case.layout,
        vocab_size=model.vocab_size,
        seed=1,
        distributed_optimizer=case.distributed_optimizer,
        draws_weights=False,
        splits_backward=case.splits_backward,
        before_wrapping=adapt,
    )
    adapter = ScheduleAdapter(chunks, layout=case.layout, logprob_chunk_tokens=16)
    prompts, responses = samples()
    batch = SampleBatch.from_prompt_response(prompts, responses)
    prefixes = None
    if case.shares_prefixes:
        prefixes = SharedPrefixes.from_samples([batch.tokens(i) for i in range(len(prompts))])
    options = {
        "layout": case.layout,
        "max_tokens_per_gpu": case.max_tokens,
        "prefixes": prefixes,
        "adapter_ids": [i % NUM_ADAPTERS for i in range(len(prompts))] if case.several else None,
    }
    plan = build_dp_schedule(batch.lengths, **options, policy=case.policy)
    if case.several:
        adapter.step(plan, batch, objective=SFT())
        rows = [[i % NUM_ADAPTERS for i in row.samples] for row in plan.microbatches]
        return {
            **gradient_errors(chunks, want["gradients"]),
            "num_mixed": sum(len(set(own)) > 1 for own in rows),
            "num_wide": sum(row.width > 1 for row in plan.microbatches),
            "shared_tokens": sum(row.shared_tokens for row in plan.microbatches),
            "num_pieces": sum(len(row.pieces) for row in plan.microbatches),
        }
    if name in TRAINED:
        return train(chunks, lambda: adapter.step(plan, batch, objective=SFT()), case)
    forward = build_dp_schedule(batch.lengths, **options, forward_only=True)
    logprobs = adapter.forward(forward, batch)["logprobs"]
    with lora.disable_adapter(chunks):
        base_logprobs = adapter.forward(forward, batch)["logprobs"]
    with counting_put_off() as put_off:
        step = adapter.step(plan, batch, objective=SFT())
    made = [row for rank in plan.steps[0].ranks for row in rank]
    num_tensors = len(list(adapters(chunks)))
    errors = gradient_errors(chunks, want["gradients"])
    export_adapters(chunks, folder / f"{name}_peft", like=source, device=device)
    is_resumed = name in (SAVED, RESUMED)
    return {
        **errors,
        "export_error": error_of(
            lambda: export_hf(chunks, folder / "x", like=source, device=device)
        ),
        "loads": loads(chunks, folder / f"{name}_peft", source, device),
        "load_error": error_of(
            lambda: load_adapters(chunks, folder / "other_peft", like=source, device=device)
        ),
        "second_norm": is_resumed
        and second_norm(
            name, chunks, lambda: adapter.step(plan, batch, objective=SFT()), folder, device
        ),
        "logprob_error": largest_difference(logprobs, want["logprobs"], batch),
        "base_logprob_error": largest_difference(base_logprobs, want["base_logprobs"], batch),
        "loss": step.loss,
        "expected_loss": want["loss"],
        "num_rows": len(made),
        "shared_tokens": sum(row.shared_tokens for row in made),
        "num_pieces": sum(len(row.pieces) for row in made),
        # Each tensor is the weight of one linear layer.
        "put_off_per_row": sum(put_off) / num_tensors / len(plan.steps[0].ranks[adapter.dp_rank]),
    }


class Adapters(torch.nn.ModuleList):
    """Several adapters of one layer; each token's output is that of its own."""

    def forward(self, x: Tensor) -> Tensor:
        """As one adapter's."""
        outputs = [own(x) for own in self]
        numbers_T = token_adapters(range(NUM_ADAPTERS))
        num_slices = len(numbers_T) // len(outputs[0])
        if num_slices > 1:
            # Sequence parallelism: this rank's part.
            rank = parallel_state.get_tensor_model_parallel_rank()
            numbers_T = numbers_T.chunk(num_slices)[rank]
        masked = (own * (numbers_T == k)[:, None, None] for k, own in enumerate(outputs))
        return torch.stack([*masked]).sum(0)


def add_adapters(chunks: list[Any], lora: Any) -> None:
    """Let each layer with an adapter have several."""
    for chunk in chunks:
        for path, module in list(chunk.named_modules()):
            if type(module).__name__ == "LoRALinear":
                prefix, _, name = path.rpartition(".")
                others = [lora.transform(module.to_wrap, name, prefix) for _ in range(NUM_ADAPTERS)]
                module.adapter = Adapters(other.adapter for other in others)


def loads(chunks: list[Any], folder: Path, like: Path, device: torch.device) -> bool:
    """Whether what was exported gives the adapters their values back."""
    before = {name: param.detach().clone() for name, param in adapters(chunks)}
    with torch.no_grad():
        for _, param in adapters(chunks):
            param.zero_()
    load_adapters(chunks, folder, like=like, device=device)
    return all(bool((param == before[name]).all()) for name, param in adapters(chunks))


def second_norm(
    name: str, chunks: list[Any], step: Callable[[], Any], folder: Path, device: torch.device
) -> float:
    """The gradient norm of a second update: after a save, or after a load on another layout."""
    optimizer = build_optimizer(OptimConfig(lr=1e-2, adam_eps=1e-3), chunks, bf16=False)
    state = RunState(chunks, optimizer)
    place = folder / "state"
    if name == SAVED:
        update(chunks, optimizer, step)
        place.mkdir(exist_ok=True)
        writer = state.writer(place, num_threads=1, device=device)
        writer.plan()
        writer.write()
        writer.finish()
        dist.barrier()
    else:
        for param in (param for chunk in chunks for param in chunk.parameters()):
            param.data.zero_()
        state.load(place, num_updates=1, with_reference=False, device=device)
    norm = update(chunks, optimizer, step)
    export_adapters(
        chunks, folder / f"{name}_second_peft", like=folder / CASES[name].family, device=device
    )
    return norm


def update(chunks: list[Any], optimizer: Any, step: Callable[[], Any]) -> float:
    """One step of Adam; its gradient norm."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    step()
    updated, norm, _ = optimizer.step()
    assert updated
    return float(norm)


def train(chunks: list[Any], step: Callable[[], Any], case: LoraCase) -> dict[str, Any]:
    """Three steps of Adam; sums of the adapters' tensors, and how many tensors have a state."""
    optim = OptimConfig(lr=1e-2, adam_eps=1e-3, distributed_optimizer=case.distributed_optimizer)
    optimizer = build_optimizer(optim, chunks, bf16=False)
    frozen = [param.detach().clone() for c in chunks for param in c.parameters()]
    norms = [update(chunks, optimizer, step) for _ in range(3)]
    params = [param for c in chunks for param in c.parameters()]
    moved = [not bool((p == old).all()) for p, old in zip(params, frozen, strict=True)]
    assert moved == [param.requires_grad for param in params]
    trained = dict(adapters(chunks))
    return {
        "norms": norms,
        "sums": {name: float(param.double().abs().sum()) for name, param in trained.items()},
        "num_trained": sum(param.numel() for param in trained.values()),
        "buffers": sum(b.grad_data.numel() for c in chunks for b in c.buffers),
    }


def adapters(chunks: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """What is trained: the adapters, and nothing else."""
    for chunk in chunks:
        for name, param in global_parameters(chunk):
            assert param.requires_grad == (".adapter." in name)
            assert param.requires_grad == hasattr(param, "main_grad") or not hasattr(
                chunk, "module"
            )
            if param.requires_grad:
                yield name, param


def largest_difference(
    outputs: Sequence[Tensor | None], want: Sequence[Tensor], batch: SampleBatch
) -> float:
    """Of the responses' log-probs, in nats."""
    pairs = zip(outputs, want, strict=True)
    return max(
        float((own[batch.response_mask(i)] - expected).abs().max())
        for i, (own, expected) in enumerate(pairs)
        if own is not None
    )


@contextlib.contextmanager
def counting_put_off() -> Iterator[list[int]]:
    """Within the block, notes how many weight gradients each W operation computes."""
    counts: list[int] = []
    run = WeightGradients.run

    def noted(self: Any, chunk: int, microbatch: int) -> None:
        kept = self._kept[chunk, microbatch]
        counts.append(len(kept.products) + len(kept.delayed))
        run(self, chunk, microbatch)

    WeightGradients.run = noted
    try:
        yield counts
    finally:
        WeightGradients.run = run


def own_part(name: str, whole: Tensor) -> Tensor:
    """This rank's part of an adapter's tensor."""
    tp = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    is_out = ".linear_out." in name
    if is_out and "linear_fc1" in name:
        return torch.cat([half.chunk(tp)[rank] for half in whole.chunk(2)])
    shares_inputs = "linear_proj" in name or "linear_fc2" in name
    return whole.chunk(tp, dim=0 if is_out or not shares_inputs else 1)[rank]


def gradient_errors(chunks: Sequence[Any], want: dict[str, Tensor]) -> dict[str, Any]:
    """Relative differences of the adapters' gradients: of all of them, and of the worst."""
    found: dict[str, tuple[float, float]] = {}
    for name, param in adapters(chunks):
        expected = own_part(name, want[name]).double()
        difference = float((param.main_grad.double() - expected).norm())
        found[name] = difference, float(expected.norm())
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, found)
    pairs = [pair for own in every for pair in own.values()]
    assert {name for own in every for name in own} == set(want)
    worst = {name: d / (norm or 1.0) for own in every for name, (d, norm) in own.items()}
    return {
        "gradient_error": sum(d**2 for d, _ in pairs) ** 0.5 / sum(n**2 for _, n in pairs) ** 0.5,
        "worst_tensor_error": max(worst.values()),
        "worst_tensor": max(worst, key=lambda name: worst[name]),
        "num_tensors": len(worst),
    }


def main(folder: str, out: str, *names: str) -> None:
    """Run the cases; all have the same number of processes."""
    device = launch.start("cpu")
    packages.add_bridge()
    results = {}
    for name in names:
        results[name] = run_case(name, Path(folder), device)
        end_model_parallel()
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(results), encoding="utf-8")
    launch.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
