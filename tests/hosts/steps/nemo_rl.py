"""NeMo-RL's Megatron policy worker: `train` and `get_logprobs` on shards of its driver.

    torchrun --nproc-per-node 2 -m tests.hosts.steps.nemo_rl OUT --layout pp=2 --patches nemo_rl

NeMo-RL's are `shard_by_batch_size`, the worker's `train` and `get_logprobs`, its micro-batch
iterators, packing, losses, log-probs and aggregation. The worker is made without Ray and without a
Megatron-Bridge model: its chunk is the tests' tiny GPT, the optimizer Megatron's with NeMo-RL's
settings.

    mamba       the toy has Mamba-2 layers
    hybrid      a gated delta net, too
    prompts     the four samples of a group begin with the same 14 tokens
    shared      MEGAPACK_SHARE_PREFIXES=1
    alone       a micro-batch is one sample, without padding
    temperature logits are divided by 0.5
    draft       the forward step captures hidden states, as for a draft model
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any
from unittest import mock

from tests.hosts.steps import adapters, job
from tests.hosts.steps.mamba import Told, mamba_chunks, packed_seq_params, pattern_of
from tools.hosting import import_stubs

ABSENT = (
    *("datasets", "fastapi", "google", "hydra", "megatron.bridge", "mlflow", "omegaconf"),
    *("prometheus_client", "pynvml", "ray", "requests", "swanlab", "tensorboard", "tensordict"),
    *("torchdata", "transfer_queue", "uvicorn", "vllm", "wandb", "zmq"),
    "megatron.core.inference.config",
    "megatron.core.inference.shards",
    "megatron.core.transformer.moe.moe_logging",
)
# Names of later versions of Megatron-Core than 0.16.1, which a training step does not use.
LATER_NAMES = {
    "dist_checkpointing.strategies.torch": ["get_async_strategy"],
    "distributed.fsdp.mcore_fsdp_adapter": [
        "FullyShardedDataParallelV1",
        "FullyShardedDataParallelV2",
    ],
    "inference.engines.dynamic_engine": ["EngineState"],
    "inference.utils": ["device_memory_summary"],
    "resharding.refit": ["prepare_swap_model_weights"],
    "transformer.enums": ["InferenceCudaGraphScope"],
}
NUM_SAMPLES = 16
GROUP = 4
PROMPT = 14
WIDTH = 64
BUDGET = 96
PAD_MULTIPLE = 4


def prepare() -> None:
    """Make NeMo-RL importable here."""
    import_stubs.install(*ABSENT)
    job.import_host("nemo_rl")
    # This module loads the package a second time.
    importlib.import_module("transformers.processing_utils")
    stand_in_for_bridge()
    # Newer versions of transformers no longer have the fault that NeMo-RL's import corrects.
    setattr(sys.modules["transformers"], "__version__", "5.11.0")  # noqa: B010 - a lazy module


AUTO_BRIDGE = "megatron.bridge.models.conversion.auto_bridge"


def get_model(
    model_provider: Any,
    ddp_config: Any,
    model_type: Any = "",
    overlap_param_gather_with_optimizer_step: Any = False,
    fp16: Any = None,
    bf16: Any = None,
    use_megatron_fsdp: Any = False,
    use_torch_fsdp2: Any = False,
    wrap_with_ddp: Any = True,
    data_parallel_random_init: Any = False,
    use_cpu_initialization: Any = False,
    init_model_with_meta_device: Any = None,
    pre_wrap_hook: Any = None,
    mixed_precision_wrapper: Any = "",
    *,
    pg_collection: Any,
) -> Any:
    """In place of Bridge's: the provider has made the chunks."""
    return list(model_provider.chunks)


def setup_optimizer(model: Any, **_: Any) -> Any:
    """In place of Bridge's: NeMo-RL's settings, but for the distributed optimizer."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    settings = OptimizerConfig(optimizer="adam", lr=1e-2, weight_decay=0.0, clip_grad=1.0)
    optimizer = get_megatron_optimizer(settings, model)
    optimizer.grad_norms_by_group = {}
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=1e-2,
        max_lr=1e-2,
        min_lr=1e-2,
        lr_warmup_steps=0,
        lr_decay_steps=1000,
        lr_decay_style="constant",
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=1000,
        wd_incr_style="constant",
    )
    return optimizer, scheduler


def stand_in_for_bridge() -> None:
    """Functions of Bridge that a worker gives its model to, or a list of its chunks."""

    class AutoBridge:
        def get_conversion_tasks(self, megatron_model: Any) -> Any:
            return megatron_model

        def export_hf_weights(self, model: Any) -> Any:
            return model

    def take_model(model: Any, *_: Any, **__: Any) -> Any:
        return model

    stands = {
        AUTO_BRIDGE: {"AutoBridge": AutoBridge},
        "megatron.bridge.models.model_provider": {"get_model": get_model},
        "megatron.bridge.training.optim": {"setup_optimizer": setup_optimizer},
        "megatron.bridge.training.setup": {"_update_model_config_funcs": take_model},
        "megatron.bridge.training.checkpointing": {
            "save_checkpoint": take_model,
            "load_checkpoint": lambda state, model, *_, **__: LOADED.append(model),
            "checkpoint_exists": lambda path: path is not None,
        },
    }
    for name, values in stands.items():
        module = importlib.import_module(name)
        for key, value in values.items():
            setattr(module, key, value)


LOADED: list[Any] = []
"""The models that checkpoints were loaded into."""


def add_later_names() -> None:
    """Add names that NeMo-RL's modules import and this Megatron-Core has not."""
    for module, names in LATER_NAMES.items():
        loaded = importlib.import_module(f"megatron.core.{module}")
        for name in names:
            if not hasattr(loaded, name):
                setattr(loaded, name, None)


def main() -> None:
    arguments = job.start(prepare)
    from megapack import launch

    if "nemo_rl" in arguments.patches:
        from megapack.hosts import nemo_rl

        nemo_rl.configure(layout=arguments.layout)
    run(arguments)
    launch.stop()


def run(arguments: job.Arguments) -> None:
    """Log-probs and some steps."""
    import torch

    worker = make_worker(arguments)
    report = job.Report()
    # With virtual stages the model of a worker has several.
    chunks = list(getattr(worker.model, "chunks", [worker.model]))
    report.more["told"] = Told(chunks[0]).rows
    job.count_shape_exchanges(report)
    record_rows(chunks[0], report)
    job.count_layer_tokens(report, chunks[0])
    adapters.watch(report, worker.optimizer, chunks)
    job.watch_gradients(report, worker.optimizer, chunks)
    data = make_shard(
        arguments.layout,
        common_prompts="prompts" in arguments.case,
        alone="alone" in arguments.case,
    )
    logprobs = worker.get_logprobs(data=data)["logprobs"]
    # Behind a row's last sample are log-probs of its padding.
    report.logprobs = [
        logprobs[i, : data["input_lengths"][i]].tolist() for i in data["sample"].argsort()
    ]
    report.more["forward_exchanges"] = report.num_shape_exchanges
    for _ in range(arguments.steps):
        job.timed(report, lambda: one_step(worker, data, report))
    with worker.use_reference_model():
        again = worker.get_logprobs(data=data)["logprobs"]
    assert torch.equal(again, logprobs)
    report.params_sum = sum(p.double().abs().sum().item() for p in worker.model.parameters())
    report.more["weights"] = job.tensors(chunks, lambda param: param)
    check_lists(worker, chunks)
    job.write(report, arguments.folder)


def check_lists(worker: Any, chunks: list[Any]) -> None:
    """What NeMo-RL gives Bridge as its list of models are the chunks themselves."""
    from nemo_rl.models.megatron import setup
    from nemo_rl.models.policy.workers import megatron_policy_worker as workers

    bridge = worker.megatron_bridge
    assert bridge.get_conversion_tasks([worker.model]) == chunks
    assert bridge.export_hf_weights([worker.model]) == chunks
    assert setup._update_model_config_funcs([worker.model], None) == chunks
    assert workers.save_checkpoint(model=[worker.model]) == chunks
    assert chunks == LOADED[0]
    assert len(worker.model.state_dict()) == sum(len(chunk.state_dict()) for chunk in chunks)


def one_step(worker: Any, data: Any, report: job.Report) -> None:
    from nemo_rl.algorithms.loss import ClippedPGLossFn
    from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossConfig

    report.row_tokens.append([])
    metrics = worker.train(data, ClippedPGLossFn(ClippedPGLossConfig()), gbs=NUM_SAMPLES, mbs=1)
    report.losses.append(metrics["global_loss"].item())
    report.grad_norms.append(metrics["grad_norm"].item())
    report.num_microbatches.append(len(data.micro_batch_lengths[0]))


def make_worker(arguments: job.Arguments) -> Any:
    """NeMo-RL's policy worker with what its `__init__` sets, on the tests' chunk."""
    layout = arguments.layout
    add_later_names()
    import torch
    from megatron.core import parallel_state
    from nemo_rl.models.megatron import data
    from nemo_rl.models.policy.workers import megatron_policy_worker as workers

    data.PackedSeqParams = packed_seq_params
    worker = object.__new__(workers.MegatronPolicyWorkerImpl)
    torch.cuda.nvtx = types.SimpleNamespace(range_push=lambda name: None, range_pop=lambda: None)
    torch.cuda.get_device_name = lambda *_: "cpu"
    worker.cfg = make_config(layout, arguments.case)
    state, worker.reference_state_dict = set_up(arguments, worker.cfg)
    worker.model, worker.optimizer, worker.scheduler = state[1:4]
    worker.megatron_bridge = sys.modules[AUTO_BRIDGE].AutoBridge()
    groups = types.SimpleNamespace(mp=parallel_state.get_model_parallel_group())
    workers.get_pg_collection = lambda model: groups
    workers.logical_and_across_model_parallel_group = lambda value, mp_group: value
    workers.reduce_max_stat_across_model_parallel_group = lambda value, mp_group: value
    worker.cfg["draft"] = {"enabled": "draft" in arguments.case}
    worker.timer = mock.MagicMock()
    worker.dp_size = layout.dp
    worker.dtype = torch.float32
    worker.mcore_state = types.SimpleNamespace(straggler_timer=None)
    worker.megatron_cfg = types.SimpleNamespace(optimizer=None)
    worker.should_disable_forward_pre_hook = False
    worker.fp8_cfg = None
    worker._first_train_step_forward_pre_hook_disabled = False
    worker._router_replay_enabled = False
    worker.media_placeholder_token_id = None
    worker.draft_model = None
    worker.sampling_params = None
    if "temperature" in arguments.case:
        from nemo_rl.algorithms.logits_sampling_utils import TrainingSamplingParams

        worker.sampling_params = TrainingSamplingParams(top_k=None, top_p=1.0, temperature=0.5)
    worker.defer_fp32_logits = False
    for name in ("pack_to_model", "mtp_loss_mask_to_model"):
        setattr(worker, f"delegate_{name}", False)
    worker.model_slices_context_parallel_inputs = False
    return worker


def set_up(arguments: job.Arguments, cfg: dict[str, Any]) -> Any:
    """NeMo-RL's own setup of a worker, with the tests' chunks and no checkpoint of the policy.

    Returns:
        state: with the model.
        reference: the tensors of the reference model, which has the same weights at first.
    """
    from nemo_rl.models.megatron import setup

    given = mock.MagicMock(peft=None, ft=None)
    given.ddp.overlap_param_gather = False
    given.model.chunks = build_chunks(arguments)
    given.checkpoint.load = given.checkpoint.pretrained_checkpoint = None
    made = {
        "GlobalState": lambda: mock.MagicMock(start_time=0.0),
        "ProcessGroupCollection": mock.MagicMock(),
        "CheckpointConfig": types.SimpleNamespace,
        "_patch_bridge_signal_handler_for_worker_threads": lambda: None,
    }
    with mock.patch.multiple(setup, **made):
        state = setup.setup_model_and_optimizer(cfg, given)
        reference = setup.setup_reference_model_state(cfg, given, "of the policy")
    return state, reference


def make_config(layout: Any, case: str) -> dict[str, Any]:
    """The parts of NeMo-RL's policy config that a step reads."""
    return {
        "sequence_packing": {"enabled": True},
        "dynamic_batching": {"enabled": False},
        "logprob_batch_size": 1,
        "make_sequence_length_divisible_by": 1 if "alone" in case else PAD_MULTIPLE,
        "megatron_cfg": {
            "tensor_model_parallel_size": layout.tp,
            "pipeline_model_parallel_size": layout.pp,
            "context_parallel_size": layout.cp,
            "sequence_parallel": False,
            "empty_unused_memory_level": 0,
            "freeze_moe_router": False,
        },
    }


def build_chunks(arguments: job.Arguments) -> list[Any]:
    """The tests' chunks with the settings that NeMo-RL gives to its models."""
    from megapack.job.gpt import build
    from tests.dist import problem, setup

    own_config = build.transformer_config
    # Megatron's defaults, which NeMo-RL keeps.
    settings = {"variable_seq_lengths": False, "deallocate_pipeline_outputs": False}

    def transformer_config(*args: Any) -> Any:
        config = own_config(*args)
        for name, value in settings.items():
            setattr(config, name, value)
        return config

    if pattern := pattern_of(arguments.case):
        build.initialize_parallel(arguments.layout, problem.SEED)
        return mamba_chunks(settings, pattern)
    with mock.patch.object(build, "transformer_config", transformer_config):
        return setup.build_chunks(
            arguments.layout, before_wrapping=adapt if "lora" in arguments.case else None
        )


def adapt(chunks: list[Any]) -> None:
    """Add adapters as NeMo-RL does, with the values of its example config."""
    from nemo_rl.models.megatron import setup

    lora = setup.LoRA(
        target_modules=list(adapters.TARGETS),
        exclude_modules=[],
        dim=adapters.RANK,
        alpha=adapters.ALPHA,
        dropout=0.0,
        dropout_position="post",
        lora_A_init_method="xavier",
        lora_B_init_method="zero",
        a2a_experimental=False,
    )
    lora(chunks, training=True)
    adapters.draw(chunks)


def make_shard(layout: Any, *, common_prompts: bool, alone: bool) -> Any:
    """This data-parallel rank's shard of one batch, which is the same on every layout.

    Args:
        alone: a micro-batch has one sample.
    """
    import torch
    from megatron.core import parallel_state
    from nemo_rl.distributed import batched_data_dict

    from tests.dist import problem

    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(8, WIDTH + 1, (NUM_SAMPLES,), generator=generator)
    prompts = (lengths * torch.rand(NUM_SAMPLES, generator=generator) / 2).long()
    if common_prompts:
        prompts = torch.full_like(lengths, PROMPT)
        lengths = lengths.clamp(min=PROMPT + 2)
    places = torch.arange(WIDTH)
    is_response = (places >= prompts[:, None]) & (places < lengths[:, None])
    shape = (NUM_SAMPLES, WIDTH)
    tokens = torch.randint(0, problem.VOCAB_SIZE, shape, generator=generator)
    if common_prompts:
        tokens[:, :PROMPT] = tokens[::GROUP, :PROMPT].repeat_interleave(GROUP, 0)
    old = torch.randn(shape, generator=generator) - 4.6
    batch = batched_data_dict.BatchedDataDict(
        {
            "input_ids": tokens * (places < lengths[:, None]),
            "input_lengths": lengths,
            "token_mask": is_response.float(),
            "sample_mask": torch.ones(NUM_SAMPLES),
            "advantages": torch.randn(NUM_SAMPLES, 1, generator=generator).expand(shape),
            "prev_logprobs": old,
            "generation_logprobs": old,
            "reference_policy_logprobs": torch.randn(shape, generator=generator) - 4.6,
            "sample": torch.arange(NUM_SAMPLES),
        }
    )
    if alone:
        packer = mock.MagicMock()
        packer.pack = lambda sequence_lengths: [[i] for i in range(len(sequence_lengths))]
        batched_data_dict.get_packer = lambda *_, **__: packer
    shards, _ = batch.shard_by_batch_size(
        layout.dp,
        batch_size=NUM_SAMPLES,
        sequence_packing_args={
            "algorithm": "modified_first_fit_decreasing",
            "input_key": "input_ids",
            "input_lengths_key": "input_lengths",
            "sequence_length_pad_multiple": 1 if alone else PAD_MULTIPLE,
            "max_tokens_per_microbatch": BUDGET,
        },
    )
    return shards[parallel_state.get_data_parallel_rank()]


def record_rows(chunk: Any, report: job.Report) -> None:
    """Add the tokens of each row of a training step to the report."""

    def record(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if module.training and report.row_tokens:
            report.row_tokens[-1].append(kwargs["input_ids"].numel())

    chunk.register_forward_pre_hook(record, with_kwargs=True)


if __name__ == "__main__":
    main()
