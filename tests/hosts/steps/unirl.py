"""UniRL's `TrainStack`, on its FSDP backend, its losses and its AR stage.

    torchrun --nproc-per-node 2 -m tests.hosts.steps.unirl OUT --patches unirl --case count,dense

A case is words with `+`:

    count, dense        micro-batches by count, or under a budget where the patch is on
    one, whole          1 sample or all in a micro-batch by count, in place of 2
    tokens              a mean over tokens
    drpo, anchor        DRPO, or GRPO, on anchors that are replayed
    two                 two updates
    defer               one reduction of gradients per update
    all                 the samples of two ranks on this one
    empty               half of rank 0's samples have no response
    wide                the first sample of each rank has a prompt far longer than the others'
    large               hidden size 256, and samples 8 times as long

Cases with commas run one after the other, each from the same weights; the report has each case's by
name in `more`, and the last case's as its own.

UniRL's are the stack, the backend with FSDP2, the algorithms, batches and segments, and the stage's
replay. The model is a tiny Qwen3 of transformers; no rollout engine and no Ray actor runs.
Stand-ins take the place of Ray, omegaconf and wandb, which are imported on the way.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.hosts.steps import job
from tests.hosts.steps.qwen3 import qwen3_config
from tools.hosting import import_stubs

ABSENT = ("ray", "omegaconf", "wandb", "hydra", "peft", "diffusers", "tensordict")
NUM_SAMPLES = 8
VOCAB_SIZE = 96
BUDGET = 64
SEED = 5


def prepare() -> None:
    """Make UniRL importable here."""
    import_stubs.install(*ABSENT)
    job.import_host("unirl")


def main() -> None:
    arguments = job.start(prepare)
    from megapack import launch

    report = job.Report()
    for case in (arguments.case or "count").split(","):
        report.more[case] = run(arguments, case)
        last = report.more[case]
        report.losses, report.grad_norms = last["losses"], last["grad_norms"]
        report.num_microbatches, report.row_tokens = last["counts"], last["tokens"]
        report.step_seconds, report.logprobs = last["seconds"], last["logprobs"]
        report.more["cpu_seconds"] = last["cpu_seconds"]
    job.write(report, arguments.folder)
    launch.stop()


def run(arguments: job.Arguments, case: str) -> dict[str, Any]:
    """Train some steps on one track per rank; what was seen, as `Report` has it."""
    import torch
    import torch.distributed as dist

    words = case.split("+")
    stack = make_stack(words, patched="unirl" in arguments.patches)
    found: dict[str, Any] = {name: [] for name in ("losses", "metrics", "counts")}
    found |= {"tokens": [], "replayed": []}
    gradients: list[torch.Tensor] = []
    record(stack, found, gradients)
    timing = job.Report()
    track = make_track(words)
    for _ in range(arguments.steps):
        found["tokens"].append([])
        found["replayed"].append([])
        result = job.timed(timing, lambda: stack.train_track(track, training_progress=0.0))
        found["losses"].append(result.loss)
        found["metrics"].append(dict(result.metrics))
        found["counts"].append(len(result.micros))
    found["grad_norms"] = [gradient.double().norm().item() for gradient in gradients]
    found["seconds"] = timing.step_seconds
    found["cpu_seconds"] = timing.more["cpu_seconds"]
    found["anchors"] = track.segment.log_probs.tolist()
    found["real"] = int(track.conditions["prompt"].attention_mask.sum()) + len(track.segment.tokens)
    found["replayed"].append([])
    found["logprobs"] = logprobs(stack, make_track(words))
    if dist.get_rank() == 0:
        torch.save(gradients, arguments.folder / f"{case}.pt")
    return found


def make_stack(words: list[str], *, patched: bool) -> Any:
    """UniRL's stack and the backend and algorithm that it is given; by count if it is unpatched."""
    import torch
    from transformers import Qwen3ForCausalLM
    from unirl.models.qwen3.ar import Qwen3ARStage
    from unirl.models.qwen3.bundle import Qwen3Bundle
    from unirl.train.backend.base import LrSchedulerConfig, OptimizerConfig
    from unirl.train.backend.fsdp import FSDPBackend
    from unirl.train.configs import FSDPConfig
    from unirl.train.stack import TrainStack

    torch.manual_seed(SEED)
    size = 256 if "large" in words else 32
    config = qwen3_config(VOCAB_SIZE, size, initializer_range=0.1, attn_implementation="sdpa")
    cpu = torch.device("cpu")
    bundle = Qwen3Bundle(
        transformer=Qwen3ForCausalLM(config),
        tokenizer=SimpleNamespace(pad_token_id=0, eos_token_id=1),
        dtype=torch.float32,
        device=cpu,
        pretrained_path="",
    )
    stage = Qwen3ARStage(model=bundle)
    backend = FSDPBackend(
        bundle=bundle,
        block_class_names=("Qwen3DecoderLayer",),
        fsdp_cfg=FSDPConfig(
            param_dtype="fp32",
            mixed_precision=False,
            # As UniRL's recipes: layers run again in the backward.
            activation_checkpointing=True,
            reshard_after_forward="defer" not in words,
            defer_grad_sync="defer" in words,
        ),
        # An eps far above the gradients, which are 0.01 and less, makes Adam a linear step of the
        # usual size. With eps=1e-6 it divides rounding by rounding: an element whose gradient is
        # 1e-7 moves by lr in either direction, and log-probs after four steps were 1e-5 apart.
        optimizer_cfg=OptimizerConfig(0.1, 0.9, 0.99, 1.0, 0.0),
        scheduler_cfg=LrSchedulerConfig("constant", 0, 100),
        device=cpu,
    )
    settings: dict[str, Any] = {}
    if patched and "dense" in words:
        settings["micro_token_budget"] = BUDGET * (8 if "large" in words else 1)
    micro_batch_size = 1 if "one" in words else 2
    return TrainStack(
        fsdp_backend=backend,
        algorithm=make_algorithm(words, stage),
        micro_batch_size=2 * NUM_SAMPLES if "whole" in words else micro_batch_size,
        # Never clips, so that gradients can be compared.
        max_grad_norm=1e9,
        num_updates_per_batch=2 if "two" in words else 1,
        **settings,
    )


def make_algorithm(words: list[str], stage: Any) -> Any:
    import torch
    from unirl.algorithms import DRPO, GRPO
    from unirl.models.qwen3.conditions import Qwen3ARConditions

    class ReplayedGRPO(GRPO):
        """As FlowGRPO does for images."""

        anchor_fields = ("log_probs",)

        def recomputes_anchor(self) -> bool:
            return True

        def prepare_segment(self, *, conditions: Any, segment: Any) -> None:
            typed = self.conditions_cls.from_dict(conditions)
            with torch.no_grad():
                segment.log_probs = self.stage.replay(typed, segment=segment)

    mode = "token-mean" if "tokens" in words else "seq-mean-token-sum-norm"
    options: dict[str, Any] = {
        "loss_agg_mode": mode,
        "horizon": 16,
        "sampling_temperature": 1.0,
        "conditions_cls": Qwen3ARConditions,
    }
    if "drpo" in words:
        return DRPO(pipeline=SimpleNamespace(ar=stage), old_logp_source="replay", **options)
    kind = ReplayedGRPO if "anchor" in words else GRPO
    return kind(stage=stage, clip_range=0.2, **options)


def make_track(words: list[str]) -> Any:
    """This rank's samples; rank 1 has longer ones."""
    import torch.distributed as dist

    ranks = range(2) if "all" in words else [dist.get_rank()]
    of_ranks = [rank_samples(words, rank) for rank in ranks]
    # An update trains on the same half of every rank's samples.
    halves = (slice(NUM_SAMPLES // 2), slice(NUM_SAMPLES // 2, None))
    return joined([sample for half in halves for rank in of_ranks for sample in rank[half]])


def rank_samples(words: list[str], rank: int) -> list[tuple[Any, Any, Any, float]]:
    """Prompt, response, log-probs of the rollout and advantage of each sample of a rank."""
    import torch

    generator = torch.Generator().manual_seed(SEED + rank)
    scale = 8 if "large" in words else 1
    samples = []
    for number in range(NUM_SAMPLES):
        longest = 12 + 20 * rank if number % 3 else 40
        prompt, response = (
            scale * int(torch.randint(2, high, (1,), generator=generator)) for high in (12, longest)
        )
        if "empty" in words and number >= NUM_SAMPLES // 2 and rank == 0:
            prompt, response = 40, 0
        if "wide" in words and number == 0:
            prompt = 50
        tokens = torch.randint(2, VOCAB_SIZE, (prompt + response,), generator=generator)
        old = torch.randn(response, generator=generator) * 0.1 - 4.5
        advantage = float(torch.randn(1, generator=generator))
        samples.append((tokens[:prompt], tokens[prompt:], old, advantage))
    return samples


def joined(samples: list[tuple[Any, Any, Any, float]]) -> Any:
    """A track of these samples, prompts padded on the right."""
    import torch
    from unirl.types.conditions import TextTokenCondition
    from unirl.types.rollout_resp import RolloutTrack
    from unirl.types.segments.text import TextSegment

    prompts = [sample[0] for sample in samples]
    width = max(len(prompt) for prompt in prompts)
    ids = torch.stack([torch.nn.functional.pad(p, (0, width - len(p))) for p in prompts])
    mask = torch.stack([torch.arange(width) < len(p) for p in prompts]).long()
    return RolloutTrack(
        sample_ids=[str(number) for number in range(len(samples))],
        conditions={"prompt": TextTokenCondition(input_ids=ids, attention_mask=mask)},
        segment=TextSegment.pack(
            tokens=[sample[1] for sample in samples], log_probs=[sample[2] for sample in samples]
        ),
        advantages=torch.tensor([sample[3] for sample in samples]),
    )


def record(stack: Any, found: dict[str, Any], gradients: list[Any]) -> None:
    """Add whole gradients, and the tokens that the model is given in each forward: those that train
    are `tokens`, the others `replayed`."""
    import torch

    model, step = stack.fsdp_backend.model, stack.fsdp_backend.optimizer_step

    def forward(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        kind = "tokens" if torch.is_grad_enabled() else "replayed"
        found[kind][-1].append(kwargs["input_ids"].numel())

    def optimizer_step(**options: Any) -> Any:
        parts = [p.grad.full_tensor().flatten() for p in model.parameters() if p.requires_grad]
        gradients.append(torch.cat(parts).clone())
        return step(**options)

    model.register_forward_pre_hook(forward, with_kwargs=True)
    stack.fsdp_backend.optimizer_step = optimizer_step


def logprobs(stack: Any, track: Any) -> list[list[float]]:
    """UniRL's replay of all samples in one forward, after training."""
    import torch

    stage = stack.algorithm.stage
    typed = stack.algorithm.conditions_cls.from_dict(track.conditions)
    with torch.no_grad():
        values = stage.replay(typed, segment=track.segment)
    return [part.tolist() for part in values.split(track.segment.lengths.tolist())]


if __name__ == "__main__":
    main()
