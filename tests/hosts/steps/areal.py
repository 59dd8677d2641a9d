"""AReaL's Megatron engine on a CPU: its own train_batch and forward_batch, GRPO loss and optimizer.

    torchrun --nproc-per-node 2 -m tests.hosts.steps.areal OUT --layout pp=2 \
        --patches areal --steps 2

Ours are the model, in place of what a Hugging Face bridge makes, and the toy rollout.

    prompts     the four samples of a group begin with the same 14 tokens
    shared      MEGAPACK_SHARE_PREFIXES=1
    lora        adapters, which AReaL adds to chunks that are wrapped in DDP
"""

from __future__ import annotations

import functools
import logging
import os
import socket
import types
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megapack import Layout, cpu, launch, patching
from tests.hosts.steps import adapters
from tests.hosts.steps.chunks import bridge_settings, host_chunks
from tests.hosts.steps.job import (
    Report,
    count_layer_tokens,
    count_shape_exchanges,
    import_host,
    parse_arguments,
    timed,
    write,
)
from tests.hosts.steps.rl_samples import Sample, draw
from tools.hosting import import_stubs

NUM_SAMPLES = 16
BUDGET = 90
STUBS = (
    *("ray", "omegaconf", "hydra", "megatron.bridge", "mbridge", "torchdata", "datasets", "wandb"),
    *("peft", "accelerate", "pandas", "pyarrow", "PIL", "torchvision", "flash_attn", "vllm"),
    *("sglang", "aiohttp", "uvloop", "fastapi", "uvicorn", "openai", "litellm", "swanlab"),
    *("tensorboardX", "cookiecutter", "zmq", "pynvml", "flask", "psutil", "httpx", "aiofiles"),
    *("math_verify", "colorlog", "etcd3", "requests", "nvtx", "transformer_engine", "pebble"),
    *("nltk", "pybase64", "pydantic", "rich", "starlette", "anthropic", "orjson", "cloudpickle"),
    *("aiohttp_retry", "dacite", "redis", "tenacity", "setproctitle", "trackio", "werkzeug"),
    *("lark", "einops", "triton", "torch_memory_saver", "qwen_vl_utils", "tabulate"),
)


def import_areal() -> None:
    """Import AReaL's engine; what is real must be imported before the stand-ins."""
    import transformers

    for name in ("AutoConfig", "AutoProcessor", "PreTrainedModel", "PreTrainedTokenizerFast"):
        getattr(transformers, name)
    import_host("areal")
    import_stubs.install(*STUBS)
    from areal.engine import megatron_engine

    megatron_engine.MegatronCheckpointManager = types.SimpleNamespace


def make_engine(layout: Layout, case: str) -> Any:
    """AReaL's PPO actor engine, with our chunks where a bridge's would be."""
    from areal.api import FinetuneSpec, ParallelStrategy
    from areal.api.cli_args import (
        MegatronEngineConfig,
        MicroBatchSpec,
        OptimizerConfig,
        PPOActorConfig,
    )
    from areal.engine import megatron_engine as host
    from megatron.core.distributed import finalize_model_grads

    class Engine(host.MegatronPPOActor):  # type: ignore[misc]
        def initialize(self, addr: Any, ft_spec: Any, *args: Any, **kwargs: Any) -> None:
            self.device = torch.device("cpu")
            self.rank = dist.get_rank()
            self.is_vision_model = False
            self.use_padded_seq = False
            settings = bridge_settings(layout)
            if self.config.use_lora:
                settings["gradient_accumulation_fusion"] = False  # as AReaL sets it
            self.model = host._MegatronModelList(host_chunks(layout, settings))
            for i, chunk in enumerate(self.model):
                chunk.vp_stage = i
            if self.config.use_lora:
                self.bridge_cls = "megatron-bridge"
                self._apply_megatron_bridge_lora()
                adapters.draw(self.model)
            self.tf_config = self.model[0].config
            self.tf_config.finalize_model_grads_func = finalize_model_grads
            self._create_optimizer(ft_spec)

    engine = Engine(
        PPOActorConfig(
            experiment_name="toy",
            trial_name="toy",
            dtype="float32",
            mb_spec=MicroBatchSpec(max_tokens_per_mb=BUDGET, packing_algorithm="ffd"),
            megatron=MegatronEngineConfig(virtual_pipeline_parallel_size=layout.vpp),
            optimizer=OptimizerConfig(
                lr=1e-2, weight_decay=0.0, warmup_steps_proportion=0.0, lr_scheduler_type="constant"
            ),
            ppo_n_minibatches=1,
            use_lora=case == "lora",
            lora_rank=adapters.RANK,
            lora_alpha=adapters.ALPHA,
            target_modules=["all-linear"],
        )
    )
    engine.config.megatron.ddp.use_distributed_optimizer = False
    engine.create_process_group(
        ParallelStrategy(
            tensor_parallel_size=layout.tp,
            pipeline_parallel_size=layout.pp,
            data_parallel_size=layout.dp,
            context_parallel_size=layout.cp,
        )
    )
    engine.initialize(
        None, FinetuneSpec(total_train_epochs=1, dataset_size=64, train_batch_size=16)
    )
    return engine


def make_batch(samples: list[Sample], dp_rank: int, dp_size: int) -> dict[str, Tensor]:
    """This rank's samples as AReaL's rollouts give them: padded on the right."""
    own = samples[dp_rank::dp_size]
    width = max(sample.tokens.numel() for sample in own)

    def padded(values: list[Tensor]) -> Tensor:
        rows = [torch.nn.functional.pad(v, (0, width - v.numel())) for v in values]
        return torch.stack(rows)

    return {
        "input_ids": padded([s.tokens for s in own]),
        "attention_mask": padded([torch.ones_like(s.tokens) for s in own]),
        "loss_mask": padded([torch.cat([torch.zeros_like(s.prompt), s.mask]) for s in own]),
        "rewards": torch.tensor([s.reward for s in own]),
    }


def watch_rows(engine: Any, report: Report) -> None:
    """Note the rows that the model's first chunk is given, per training step."""

    def note(chunk: Any, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled() and report.row_tokens:
            report.row_tokens[-1].append(int(kwargs["packed_seq_params"].cu_seqlens_q[-1]))

    engine.model[0].register_forward_pre_hook(note, with_kwargs=True)


def join_alone() -> None:
    """Give a job of one rank the variables that torchrun sets; AReaL joins by them."""
    if "RANK" not in os.environ:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        os.environ.update(alone, MASTER_PORT=str(port))


def main() -> None:
    arguments = parse_arguments()
    warnings.simplefilter("ignore")
    # The stand-in of AReaL's colored log formatter does not format.
    logging.raiseExceptions = False
    cpu.enable()
    join_alone()
    if arguments.case == "lora":
        adapters.import_bridge()
    import_areal()
    patching.apply(*arguments.patches)
    from megatron.core import parallel_state

    report = Report()
    engine = make_engine(arguments.layout, arguments.case)
    count_shape_exchanges(report)
    watch_rows(engine, report)
    count_layer_tokens(report, engine.model[0])
    adapters.watch(report, engine.optimizer, engine.model)
    dp = (parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size())
    samples = draw(NUM_SAMPLES, common_prompts="prompts" in arguments.case)
    batch = make_batch(samples, *dp)
    # As an inference engine gives them: at the token's own position.
    old = log_probs(engine, batch, report).roll(1, -1)
    for _ in range(arguments.steps):
        report.row_tokens.append([])
        stats = timed(report, lambda: train(engine, {**batch, "logprobs": old.clone()}))
        report.grad_norms.append(stats["grad_norm"])
        report.num_microbatches.append(int(stats["num_micro_batches"]))
        log_probs(engine, batch, report)
    params = [p for chunk in engine.model for p in chunk.parameters()]
    report.params_sum = sum(float(p.detach().double().abs().sum()) for p in params)
    write(report, arguments.folder)
    launch.stop()


def log_probs(engine: Any, batch: dict[str, Tensor], report: Report) -> Tensor:
    """AReaL's log-probs, [samples, tokens]; notes those of real tokens in sample order."""
    found = engine.actor._compute_logp(dict(batch))
    # A sample's last token has no next one: its value depends on the sample beside it.
    has_next = batch["attention_mask"][:, 1:].bool()
    report.logprobs.append(found[:, :-1][has_next].tolist())
    return found  # type: ignore[no-any-return]


def train(engine: Any, batch: dict[str, Tensor]) -> dict[str, float]:
    """AReaL's advantages and one train_batch with its GRPO loss, as its `ppo_update` calls it."""
    stats: dict[str, float] = {}
    train_batch = engine.train_batch

    @functools.wraps(train_batch)
    def noted(*args: Any, **kwargs: Any) -> Any:
        stats.update(train_batch(*args, **kwargs))
        return stats

    engine.train_batch = noted
    try:
        engine.actor._ppo_update(engine.actor._compute_advantages(batch))
    finally:
        del engine.train_batch
    engine.lr_scheduler_step()
    return stats


if __name__ == "__main__":
    main()
