"""xtuner's own RL step: `TrainingController.fit` and its Ray workers, with FSDP2 over gloo.

    python -m tests.hosts.steps.xtuner OUT --layout dp=2 --steps 1 \
        --case "patched=0,optimizer_steps=3;patched=1,optimizer_steps=3"

One process, the driver, starts Ray and the workers, runs the cases one after another on them, and
writes the reports of all cases to OUT/cases.json. `--steps` counts calls of `fit` in each case.
`cp` of the layout is xtuner's `sp_size`. xtuner's are the controller, the workers and their
configuration, engine, model (a tiny Qwen3 from a checkpoint), losses and optimizer.

Changed for a CPU: the process group is gloo's, Ray is told of GPUs that are not there, and nothing
measures device memory or waits for a device. Of absent packages those in `ABSENT`, which the step
does not need, are stand-ins.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.hosts.steps import job
from tests.hosts.steps.qwen3 import qwen3_config
from tools.hosting import import_stubs

if TYPE_CHECKING:
    import torch

ABSENT = ("imageio", "mmengine", "more_itertools", "tensorboard", "torchvision")
VOCABULARY = 128
"""Sample i begins with token i, so that its log-probs can be told from the others'."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """What a run trains on, from `--case name=number,...`."""

    samples: int = 24
    longest: int = 200
    optimizer_steps: int = 1
    pack_max_length: int = 256
    hidden: int = 32
    multiple: int = 0
    """`pack_multiple` of the patch; 0: None."""
    native: int = 0
    """1: `pack_strategy="native"`."""
    first: int = 0
    """1: train on the samples of the first of `planned_steps` only, each in a pack of its own."""
    planned_steps: int = 1
    patched: int = -1
    """0 or 1: without the patch or with it, whatever `--patches` says."""

    @classmethod
    def read(cls, text: str) -> Case:
        parts = [part.partition("=") for part in filter(None, text.split(","))]
        return cls(**{name: int(value) for name, _, value in parts})


def prepare() -> None:
    """Make xtuner importable; in the driver, and in each worker before it is made."""
    import_stubs.install(*ABSENT)
    job.import_host("xtuner")


def main() -> None:
    arguments = job.parse_arguments()
    # Of the driver; further ranks of a job have nothing to do.
    reports = [job.Report(more={"cpu_seconds": [0.0] * arguments.steps})]
    if int(os.environ.get("RANK", "0")) == 0:
        prepare()
        reports = run(arguments, [Case.read(text) for text in arguments.case.split(";")])
        cases = json.dumps([dataclasses.asdict(report) for report in reports])
        (arguments.folder / "cases.json").write_text(cases, encoding="utf-8")
    text = json.dumps(dataclasses.asdict(reports[-1]))
    name = f"rank{os.environ.get('RANK', '0')}.json"
    (arguments.folder / name).write_text(text, encoding="utf-8")


def run(arguments: job.Arguments, cases: Sequence[Case]) -> list[job.Report]:
    """One report per case; all have the same workers, which begin anew in each."""
    import ray
    from ray.util.placement_group import placement_group

    world = arguments.layout.dp * arguments.layout.cp
    start_ray(world)
    try:
        group = placement_group([{"CPU": 1, "GPU": 1}] * world)
        ray.get(group.ready())
        controller = make_controller(cases[0], arguments, group)
        return [run_case(arguments, case, controller) for case in cases]
    finally:
        ray.shutdown()


def start_ray(world: int) -> None:
    """A Ray of its own that counts `world` GPUs."""
    import ray

    # Workers start when they are needed: each imports torch and xtuner.
    os.environ["RAY_prestart_worker_first_driver"] = "0"  # noqa: SIM112
    # The driver's job may have several ranks, whose store its launcher serves. That of the workers
    # is served by their first rank.
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    for attempt in range(4):
        try:
            ray.init(
                address="local",
                num_cpus=world,
                num_gpus=world,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=128 * 2**20,
                runtime_env={"worker_process_setup_hook": "tests.hosts.steps.xtuner.prepare"},
            )
            return
        except Exception as error:
            # Ray gives its own processes 30 seconds, which a busy machine may not.
            if attempt == 3 or "timed out during startup" not in str(error):
                raise
            ray.shutdown()


def run_case(arguments: job.Arguments, case: Case, controller: Any) -> job.Report:
    """Some iterations of training on the same samples, from the checkpoint's weights."""
    import ray

    from megapack.hosts import patching, xtuner

    def reset(worker: Any) -> None:
        worker.begin(case.optimizer_steps)

    report = job.Report(more={"cpu_seconds": []})
    xtuner.configure(
        pack_multiple=case.multiple or None, pack_strategy="native" if case.native else "balance"
    )
    patched = arguments.patches if case.patched < 0 else ["xtuner"] * case.patched
    patching.apply(*patched)
    report.patched = [status.target for status in patching.status() if status.state == "applied"]
    ray.get([worker.__ray_call__.remote(reset) for worker in controller.workers])
    lines: list[str] = []
    sink = controller.logger.add(lines.append, filter=lambda line: "megapack" in line["message"])
    samples = make_samples(case, arguments.layout.dp)
    length = case.longest if case.first else case.pack_max_length
    for rollout in range(arguments.steps):
        job.wait_for_turn()
        start_cpu = cpu_seconds(controller)
        start = time.perf_counter()
        logs = controller.fit(copy.deepcopy(samples), length, rollout)
        report.step_seconds.append(time.perf_counter() - start)
        report.more["cpu_seconds"].append(cpu_seconds(controller) - start_cpu)
        report.grad_norms += [step["grad_norm"] for step in logs[0]["train_metrics"]]
    note_workers(controller, report, arguments.layout.cp)
    report.more["reference_grad_norm"] = reference_grad_norm(arguments.folder / "model", samples)
    controller.logger.remove(sink)
    report.more["lines"] = [str(line) for line in lines]
    patching.revert(*patched)
    return report


def cpu_seconds(controller: Any) -> float:
    """CPU seconds of the driver and the workers so far."""
    import ray

    def read(worker: Any) -> float:
        return job.cpu_seconds()

    workers = ray.get([worker.__ray_call__.remote(read) for worker in controller.workers])
    return job.cpu_seconds() + sum(workers)


def make_controller(case: Case, arguments: job.Arguments, group: Any) -> Any:
    """xtuner's controller with its workers, from xtuner's configuration."""
    import ray
    import torch
    from xtuner.v1.config import AdamWConfig, FSDPConfig, LRConfig
    from xtuner.v1.model.dense.qwen3 import Qwen3DenseConfig
    from xtuner.v1.rl.loss import GRPOLossConfig
    from xtuner.v1.rl.trainer import TrainingController, WorkerConfig
    from xtuner.v1.rl.utils import AutoAcceleratorWorkers

    checkpoint = arguments.folder / "model"
    save_model(checkpoint, case.hidden)
    model = Qwen3DenseConfig.from_hf(checkpoint)
    model.attention.attn_impl = "eager_attention"
    config = WorkerConfig(
        model_cfg=model,
        optim_cfg=AdamWConfig(lr=1e-2, weight_decay=0.0, max_grad_norm=1e9),
        loss_cfg=GRPOLossConfig(
            policy_loss_cfg={
                "cliprange_high": 0.2,
                "cliprange_low": 0.2,
                "loss_type": "vanilla",
            }
        ),
        lr_cfg=LRConfig(),
        fsdp_cfg=FSDPConfig(
            param_dtype=torch.float32,
            reduce_dtype=torch.float32,
            torch_compile=False,
            recompute_ratio=0.0,
        ),
        load_from=checkpoint,
        optimizer_steps=case.optimizer_steps,
        sp_size=arguments.layout.cp,
        pack_max_length=case.pack_max_length,
        seed=0,
    )
    # As `WorkerConfig.build` does.
    worker = ray.remote(cpu_worker())
    workers, _ = AutoAcceleratorWorkers.from_placement_group(worker, config, group)
    ray.get([worker.ready.remote() for worker in workers])
    return TrainingController(workers=workers)


def cpu_worker() -> Any:
    """xtuner's worker on a CPU, which notes what its engine is given and makes of it."""
    import torch
    import torch.distributed as dist
    from xtuner.v1.rl.trainer import worker

    class Worker(worker.TrainingWorker):  # type: ignore[misc]
        def setup_distributed(self, *args: Any) -> None:
            join = dist.init_process_group
            dist.init_process_group = lambda backend, **kwargs: join("gloo", **kwargs)
            torch.accelerator.set_device_index = lambda index: None
            torch.accelerator.synchronize = lambda: None
            torch.cpu.reset_peak_memory_stats = lambda: None
            torch.cpu.max_memory_allocated = torch.cpu.max_memory_reserved = lambda: 0
            torch.set_num_threads(1)
            super().setup_distributed(*args)

        def begin(self, optimizer_steps: int) -> None:
            names = ("rows", "gradients", "seconds", "losses", "logprobs")
            self.notes: dict[str, list[Any]] = {name: [] for name in names}
            self._optimizer_steps = optimizer_steps
            self._engine.from_hf(self.config.load_from)
            self._engine.optimizer = self._engine.build_optimizer(self.config.optim_cfg)

        def _build_engine(self, config: Any) -> Any:
            engine = super()._build_engine(config)
            train_step, clip = engine.train_step, engine.clip_grad_norm

            def noted_step(data_batches: Any) -> Any:
                rows = [item["seq_ctx"].input_ids.numel() for item in data_batches]
                self.notes["rows"].append(rows)
                start = time.perf_counter()
                info = train_step(data_batches=data_batches)
                self.notes["seconds"].append(time.perf_counter() - start)
                self.notes["losses"].append(info["total_loss"])
                return info

            def noted_clip(*args: Any, **kwargs: Any) -> Any:
                grads = [p.grad.full_tensor().flatten() for p in engine.model.parameters()]
                self.notes["gradients"].append(torch.cat(grads))
                return clip(*args, **kwargs)

            engine.train_step, engine.clip_grad_norm = noted_step, noted_clip
            return engine

        def compute_actor_logprobs(self, seq_ctx_list: Any, shifted_labels_list: Any) -> Any:
            found = super().compute_actor_logprobs(seq_ctx_list, shifted_labels_list)
            for context, labels, logprobs in zip(
                seq_ctx_list, shifted_labels_list, found, strict=True
            ):
                ends = context.cu_seq_lens_q.tolist()
                for begin, end in itertools.pairwise(ends):
                    if self.sp_mesh.size() == 1 and (labels[0, begin:end] != -100).any():
                        first = int(context.input_ids[0, begin])
                        self.notes["logprobs"].append((first, logprobs[0, begin:end].tolist()))
            return found

    return Worker


def note_workers(controller: Any, report: job.Report, sp: int) -> None:
    import ray

    def read(worker: Any) -> Any:
        params = [p.full_tensor().double().abs().sum() for p in worker._engine.model.parameters()]
        return {**worker.notes, "params": float(sum(params))}

    notes = ray.get([worker.__ray_call__.remote(read) for worker in controller.workers])
    report.params_sum = notes[0]["params"]
    report.losses = notes[0]["losses"]
    report.num_microbatches = [len(rows) for rows in notes[0]["rows"]]
    report.row_tokens = [rows for worker in notes[::sp] for rows in worker["rows"]]
    report.more["gradients"] = [gradient.tolist() for gradient in notes[0]["gradients"]]
    # Workers run at once: a step lasts as long as its slowest.
    report.more["engine_seconds"] = [
        max(seconds) for seconds in zip(*(worker["seconds"] for worker in notes), strict=True)
    ]
    logprobs = {first: values for worker in notes for first, values in worker["logprobs"]}
    report.logprobs = [logprobs[first] for first in sorted(logprobs)]


def save_model(folder: Path, hidden: int) -> None:
    """A tiny Qwen3 as a Hugging Face checkpoint."""
    import torch
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(0)
    config = qwen3_config(VOCABULARY, hidden, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model = Qwen3ForCausalLM(config)
    for param in model.parameters():
        if param.dim() > 1:
            torch.nn.init.normal_(param, std=0.1)
    model.save_pretrained(folder)


def reference_grad_norm(folder: Path, samples: Sequence[dict[str, Any]]) -> float:
    """Of the first step if all samples are in it: one sample at a time, in Transformers' model.

    There the ratio of new to old probabilities is 1, and nothing is clipped.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    num_tokens = sum(int((sample["shifted_labels"] != -100).sum()) for sample in samples)
    for sample in samples:
        labels = sample["shifted_labels"][0]
        scores = model(input_ids=sample["seq_ctx"].input_ids).logits[0]
        losses = torch.nn.functional.cross_entropy(scores, labels, reduction="sum")
        (sample["advantage"][0] * losses / num_tokens).backward()
    norms = [param.grad.norm() for param in model.parameters() if param.grad is not None]
    return float(torch.stack(norms).norm())


def sample_lengths(case: Case) -> list[int]:
    import torch

    generator = torch.Generator().manual_seed(5)
    draws = torch.rand(case.samples, generator=generator)
    # Many short samples and a few long ones, as rollouts have them.
    return [8 + int((case.longest - 8) * float(draw) ** 2) for draw in draws]


def make_samples(case: Case, dp: int) -> list[dict[str, Any]]:
    """The samples of one iteration, as xtuner's trainer gives them to the controller."""
    import torch

    lengths = sample_lengths(case)
    generator = torch.Generator().manual_seed(6)
    samples = [make_sample(number, length, generator) for number, length in enumerate(lengths)]
    if not case.first:
        return samples
    return [samples[i] for i in first_step(lengths, case, dp)]


def first_step(lengths: Sequence[int], case: Case, dp: int) -> list[int]:
    """The samples that the patch plans into the first step."""
    from megapack.hosts.xtuner import plan_packs

    packs = plan_packs(lengths, case.pack_max_length, dp, case.planned_steps, "balance")
    return sorted(i for rank in packs for pack in rank[0] for i in pack)


def make_sample(number: int, length: int, generator: torch.Generator) -> dict[str, Any]:
    import torch
    from xtuner.v1.data_proto.sequence_context import SequenceContext

    ids = torch.randint(3, VOCABULARY, (1, length), generator=generator)
    ids[0, 0] = number
    labels = torch.cat([ids[:, 1:], torch.full((1, 1), -100)], dim=1)
    labels[:, : length // 3] = -100
    advantage = float(torch.randn((), generator=generator))
    return {
        "seq_ctx": SequenceContext.from_input_ids((ids,), device="cpu"),
        "shifted_labels": labels,
        "advantage": [advantage] * length,
        "rollout_logprobs": torch.full((1, length), -4.0),
    }


if __name__ == "__main__":
    main()
