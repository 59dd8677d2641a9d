"""miles' own step: rollout split, data path, log-probs, advantages and `train()`; see `job`."""

from __future__ import annotations

from typing import Any

from tests.hosts.steps import adapters, images, job, rollout_hosts
from tests.hosts.steps.adapters import NUM_SLOTS

# Samples of an adapter's step, and the adapters whose step is complete; the others' gradients stay.
BATCH_SIZE = 8
STEPPED = (0, 2)


def main() -> None:
    """Run miles on one rollout, and report."""
    rollout_hosts.run("miles", make_actor, split_rollout, train, make_lora, make_image_model)


def make_image_model(args: Any, config: Any, **place: Any) -> Any:
    """Megatron-Bridge's Qwen3-VL, which miles trains."""
    return images.make_bridge_model(config, **place)


def make_lora(args: Any) -> Any:
    """miles' LoRA of its arguments."""
    if args.multi_lora:
        from miles.backends.megatron_utils.multi_lora_utils import create_multi_lora_instance

        return create_multi_lora_instance(args)
    from miles.backends.megatron_utils.lora_utils import create_lora_instance

    return create_lora_instance(args)


def split_rollout(arguments: job.Arguments, args: Any) -> tuple[list[Any], list[Any]]:
    """The samples, and each data-parallel rank's part of them, made by miles' own functions."""
    from miles.ray.rollout import train_data_conversion
    from miles.utils.types import Sample

    samples = rollout_hosts.make_samples(Sample, arguments)
    metadata: dict[str, Any] = {}
    if args.multi_lora:
        from miles.utils.types import AdapterRef

        for sample in samples:
            slot = (sample.group_index * 2 + sample.index % 2) % NUM_SLOTS
            sample.adapter = AdapterRef(name=f"adapter {slot}", slot=slot)
            sample.metadata = {"adapter_global_batch_size": BATCH_SIZE}
        metadata = {"dynamic_global_batch_size": len(samples), "step_slots": [*STEPPED]}
    data = train_data_conversion.convert_samples_to_train_data(args, samples, metadata, None, None)
    config = rollout_hosts.parallel_config(arguments)
    return samples, train_data_conversion.split_train_data_by_dp(args, data, config)


def make_actor(args: Any, chunks: list[Any]) -> Any:
    """miles' training actor around these chunks, without the engines that it updates."""
    from megatron.training import global_vars

    global_vars.set_args(args)
    from miles.backends.megatron_utils import model
    from miles.backends.megatron_utils.actor import MegatronTrainRayActor
    from miles.backends.megatron_utils.parallel import (
        create_megatron_parallel_state,
        verify_megatron_parallel_state,
    )
    from miles.backends.training_utils.parallel import set_parallel_state
    from miles.utils import dumper_utils, object_store
    from miles.utils.ft_utils.process_group_utils import GroupInfo

    # miles' tensor dumps are sglang's, and off.
    dumper_utils._get_phase_override_configs = lambda args, phase: {}
    object_store._INSTANCE = object_store.RayObjectStore()
    set_parallel_state(create_megatron_parallel_state(GroupInfo(rank=0, size=1, group=None)))
    verify_megatron_parallel_state(chunks)
    actor = MegatronTrainRayActor.__new__(MegatronTrainRayActor)
    actor.args = args
    actor.model = chunks
    actor.optimizer = (make_slots if args.multi_lora else make_optimizer)(args, chunks)
    actor.opt_param_scheduler = model.get_optimizer_param_scheduler(args, actor.optimizer)
    return actor


def make_optimizer(args: Any, chunks: list[Any]) -> Any:
    """Megatron's Adam."""
    return rollout_hosts.make_optimizer(chunks)


def make_slots(args: Any, chunks: list[Any]) -> Any:
    """miles' optimizers of several adapters, with the schedule of each."""
    from types import SimpleNamespace

    import torch.distributed as dist
    from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig
    from miles.backends.megatron_utils import multi_lora_optimizer, multi_lora_scheduler

    # Its name in the Megatron-Core that miles pins. Bridge's layers want a newer one.
    MegatronOptimizer.get_main_grads_for_grad_norm = MegatronOptimizer.get_grads_for_grad_norm
    adapters.init_slots(chunks)
    rate = rollout_hosts.LEARNING_RATE
    config = OptimizerConfig(
        optimizer="adam", lr=rate, min_lr=rate, weight_decay=0.0, clip_grad=args.clip_grad
    )
    optimizer = multi_lora_optimizer.build_multi_lora_optimizer(args, config, chunks)
    for slot in range(NUM_SLOTS):
        settings = SimpleNamespace(adapter_global_batch_size=BATCH_SIZE, num_step=None)
        adapter = SimpleNamespace(slot=slot, config=settings)
        multi_lora_scheduler.install_slot_scheduler(args, optimizer, adapter, 0)
    step = multi_lora_optimizer.step_adapter_slots

    def kept(*own: Any, **options: Any) -> Any:
        adapters.keep_gradients(chunks, args.folder / f"gradients{dist.get_rank()}.pt")
        return step(*own, **options)

    multi_lora_optimizer.step_adapter_slots = kept
    return optimizer


def train(report: job.Report, actor: Any, refs: list[Any], *, num_samples: int) -> None:
    """The log-probs, the advantages and the optimizer steps of one rollout."""
    from miles.backends.megatron_utils import model
    from miles.backends.training_utils import data, log_utils
    from miles.backends.training_utils.cp_utils import all_gather_with_cp, slice_log_prob_with_cp
    from miles.backends.training_utils.loss import compute_advantages_and_returns

    rollout_data, _ = data.get_rollout_data(actor.args, refs)
    report.more["planned"] = "micro_batch_indices" in rollout_data
    iterators, counts = data.get_data_iterator(actor.args, actor.model, rollout_data)
    rollouts = data.get_num_rollouts(actor.args, rollout_data, len(counts))
    logged: list[dict[str, Any]] = []
    log_utils.tracking.log = lambda args, metrics, step_key=None: logged.append(metrics)
    rollout_hosts.observe(report, actor.model, model)
    outputs = rollout_hosts.note_forward(
        report, lambda: actor.compute_log_prob(iterators, counts, rollout_id=0)
    )
    rollout_data.update(outputs)
    rollout_hosts.note_logprobs(report, rollout_data, num_samples, all_gather_with_cp)
    if actor.args.advantage_estimator == "ppo":
        rollout_hosts.add_values(rollout_data, slice_log_prob_with_cp)
    compute_advantages_and_returns(actor.args, rollout_data)
    rollout_hosts.note_advantages(report, rollout_data, all_gather_with_cp)
    model.train(
        *(0, actor.model, actor.optimizer, actor.opt_param_scheduler, iterators, counts, rollouts),
        witness_info=None,
        attempt=0,
    )
    report.num_microbatches = list(counts)
    rollout_hosts.note_result(report, actor.model, logged)


if __name__ == "__main__":
    main()
