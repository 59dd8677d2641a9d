"""SkyRL's Megatron policy worker: `forward_backward`, `optim_step` and the log-probs of `forward`.

    torchrun --nproc-per-node 2 -m tests.hosts.steps.skyrl OUT --layout pp=2 --patches skyrl

SkyRL's are the worker class, its iterators, `MegatronModelWrapper`, packing, losses, log-probs, DDP
settings and optimizer. The worker is made without Ray and without a Megatron-Bridge model: its
chunks are the tests' tiny GPT.

    mamba       the toy has Mamba-2 layers
    hybrid      a gated delta net, too
    whole       the budget holds all samples
    prompts     the four samples of a group begin with the same 14 tokens
    shared      MEGAPACK_SHARE_PREFIXES=1
    lora        adapters by SkyRL's own settings
"""

from __future__ import annotations

import typing
from typing import TYPE_CHECKING, Any
from unittest import mock

import typing_extensions

from tests.hosts.steps import adapters, job
from tests.hosts.steps.mamba import Told, mamba_chunks, packed_seq_params, pattern_of
from tools.hosting import import_stubs

if TYPE_CHECKING:
    from torch import Tensor

    from megapack import Layout

ABSENT = (
    *("aiohttp", "cloudpathlib", "datasets", "jaxtyping", "loguru", "megatron.bridge", "omegaconf"),
    *("nvidia_resiliency_ext", "orjson", "pybase64", "ray", "requests", "skyrl_gym", "vllm"),
    "zstandard",
)
NUM_SAMPLES = 12
GROUP = 4
PROMPT = 14
WIDTH = 64
NUM_ACTIONS = 24
BUDGET = 96
OPTIMIZER = {"lr": 1e-2, "weight_decay": 0.0}


def prepare() -> None:
    """Make SkyRL importable here."""
    # SkyRL wants Python 3.12: in 3.11 pydantic takes the TypedDict of typing_extensions only.
    typing.TypedDict = typing_extensions.TypedDict
    if "ray" in import_stubs.install(*ABSENT):
        import ray

        ray.is_initialized = lambda: False
    job.import_host("skyrl")


def main() -> None:
    arguments = job.start(prepare)
    from megapack import launch

    if "skyrl" in arguments.patches:
        from megapack.hosts import skyrl

        skyrl.configure(layout=arguments.layout)
    run(arguments)
    launch.stop()


def run(arguments: job.Arguments) -> None:
    """Log-probs and some steps."""
    worker = make_worker(arguments)
    report = job.Report()
    report.more["told"] = Told(worker.actor_module[0]).rows
    job.count_shape_exchanges(report)
    record_rows(worker, report)
    job.count_layer_tokens(report, worker.actor_module[0])
    adapters.watch(report, worker.optimizer, worker.actor_module)
    data = make_batch(arguments.layout, common_prompts="prompts" in arguments.case)
    outputs = worker.forward(data).loss_fn_outputs
    if is_last_stage():
        report.logprobs = [output["logprobs"] for output in outputs]
    report.more["forward_exchanges"] = report.num_shape_exchanges
    for _ in range(arguments.steps):
        job.timed(report, lambda: one_step(worker, data, report))
    report.params_sum = sum(
        p.double().abs().sum().item() for chunk in worker.actor_module for p in chunk.parameters()
    )
    job.write(report, arguments.folder)


def one_step(worker: Any, data: Any, report: job.Report) -> None:
    report.row_tokens.append([])
    status = worker.forward_backward(data).metrics
    report.losses.append(status["policy_loss"])
    report.num_microbatches.append(int(status["num_microbatches"]))
    report.grad_norms.append(float(worker.optim_step()))


def make_worker(arguments: job.Arguments) -> Any:
    """SkyRL's policy worker with what its `init_model` sets, on the tests' chunks."""
    import torch
    from skyrl.backends.skyrl_train.distributed.megatron import (
        megatron_strategy,
        megatron_utils,
        optimizer,
    )
    from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry
    from skyrl.backends.skyrl_train.workers.megatron import megatron_worker

    megatron_utils.PackedSeqParams = packed_seq_params
    reduce_gradients_by_megatron()
    worker = object.__new__(megatron_worker.MegatronPolicyWorkerBase)
    worker.cfg = make_config(arguments.case)
    worker.actor_module = build_chunks(arguments, worker)
    worker.strategy = object.__new__(megatron_strategy.MegatronStrategy)
    worker.enable_router_replay = False
    worker.enable_sample_support_replay = False  # since 0.4
    worker.empty_cuda_cache = False
    settings = optimizer.init_megatron_optim_config(
        worker.cfg.policy.optimizer_config, {"bf16": False, "params_dtype": torch.float32}
    )
    worker.optimizer = optimizer.get_megatron_optimizer(worker.actor_module, settings)
    worker.scheduler = optimizer.get_megatron_optimizer_param_scheduler(
        worker.optimizer, worker.cfg.policy.optimizer_config, num_training_steps=1000
    )
    worker.model = megatron_worker.MegatronModelWrapper(
        config=worker.cfg,
        actor_module=worker.actor_module,
        actor_optimizer=worker.optimizer,
        policy_loss_fn=PolicyLossRegistry.get(worker.cfg.algorithm.policy_loss_type),
    )
    return worker


def reduce_gradients_by_megatron() -> None:
    """Since 0.4 SkyRL reduces gradients by a function of Bridge, which is a stand-in here.

    Bridge's also sums adapters of experts, which the toy does not have.
    """
    from megatron.core.distributed import finalize_model_grads
    from skyrl.backends.skyrl_train.workers.megatron import megatron_model_wrapper

    name = "finalize_model_grads_with_expert_adapter_sync"
    if hasattr(megatron_model_wrapper, name):
        setattr(megatron_model_wrapper, name, finalize_model_grads)


def make_config(case: str) -> Any:
    from skyrl.train.config import TrainerConfig

    config = TrainerConfig()
    config.strategy = "megatron"
    config.max_tokens_per_microbatch = 4000 if "whole" in case else BUDGET
    config.remove_microbatch_padding = True
    config.algorithm.temperature = 1.0
    # The KL term is a mean over micro-batches, so it depends on how samples are packed.
    config.algorithm.use_kl_loss = False
    for name, value in OPTIMIZER.items():
        setattr(config.policy.optimizer_config, name, value)
    if "lora" in case:
        config.bf16 = False  # the type of adapters
        config.policy.model.lora.rank = adapters.RANK
        config.policy.model.lora.alpha = adapters.ALPHA
    return config


def build_chunks(arguments: job.Arguments, worker: Any) -> list[Any]:
    """The tests' chunks with the settings that SkyRL gives to its models and to DDP."""
    from skyrl.train.config.config import MegatronDDPConfig

    from megapack.job.gpt import build
    from tests.dist import problem, setup

    own_config = build.transformer_config
    settings = {
        "calculate_per_token_loss": False,
        "variable_seq_lengths": True,
        # Megatron's defaults, which SkyRL keeps.
        "overlap_p2p_comm": False,
        "batch_p2p_comm": True,
        "deallocate_pipeline_outputs": False,
    }
    average = MegatronDDPConfig().average_in_collective
    if pattern := pattern_of(arguments.case):
        build.initialize_parallel(arguments.layout, problem.SEED)
        reduction = {"average_in_collective": average, "use_distributed_optimizer": True}
        return mamba_chunks(settings, pattern, **reduction)

    def transformer_config(*args: Any) -> Any:
        config = own_config(*args)
        for name, value in settings.items():
            setattr(config, name, value)
        return config

    def adapt(chunks: list[Any]) -> None:
        worker.configure_lora(worker.cfg.policy.model.lora)
        worker.lora_cls(chunks, training=True)
        adapters.draw(chunks)

    with mock.patch.object(build, "transformer_config", transformer_config):
        return list(
            setup.build_chunks(
                arguments.layout,
                distributed_optimizer=True,
                reduction={"average_in_collective": average},
                before_wrapping=adapt if "lora" in arguments.case else None,
            )
        )


def make_batch(layout: Layout, *, common_prompts: bool) -> Any:
    """This data-parallel rank's samples of one batch, which is the same on every layout."""
    import torch
    from megatron.core import parallel_state
    from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch

    from tests.dist import problem

    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(8, WIDTH + 1, (NUM_SAMPLES,), generator=generator)
    responses = torch.minimum(
        torch.randint(2, NUM_ACTIONS + 1, (NUM_SAMPLES,), generator=generator), lengths - 2
    )
    if common_prompts:
        lengths = PROMPT + responses
    attention_mask = left_padded_mask(lengths, WIDTH)
    response_mask = left_padded_mask(responses, NUM_ACTIONS)
    drawn = torch.rand(NUM_SAMPLES, NUM_ACTIONS, generator=generator) < 0.8
    loss_mask = (response_mask * drawn).float()
    shape = (NUM_SAMPLES, NUM_ACTIONS)
    advantages = torch.randn(NUM_SAMPLES, 1, generator=generator).expand(shape)
    tokens = torch.randint(0, problem.VOCAB_SIZE, (NUM_SAMPLES, WIDTH), generator=generator)
    if common_prompts:
        places = WIDTH - lengths[:, None] + torch.arange(PROMPT)
        tokens.scatter_(1, places, tokens[::GROUP, :PROMPT].repeat_interleave(GROUP, 0))
    fields = {
        "sequences": tokens * attention_mask,
        "attention_mask": attention_mask,
        "response_mask": response_mask,
        "loss_mask": loss_mask,
        # SkyRL's driver scales advantages, so that the sum over all tokens is the token mean.
        "advantages": advantages / loss_mask.sum(),
        "action_log_probs": torch.randn(shape, generator=generator) - 4.6,
        "base_action_log_probs": torch.randn(shape, generator=generator) - 4.6,
        "rollout_logprobs": torch.randn(shape, generator=generator) - 4.6,
    }
    mine = slice(parallel_state.get_data_parallel_rank(), None, layout.dp)
    batch = TrainingInputBatch({name: value[mine] for name, value in fields.items()})
    batch.metadata = {"response_length": NUM_ACTIONS}
    return batch


def left_padded_mask(lengths: Tensor, width: int) -> Tensor:
    import torch

    return (torch.arange(width) >= width - lengths[:, None]).long()


def record_rows(worker: Any, report: job.Report) -> None:
    """Add the tokens of each row of a training step to the report."""
    from megatron.core import parallel_state

    cp = parallel_state.get_context_parallel_world_size()

    def record(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        # Later stages get the ids as they were before packing.
        if module.training and report.row_tokens:
            tokens = int(kwargs["packed_seq_params"].cu_seqlens_q[-1])
            report.row_tokens[-1].append(tokens // cp)

    worker.actor_module[0].register_forward_pre_hook(record, with_kwargs=True)


def is_last_stage() -> bool:
    from megatron.core import parallel_state

    return bool(parallel_state.is_pipeline_last_stage(ignore_virtual=True))


if __name__ == "__main__":
    main()
