"""slime's own step: rollout split, data path, log-probs, advantages and `train()`; see `job`."""

from __future__ import annotations

import functools
from typing import Any

from tests.hosts.steps import images, job, rollout_hosts


def main() -> None:
    """Run slime on one rollout, and report."""
    rollout_hosts.run("slime", make_actor, split_rollout, train, make_image_model=make_image_model)


def make_image_model(args: Any, config: Any, **place: Any) -> Any:
    """slime's Qwen3.5 with a tower, on layers that run on a CPU in place of its decoder's."""
    import torch
    from slime_plugins.models.qwen3_5_vl import Qwen3_5VLModel, _load_vision_model
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config

    from megapack.job.gpt.specs import local_layer_spec
    from tests.dist import problem

    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": images.MROPE_SECTION}
    hf_config = Qwen3_5Config(
        text_config={"hidden_size": config.hidden_size, "rope_parameters": rope},
        vision_config={**images.VISION_CONFIG, "out_hidden_size": config.hidden_size},
        **images.TOKENS,
    )
    config.use_cpu_initialization = True
    args.padded_vocab_size = problem.VOCAB_SIZE
    args.max_position_embeddings = args.seq_length
    args.rotary_percent = 1.0
    args.rotary_base = 10000
    model = Qwen3_5VLModel(config, local_layer_spec(config), hf_config, args, **place)
    # Heads are as wide as Qwen3.5's.
    wide = Qwen3_5Config(vision_config={**images.VISION_CONFIG, "hidden_size": 144})
    bf16 = _load_vision_model(wide, torch.bfloat16, use_cpu_initialization=True)
    rounded = bf16.rotary_pos_emb.inv_freq.float()
    exact = 10000.0 ** (-torch.arange(len(rounded)) / len(rounded))
    args.angle_error = 63 * float((rounded - exact).abs().max())
    if "unpatched" not in args.case:
        # slime's image patches Megatron so that its GPTModel says this.
        rotary = model.language_model.rotary_pos_emb
        rotary.forward = functools.partial(rotary.forward, packed_seq=True)
    return model


def split_rollout(arguments: job.Arguments, args: Any) -> tuple[list[Any], list[Any]]:
    """The samples, and each data-parallel rank's part of them, made by slime's rollout manager."""
    from slime.ray.rollout import RolloutManager
    from slime.utils.types import Sample

    manager = RolloutManager.__new__(RolloutManager)
    manager.args = args
    manager.custom_reward_post_process_func = None
    manager.custom_convert_samples_to_train_data_func = None
    manager.set_train_parallel_config(rollout_hosts.parallel_config(arguments))
    samples = rollout_hosts.make_samples(Sample, arguments)
    return samples, manager._split_train_data_by_dp(manager._convert_samples_to_train_data(samples))


def make_actor(args: Any, chunks: list[Any]) -> Any:
    """slime's training actor around these chunks, without the engines that it updates."""
    import torch
    from megatron.training import global_vars

    global_vars.set_args(args)
    from slime.backends.megatron_utils import data, model
    from slime.backends.megatron_utils.actor import MegatronTrainRayActor
    from slime.utils import accelerator

    for module in (accelerator, data.accelerator):
        module.current_device = lambda: torch.device("cpu")
        module.device = lambda *index: torch.device("cpu")
    actor = MegatronTrainRayActor.__new__(MegatronTrainRayActor)
    actor.args = args
    actor.model = chunks
    actor.optimizer = rollout_hosts.make_optimizer(chunks)
    actor.opt_param_scheduler = model.get_optimizer_param_scheduler(args, actor.optimizer)
    return actor


def train(report: job.Report, actor: Any, refs: list[Any], *, num_samples: int) -> None:
    """The log-probs, the advantages and the optimizer steps of one rollout."""
    from slime.backends.megatron_utils import model
    from slime.backends.megatron_utils.cp_utils import all_gather_with_cp, slice_log_prob_with_cp
    from slime.backends.megatron_utils.data import get_data_iterator
    from slime.backends.megatron_utils.loss import compute_advantages_and_returns

    rollout_data = actor._get_rollout_data(refs)
    iterators = get_data_iterator(rollout_data)
    counts = rollout_data["num_microbatches"]
    rollouts = rollout_data["global_batch_sizes"]
    logged: list[dict[str, Any]] = []
    model.logging_utils.log = lambda args, metrics, step_key=None: logged.append(metrics)
    rollout_hosts.observe(report, actor.model, model)
    outputs = rollout_hosts.note_forward(report, lambda: actor.compute_log_prob(iterators, counts))
    rollout_data.update(outputs)
    rollout_hosts.note_logprobs(report, rollout_data, num_samples, all_gather_with_cp)
    if actor.args.advantage_estimator == "ppo":
        rollout_hosts.add_values(rollout_data, slice_log_prob_with_cp)
    compute_advantages_and_returns(actor.args, rollout_data)
    rollout_hosts.note_advantages(report, rollout_data, all_gather_with_cp)
    model.train(
        0, actor.model, actor.optimizer, actor.opt_param_scheduler, iterators, counts, rollouts
    )
    report.num_microbatches = list(counts)
    rollout_hosts.note_result(report, actor.model, logged)
    report.more["angle_error"] = actor.args.angle_error


if __name__ == "__main__":
    main()
