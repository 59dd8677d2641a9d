"""Features beside plain rows, in one process: each part by the attentions that have it.

python -m tests.gpu.features DEVICE ATTENTIONS OUT

ATTENTIONS is such as "te,varlen,sdpa". The reference's samples are run where a part needs them.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any, Literal, cast
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from megapack import Layout, Plan, launch
from megapack.job.config.sections import ModelConfig, OptimConfig
from megapack.job.gpt import build, initialize_parallel
from megapack.job.gpt.optimizer import build_optimizer
from megapack.model.attention.choice import choose_attention
from megapack.model.attention.varlen import PackedVarlen
from megapack.model.recurrent.choice import recurrent_kernels
from megapack.samples import SampleBatch
from megapack.schedule import ScheduleAdapter
from tests.dist.problem import OBJECTIVE, SEED
from tests.gpu import problem
from tests.gpu.compare import Samples, build_adapter, exactness, main_gradients
from tests.gpu.reference import run_samples
from tests.gpu.worker import Found, recurrent, run_parts
from tests.megatron import HAS_HYBRID


@functools.cache
def samples(name: str) -> Samples:
    """The reference's samples on the CPU, of a model and its precision, such as "plain_bf16"."""
    batch, families = problem.make_batch(), problem.make_family_batch()
    dtype: Literal["fp32", "bf16"] = "bf16" if name.endswith("bf16") else "fp32"
    models: dict[str, tuple[ModelConfig, SampleBatch, list[Tensor] | None]] = {
        "plain": (problem.model("sdpa", dtype), batch, None),
        "moe": (problem.moe_model("sdpa"), batch, None),
        "moe_given": (problem.moe_model("sdpa"), batch, problem.choices()),
        "windows_and_sinks": (problem.window_model("sdpa", dtype), families, None),
        "windows": (problem.window_model("sdpa", dtype, sinks=False), families, None),
        "mamba": (problem.mamba_model("sdpa", dtype), families, None),
    }
    found = run_samples(*models[name.removesuffix(f"_{dtype}")])
    return [tree_map_only(Tensor, Tensor.cpu, sample) for sample in found]


def replay(attention: str) -> Found:
    """Errors in fp32 of a forward and a step with experts recorded in rows of another plan: the
    routers' own, and others that no router would choose."""
    adapter = build_adapter(problem.moe_model(attention), Layout())
    batch = problem.make_batch()
    recorded_in, plan = (
        problem.make_plan(Layout(), budget) for budget in (problem.BUDGET, problem.OTHER_BUDGET)
    )
    assert recorded_in.digest() != plan.digest()

    def replayed(exact: Samples, choices: list[Tensor] | None) -> tuple[Found, list[Any]]:
        outputs = adapter.forward(recorded_in, batch, routing=choices, record_routing=True)
        for chunk in adapter.chunks:
            chunk.zero_grad_buffer()
        return exactness(adapter, exact, plan=plan, routing=outputs["routing"]), outputs["routing"]

    own, _ = replayed(samples("moe_fp32"), None)
    choices = problem.choices()
    given, recorded = replayed(samples("moe_given_fp32"), choices)
    pairs = zip(choices, recorded, strict=True)
    wrong = sum(int((one.sort(-1)[0] != two.long().sort(-1)[0]).sum()) for one, two in pairs)
    return {
        **own,
        "given": given,
        "wrong_choices": wrong,
        "grouped": bool(adapter.config.moe_grouped_gemm),
    }


def windows(attention: str) -> Found:
    """Errors with windows and sinks in plain rows."""
    return _windows(attention, problem.family_plan(Layout()))


def windows_shared(attention: str) -> Found:
    """The same in rows that hold the beginnings of samples once."""
    return _windows(attention, problem.shared_plan(Layout()))


def windows_split(attention: str) -> Found:
    """The same of samples in several rows."""
    return _windows(attention, problem.split_plan(Layout()))


def windows_alone(attention: str) -> Found:
    """The same in plain rows of a model without sinks, whose windows are Transformer Engine's."""
    return _windows(attention, problem.family_plan(Layout()), sinks=False)


def _windows(attention: str, plan: Plan, *, sinks: bool = True) -> Found:
    """In bf16 by the kernels, in fp32 by SDPA; also how often varlen attention ran."""
    dtype: Literal["fp32", "bf16"] = "fp32" if attention == "sdpa" else "bf16"
    adapter = build_adapter(problem.window_model(attention, dtype, sinks=sinks), Layout())
    name = "windows_and_sinks" if sinks else "windows"
    own = None if dtype == "fp32" else samples(f"{name}_bf16")
    batch = problem.make_family_batch()
    with mock.patch.object(
        PackedVarlen, "forward", autospec=True, side_effect=PackedVarlen.forward
    ) as varlen:
        found: Found = exactness(adapter, samples(f"{name}_fp32"), own, plan=plan, batch=batch)
    rows = plan.steps[0].ranks[0]
    return {
        **found,
        "shared_tokens": sum(row.shared_tokens for row in rows),
        "rows_with_pieces": sum(bool(row.pieces) for row in rows),
        "varlen_calls": varlen.call_count,
    }


def mamba(attention: str) -> Found:
    """Errors of a model with Mamba-2 layers, in rows that share prefixes and with pieces."""
    if not HAS_HYBRID:
        return {"skipped": "Megatron-Core has hybrid models since 0.18"}
    found = recurrent(problem.mamba_model(attention, "bf16"), samples("mamba_fp32"))
    return {**found, "kernels": recurrent_kernels("M")}


def _step(
    adapter: ScheduleAdapter, plan: Plan, batch: SampleBatch
) -> tuple[float, dict[str, Tensor]]:
    """The loss of a step, and its gradients alone."""
    for chunk in adapter.chunks:
        chunk.zero_grad_buffer()
    loss = adapter.step(plan, batch, objective=OBJECTIVE).loss
    return loss, dict(main_gradients(adapter.chunks))


def deterministic(attention: str) -> Found:
    """Whether two runs of two steps with updates have equal bits, as docs/reliability.md sets the
    process up, and which attention is then chosen.

    The job's environment has what CUDA reads at its start.
    """
    settings = problem.model(attention, "bf16")
    torch.use_deterministic_algorithms(True)
    try:
        with mock.patch.dict(os.environ, {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}):
            sizes = build.attention_sizes(settings, Layout())
            chosen = choose_attention("auto", "bf16", sizes)
            one, other = (_two_updates(settings) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    unequal = [name for name in one if not torch.equal(one[name], other[name])]
    return {
        "chosen": chosen,
        "tensors": len(one),
        "unequal": unequal,
        "losses": [float(one[name]) for name in ("loss 1", "loss 2")],
    }


def _two_updates(settings: ModelConfig) -> dict[str, Tensor]:
    """Losses, log-probs, gradients and weights of two steps."""
    adapter = build_adapter(settings, Layout())
    optimizer = build_optimizer(OptimConfig(lr=1e-3), adapter.chunks, bf16=True)
    plan, batch = problem.make_plan(Layout()), problem.make_batch()
    found = {}
    for number in (1, 2):
        loss, gradients = _step(adapter, plan, batch)
        found[f"loss {number}"] = torch.tensor(loss, dtype=torch.float64)
        found |= {f"{name} gradient {number}": grad for name, grad in gradients.items()}
        updated, _, _ = optimizer.step()
        assert updated
    found["logprobs"] = torch.cat(adapter.forward(plan, batch)["logprobs"])
    for chunk in adapter.chunks:
        found |= {name: param.detach().cpu() for name, param in chunk.named_parameters()}
    return found


def parts(attentions: list[str]) -> dict[str, Callable[[], Found]]:
    """What these attentions have; what the most runs use comes first."""
    ways: list[tuple[Callable[[str], Found], tuple[str, ...]]] = [
        (replay, ("te", "sdpa")),
        (windows, ("te", "varlen", "sdpa")),
        (windows_shared, ("te", "varlen", "sdpa")),
        (windows_split, ("te", "varlen", "sdpa")),
        (windows_alone, ("te",)),
        (mamba, ("te", "varlen")),
        (deterministic, ("varlen",)),
    ]
    return {
        f"{part.__name__}_{name}": functools.partial(part, name)
        for part, names in ways
        for name in names
        if name in attentions
    }


def main(device: Literal["cuda", "cpu"], attentions: str, out: str) -> None:
    """Run the parts that these attentions have."""
    launch.quiet_known_warnings()
    launch.start(device)
    initialize_parallel(Layout(), SEED)
    run_parts(parts(attentions.split(",")), out)
    launch.stop()


if __name__ == "__main__":
    main(cast(Literal["cuda", "cpu"], sys.argv[1]), *sys.argv[2:])
