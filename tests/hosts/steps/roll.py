"""ROLL's own actor worker on a CPU: its log-probs, its loss, its strategy's training step.

    torchrun --nproc-per-node 2 -m tests.hosts.steps.roll OUT --layout pp=2,vpp=2 --case packed

Cases: `packed` (sequence packing with load_balance), `padded` (dynamic batching). `packed_tight`
has a budget that ROLL's own packer goes over, `padded_tight` one under which it pads too much. In
`packed_prompts` the four samples of a group begin with the same 14 tokens, and
`packed_prompts_shared` sets MEGAPACK_SHARE_PREFIXES=1.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megapack import Layout, launch, patching
from tests.dist import problem
from tests.hosts.steps.job import (
    Arguments,
    Report,
    count_shape_exchanges,
    import_host,
    parse_arguments,
    timed,
    write,
)
from tools.hosting import import_stubs
from tools.hosting.sources import installed

WIDTH = 64
BUDGET = 96
LENGTHS = [40, 9, 31, 22, 58, 17, 12, 36, 25, 61, 14, 47, 8, 29, 19, 53]
"""Tokens of the samples; each DP rank has the same number of them."""
GROUP = 4
PROMPT = 14
SMALL = ("tensordict==0.10.0", "pyvers==0.1.0", "codetiming==1.4.0")
"""Packages without dependencies of their own, which ROLL's data path is written with."""
ABSENT = (
    *("ray", "datasets", "peft", "accelerate", "trl"),
    *("modelscope", "wandb", "vllm", "transfer_queue", "cloudpickle", "omegaconf", "requests"),
    *(
        "opentelemetry",
        "grpc",
        "google",
        "psutil",
        "pybase64",
        "imageio",
        "dacite",
        "more_itertools",
    ),
)


def main() -> None:
    """Train some steps, and write this rank's report."""
    args = parse_arguments()
    report = Report()
    _import_roll(args.folder)
    launch.start("cpu")
    patching.apply(*args.patches)
    worker = make_worker(args, report)
    count_shape_exchanges(report)
    data = make_batch(args)
    for _ in range(args.steps):
        run_one(worker, data, args, report)
    report.params_sum = sum(
        float(param.detach().double().abs().sum()) for param in worker.strategy.model.parameters()
    )
    write(report, args.folder)


def _import_roll(folder: Path) -> None:
    import transformers  # noqa: F401 - before the stubs, which it would take for real packages

    os.environ["ROLL_LOG_DIR"] = str(folder / "logs")
    tree = import_host("roll")
    sys.path.insert(0, str(tree / "mcore_adapter" / "src"))
    sys.path.extend(str(installed(name)) for name in SMALL)
    import_stubs.install(*ABSENT)


def run_one(worker: Any, data: Any, args: Arguments, report: Report) -> None:
    """Log-probs by a forward-only pass, then one training step of all samples."""
    infer = shard(data, args, "infer")
    train = shard(data, args, "train")
    report.row_tokens.append([])
    # Unwrapped: the decorators send data and traces to other processes.
    worker_class = type(worker)
    found = inspect.unwrap(worker_class.compute_log_probs)(worker, infer).batch
    if worker.rank_info.is_pipeline_last_stage:
        report.logprobs.append(in_order(found["log_probs"], infer.batch["prompt_id"]))
    # A report's rows are those of training.
    report.more.setdefault("forward_rows", []).append(report.row_tokens.pop())
    report.row_tokens.append([])
    losses: list[float] = []

    def loss_func(part: Any, output: Any) -> Any:
        # What ROLL logs is a mean of micro-batches' means; its loss is their sum.
        loss, metrics = worker_class.loss_func(worker, part, output)
        losses.append(float(loss))
        return loss, metrics

    worker.loss_func = loss_func
    step = inspect.unwrap(worker_class.train_step)
    metrics = timed(report, lambda: step(worker, train).meta_info["metrics"])
    report.num_microbatches.append(len(report.row_tokens[-1]))
    if losses:
        report.losses.append(sum(losses))
    (grad_norm,) = metrics["actor_train/grad_norm"]
    report.grad_norms.append(float(grad_norm))


def make_worker(args: Arguments, report: Report) -> Any:
    """ROLL's actor worker with its strategy, on this rank's chunks."""
    from roll.configs.worker_config import SequencePackingConfig, StrategyArguments, WorkerConfig
    from roll.distributed.executor.worker import RankInfo
    from roll.distributed.strategy import megatron_strategy
    from roll.pipeline import base_worker

    packed = not args.case.startswith("padded")
    budget = 72 if args.case.endswith("tight") else BUDGET
    config = WorkerConfig(
        name="actor_train",
        strategy_args=StrategyArguments("megatron_train", strategy_settings(args.layout)),
        infer_batch_size=2,
        use_dynamic_batching_in_train=not packed,
        use_dynamic_batching_in_infer=not packed,
        use_sequence_packing=packed,
        sequence_packing_args=SequencePackingConfig("load_balance", budget, budget),
    )
    config.training_args.max_steps = 100
    config.training_args.learning_rate = 1e-2
    config.training_args.per_device_train_batch_size = 1
    # A step takes all samples of a rank, or all its micro-batches.
    config.training_args.gradient_accumulation_steps = len(LENGTHS) // args.layout.dp
    worker = object.__new__(base_worker.ActorWorker)  # __init__ asks Ray for an address
    worker.worker_config = config
    worker.pipeline_config = pipeline_config()
    worker.rank_info = RankInfo()
    worker.worker_name = worker.cluster_name = "actor_train"
    worker._logprobs_cache = {}
    base_worker.state_offload_manger = lambda **_: contextlib.nullcontext()
    megatron_strategy.TrainingArguments = training_arguments
    for provider in ("default_tokenizer_provider", "default_processor_provider"):
        setattr(megatron_strategy, provider, lambda **_: None)
    worker.strategy = megatron_strategy.MegatronTrainStrategy(worker)
    worker.strategy.initialize(lambda **_: make_models(args.layout, report))
    for move in ("load_states", "offload_states"):  # between a GPU and its host's memory
        setattr(worker.strategy, move, lambda **_: None)
    return worker


def strategy_settings(layout: Layout) -> dict[str, Any]:
    """What a recipe of ROLL writes under `strategy_config`."""
    settings: dict[str, Any] = {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": layout.pp,
        "use_distributed_optimizer": False,
    }
    if layout.vpp > 1:
        # mcore_adapter sets batch_p2p_comm to the opposite.
        settings |= {"virtual_pipeline_model_parallel_size": layout.vpp, "overlap_p2p_comm": True}
    return settings


def training_arguments(**values: Any) -> SimpleNamespace:
    """mcore_adapter's arguments, without Hugging Face's, which want another transformers."""
    from mcore_adapter.training_args import MegatronArguments

    names = {field.name for field in dataclasses.fields(MegatronArguments)}
    megatron = MegatronArguments(**{name: values[name] for name in names & set(values)})
    known = {"adam_epsilon": 1e-8, "max_grad_norm": 1.0, "get_warmup_steps": lambda _: 0}
    return SimpleNamespace(**{**known, **vars(megatron), **values})


def pipeline_config() -> SimpleNamespace:
    """The fields of ROLL's pipeline config that an actor's step reads."""
    return SimpleNamespace(
        max_grad_norm=1.0,
        sequence_length=WIDTH,
        ppo_epochs=1,
        seed=7,
        enable_old_logprobs_recompute=True,
        pg_clip=0.2,
        use_pg_clip_range=False,
        dual_clip_loss=True,
        loss_agg_mode="seq-mean-token-mean",
        use_kl_loss=True,
        kl_loss_coef=0.1,
        entropy_loss_coef=0.0,
    )


def make_models(layout: Layout, report: Report) -> Any:
    """ROLL's model chunks of a tiny GPT, with attention that a CPU has."""
    import torch
    from mcore_adapter.models.model_config import McaModelConfig
    from mcore_adapter.models.model_factory import McaGPTModel, VirtualModels
    from megatron.core import parallel_state

    from megapack.job.gpt import initialize_parallel
    from megapack.job.gpt.init import initialize_by_name
    from megapack.job.gpt.specs import local_layer_spec

    class CpuModel(McaGPTModel):  # type: ignore[misc]
        def _get_transformer_layer_spec(self, config: Any = None) -> Any:
            spec = local_layer_spec(config or self.config)
            spec.submodules.self_attention.submodules.core_attention = attention_class()
            return spec

        def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
            if not self.vp_stage:  # the first chunk of a stage: all get the same rows
                report.row_tokens[-1].append(input_ids.numel())
            output = super().forward(input_ids=input_ids, **kwargs)
            # ROLL's log-probs overwrite fp32 logits; of others, bf16 or fp64, they make a copy.
            return output.double() if self.post_process else output

    initialize_parallel(layout, 11)
    settings = strategy_settings(layout)
    config = McaModelConfig(
        num_layers=4,
        hidden_size=problem.WIDTH,
        num_attention_heads=4,
        ffn_hidden_size=problem.WIDTH * 3 // 2,
        normalization="RMSNorm",
        swiglu=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        padded_vocab_size=128,
        max_sequence_length=WIDTH,
        transformer_impl="local",
        init_method_std=problem.MODEL.init_std,
        use_cpu_initialization=True,
        variable_seq_lengths=layout.pp > 1,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        bias_activation_fusion=False,  # torch.compile takes longer than the steps
        **{name: value for name, value in settings.items() if "optimizer" not in name},
    )
    report.more["deallocates"] = config.deallocate_pipeline_outputs
    models = VirtualModels(CpuModel, config)
    group = parallel_state.get_tensor_model_parallel_group()
    initialize_by_name(
        models.get_models(), seed=11, std=problem.MODEL.init_std, num_layers=4, tp_group=group
    )
    return models


def attention_class() -> Any:
    """Causal attention over packed rows, and over padded ones, whose padding is at their ends."""
    import torch

    from megapack.model.attention.sdpa import PackedSDPA

    class CpuAttention(PackedSDPA):
        def forward(self, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("packed_seq_params") is not None:
                return super().forward(query, key, value, *args, **kwargs)
            # [tokens, samples, heads, d], as Megatron's own attention takes it.
            heads = [part.permute(1, 2, 0, 3) for part in (query, key, value)]
            out = torch.nn.functional.scaled_dot_product_attention(
                *heads, is_causal=True, scale=self.softmax_scale
            )
            return out.permute(2, 0, 1, 3).flatten(2)

    return CpuAttention


def make_batch(args: Arguments) -> Any:
    """All samples of a rollout, as ROLL's pipeline hands them to its clusters."""
    import torch
    from roll.distributed.scheduler.protocol import DataProto

    lengths = torch.tensor(LENGTHS)[:, None]
    common_prompts = "prompts" in args.case
    if common_prompts:
        lengths = lengths.clamp(min=PROMPT + 4)
    positions = torch.arange(WIDTH)
    generator = torch.Generator().manual_seed(3)
    shape = (len(LENGTHS), WIDTH)
    mask = (positions < lengths).long()
    response = mask * (positions >= (PROMPT if common_prompts else lengths // 3))
    ids = torch.randint(1, 100, shape, generator=generator) * mask
    if common_prompts:
        ids[:, :PROMPT] = ids[::GROUP, :PROMPT].repeat_interleave(GROUP, 0)
    fields = {
        "input_ids": ids,
        "attention_mask": mask,
        "response_mask": response,
        "position_ids": positions.expand(shape).clone(),
        "ref_log_probs": torch.randn(shape, generator=generator)[:, 1:] - 4,
        "old_log_probs": torch.randn(shape, generator=generator)[:, 1:] - 4,
        "advantages": torch.randn(shape, generator=generator)[:, 1:] * response[:, 1:],
        "prompt_id": torch.arange(len(LENGTHS)),
    }
    meta = {"loss_mask_keys": ["response_mask"], "global_step": 0, "is_offload_states": False}
    return DataProto.from_dict(fields, meta_info=meta)


def shard(batch: Any, args: Arguments, what: str) -> Any:
    """This rank's samples, as ROLL's pipeline and dispatch choose them."""
    from megatron.core import parallel_state
    from roll.utils import dynamic_batching, functionals

    layout = args.layout
    batch = batch.slice()
    functionals.batch_balance(batch, dp_size=layout.dp, minibatch_size=len(batch))
    if args.case.startswith("padded"):
        vpp = layout.vpp if layout.vpp > 1 else None
        budget = 88 if args.case.endswith("tight") else 2 * WIDTH
        batch, _ = dynamic_batching.dynamic_batching_shard(
            batch, layout.dp, budget, 4, layout.pp, vpp, what
        )
    rank = parallel_state.get_data_parallel_rank()
    return batch.chunk(chunks=layout.dp)[rank]


def in_order(logprobs: Any, ids: Any) -> list[float]:
    """Log-probs of all samples in the rollout's order; 0 for those of other ranks."""
    import torch

    everything = torch.zeros(len(LENGTHS), WIDTH - 1)
    everything[ids] = logprobs.float()
    return [float(value) for value in everything.flatten()]


if __name__ == "__main__":
    main()
