"""The data of a config, its batches, and the plans of a batch; all without a GPU.

TrainConfig -> open_dataset -> all_batches -> plan_steps, plan_logprobs -> Plan
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from megapack.base.arrays import Ints
from megapack.cost.assumed import GpuSpeed, cost_from_sizes
from megapack.cost.model import CostModel
from megapack.cost.sizes import typical_length
from megapack.dp_schedule import build_dp_schedule
from megapack.errors import DataError
from megapack.images import Images
from megapack.job.config.hf_config import read_hf_config
from megapack.job.config.sections import ObjectiveConfig, PlanConfig, TrainConfig
from megapack.job.data.advantages import Floats, SampleReward, group_advantages, penalize_overlong
from megapack.job.data.dataset import Dataset, SampleNumbers
from megapack.job.data.generated import generate_pairs, generate_rollouts
from megapack.job.data.hf_tokenizer import HfTokenizer
from megapack.job.data.images.reader import ImageReader
from megapack.job.data.rollouts import group_batches
from megapack.job.data.token_blocks import ReadSettings
from megapack.job.data.tokenizer import ByteTokenizer, Tokenizer
from megapack.layout import Layout
from megapack.plan.plan import Plan
from megapack.prefixes import SharedPrefixes


def open_dataset(config: TrainConfig) -> Dataset:
    """Open the file or folder that the config names, or generate rollouts.

    Raises:
        DataError: a file cannot be read or has a bad sample, no prompt group is left, the
            objective needs pairs and a sample is in none, or the reverse, or it needs a column that
            the data has not.
    """
    data = _all_samples(config)
    _check_pairs(config, data)
    missing = [name for name in config.objective.token_columns if name not in data.token_columns]
    if missing:
        raise DataError(
            f"{config.data.path} has no column {missing[0]}, which the objective reads; give it "
            "beside prompt_ids and response_ids, or change the section objective"
        )
    return data.without_equal_rewards() if config.data.drop_equal_rewards else data


def _all_samples(config: TrainConfig) -> Dataset:
    data = config.data
    if data.path is None:
        groups = data.num_generated // data.generated_group_size
        size, seed = data.generated_group_size, data.generated_seed
        if config.objective.reads_pairs:
            return Dataset.from_rollouts(generate_pairs(groups, size, seed))
        columns = config.objective.token_columns
        return Dataset.from_rollouts(generate_rollouts(groups, size, seed, columns=columns))
    spare_folder = Path(config.runs_dir) / ".index"
    return Dataset.from_files(data.path, read_settings(config), spare_folder, data.workers)


def read_settings(config: TrainConfig) -> ReadSettings:
    """How a config reads samples."""
    folder = config.tokenizer_folder
    tokenizer: Tokenizer = ByteTokenizer()
    if folder is not None:
        tokenizer = HfTokenizer(Path(folder), config.data.chat_template_kwargs or {})
    return ReadSettings(
        tokenizer=tokenizer,
        images=_image_reader(config),
        vocab_size=config.model.vocab_size,
        max_length=config.longest_sample,
        overlong=config.data.overlong,
    )


def _image_reader(config: TrainConfig) -> ImageReader | None:
    folder = config.model.hf_path
    vision = read_hf_config(folder).vision if folder and config.model.vision != "off" else None
    if folder is None or vision is None:
        return None
    ids = (vision.image_token_id, vision.video_token_id)
    return ImageReader(Path(folder), *ids, vision.sizes.merge)


def _check_pairs(config: TrainConfig, data: Dataset) -> None:
    kind = config.objective.kind
    is_paired = np.array(data.pair_signs(np.arange(len(data)))) != 0
    unfit = np.flatnonzero(is_paired != config.objective.reads_pairs)
    if unfit.size == 0:
        return
    _, line, _ = data.lines(unfit[:1])[0]
    what = f"{config.data.path}: {unfit.size} of {len(data)} samples (the first is of line {line})"
    if config.objective.reads_pairs:
        raise DataError(
            f"{what} are in no preference pair; objective.kind={kind} needs the columns chosen and "
            "rejected"
        )
    raise DataError(
        f"{what} are in preference pairs, which objective.kind={kind} does not read; set dpo or "
        "reward, or give prompt and response"
    )


def all_batches(config: TrainConfig, data: Dataset) -> Iterator[tuple[int, int, SampleNumbers]]:
    """Yield epoch, index within the epoch, and sample numbers of each batch of the run."""
    window = config.data.balance_window
    work = None if window == 1 else _work(config, data.lengths)
    batches = (
        (epoch, index, batch)
        for epoch in range(config.train.epochs)
        for index, batch in enumerate(
            group_batches(
                data.index["group"],
                config.data.prompts_per_batch,
                shuffle=config.data.shuffle,
                seed=config.seed,
                epoch=epoch,
                work=work,
                window=window,
            )
        )
    )
    return itertools.islice(batches, config.train.num_batches)


def _work(config: TrainConfig, lengths: Ints) -> Ints:
    """Work of each sample in tokens, int64 [samples], by which batches are balanced.

    It depends on nothing that may change when a run resumes: not on the layout, the file of
    `plan.cost_model` or measured seconds. Else batches would change and repeat samples.
    """
    speed, typical = GpuSpeed.of("cuda", "bf16"), typical_length(lengths)
    cost = cost_from_sizes(
        config.model, Layout(), speed, recompute="none", freeze=(), mean_length=typical
    )
    squares = lengths.astype(np.float64) ** 2 * (cost.per_token_sq / cost.per_token)
    return np.rint(lengths + squares).astype(np.int64)


def steps_in(config: TrainConfig, data: Dataset, numbers: SampleNumbers) -> int:
    """Number of optimizer steps of the batch with these samples."""
    if config.plan.num_steps is not None:
        return config.plan.num_steps
    if config.plan.global_batch_size is None:
        return 1
    return -(-data.num_rollouts(numbers) // config.plan.global_batch_size)


def batch_rewards(
    objective: ObjectiveConfig, data: Dataset, numbers: SampleNumbers
) -> list[SampleReward]:
    """The rewards of a batch's samples, less the objective's penalty of overlong responses."""
    rewards = data.rewards(numbers)
    if objective.overlong_buffer_tokens is None:
        return rewards
    assert objective.max_response_tokens is not None
    return penalize_overlong(
        rewards,
        data.response_tokens(numbers),
        max_response_tokens=objective.max_response_tokens,
        buffer_tokens=objective.overlong_buffer_tokens,
        penalty=objective.overlong_penalty,
    )


def batch_advantages(objective: ObjectiveConfig, data: Dataset, numbers: SampleNumbers) -> Floats:
    """Advantages of a batch's samples from their rewards, float64 [samples].

    They are 0 where no sample has a reward or advantage and a teacher takes their place.

    Raises:
        DataError: see `group_advantages`.
    """
    rewards = data.rewards(numbers)
    is_known = any(one.reward is not None or one.advantage is not None for one in rewards)
    if objective.teacher_kl_coef and not is_known:
        return np.zeros(len(numbers))
    return group_advantages(batch_rewards(objective, data, numbers), objective.advantage_norm)


def batch_prefixes(
    plan: PlanConfig,
    data: Dataset,
    numbers: SampleNumbers,
    *,
    mtp_num_layers: int,
    replays_routes: bool,
) -> SharedPrefixes | None:
    """What a batch's samples have in common at their beginnings; None if nothing is to be shared.

    The stored tokens of all samples are compared, so every rank finds the same.

    Args:
        mtp_num_layers, replays_routes: see `Dataset.prefixes`.
    """
    if plan.share_prefixes == "off":
        return None
    return data.prefixes(numbers, mtp_num_layers=mtp_num_layers, replays_routes=replays_routes)


def plan_steps(
    plan: PlanConfig,
    layout: Layout,
    cost: CostModel | None,
    lengths: Sequence[int],
    rollout_ids: Sequence[int],
    pair_ids: Sequence[int] | None = None,
    prefixes: SharedPrefixes | None = None,
    images: Sequence[Images] | None = None,
) -> Plan:
    """Plan the optimizer steps of a batch; arguments and errors as for `build_dp_schedule`.

    Args:
        pair_ids: `Dataset.pair_ids`; a pair stays in one micro-batch.
        prefixes: `batch_prefixes`.
        images: `Dataset.images`.
    """
    return build_dp_schedule(
        lengths,
        layout=layout,
        max_tokens_per_gpu=plan.max_tokens_per_gpu,
        micro_batch_size=plan.micro_batch_size,
        rollout_ids=rollout_ids,
        colocate_ids=pair_ids,
        global_batch_size=plan.global_batch_size,
        num_steps=plan.num_steps,
        cost=cost,
        policy=plan.to_policy(),
        prefixes=prefixes,
        images=images,
    )


def plan_logprobs(
    plan: PlanConfig,
    layout: Layout,
    cost: CostModel | None,
    lengths: Sequence[int],
    prefixes: SharedPrefixes | None = None,
    images: Sequence[Images] | None = None,
) -> Plan | None:
    """Plan one forward pass over all samples with `forward_max_tokens_per_gpu` as the budget.

    Returns None without that setting: log-prob passes then use the rows of the steps.

    Args:
        prefixes: `batch_prefixes`.
    """
    if plan.forward_max_tokens_per_gpu is None:
        return None
    return build_dp_schedule(
        lengths,
        layout=layout,
        max_tokens_per_gpu=plan.forward_max_tokens_per_gpu,
        cost=cost,
        # Log-probs are needed for all samples, including those that a step may drop.
        policy=dataclasses.replace(plan.to_policy(), unreachable="pad"),
        forward_only=True,
        prefixes=prefixes,
        images=images,
    )
