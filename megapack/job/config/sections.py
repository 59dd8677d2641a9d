"""The main job's config, `TrainConfig`. `load_config(path, overrides, TrainConfig)` reads it.

Its sections in YAML are `layout`, `plan`, `model`, `data`, `objective`, `critic`, `optim`,
`train` and `watchdog`. The docstring under each field gives its meaning, its unit and the meaning
of null.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Iterator, Sequence

from megapack.base.choices import Device, Executor, Kernel
from megapack.config.bounds import at_least, without_effect
from megapack.config.cost_file import read_cost
from megapack.config.shipped import absent_weights
from megapack.cost.assumed import GpuSpeed, cost_from_sizes
from megapack.cost.memory import MemoryModel
from megapack.cost.model import CostModel
from megapack.cost.options import BYTE_VOCAB_SIZE
from megapack.cost.stages import StageLayers
from megapack.errors import ConfigError
from megapack.job.config.critic import CriticConfig, critic_model
from megapack.job.config.data import DataConfig
from megapack.job.config.loop import LoopConfig, OptimConfig
from megapack.job.config.model import ModelConfig
from megapack.job.config.model_checks import check_division, check_sizes
from megapack.job.config.objective import ObjectiveConfig
from megapack.job.config.plan import LayoutConfig, PlanConfig
from megapack.layout import Layout, ParallelSizes
from megapack.plan.executor import choose_executor
from megapack.policy import check_policy
from megapack.ranks.watchdog_config import WatchdogConfig

__all__ = ["TrainConfig", "LayoutConfig", "PlanConfig", "ModelConfig", "DataConfig"]
__all__ += ["ObjectiveConfig", "CriticConfig", "OptimConfig", "LoopConfig", "WatchdogConfig"]


# A token of `generate_lengths` up to 16,384 tokens is on average in a sample of 3,800 tokens.
_LONGEST_OVER_TYPICAL = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """All settings of a run. The run's folder gets them as they were resolved."""

    name: str
    """The run's name and folder."""
    device: Device = "cuda"
    """cpu redirects Megatron-Core's CUDA calls; it is never chosen automatically."""
    seed: int = 1234
    """Of weights, dropout, and the order of shuffled data."""
    runs_dir: str = "runs"
    """The folder of run folders."""
    layout: LayoutConfig = dataclasses.field(default_factory=LayoutConfig)
    """Parallel groups."""
    plan: PlanConfig = dataclasses.field(default_factory=PlanConfig)
    """Packing. Set a budget or a micro-batch size: it depends on the GPU's memory."""
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    """The GPT."""
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    """Rollouts."""
    objective: ObjectiveConfig = dataclasses.field(default_factory=ObjectiveConfig)
    """The loss."""
    critic: CriticConfig = dataclasses.field(default_factory=CriticConfig)
    """A value model."""
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    """The optimizer."""
    train: LoopConfig = dataclasses.field(default_factory=LoopConfig)
    """The loop."""
    watchdog: WatchdogConfig = dataclasses.field(default_factory=WatchdogConfig)
    """Late steps."""

    def __post_init__(self) -> None:
        at_least(self, "", 0, "seed")
        if self.name in ("", ".", "..") or any(c in self.name for c in "/\\\0\n"):
            raise ConfigError(f"name is {self.name!r}; set a folder's name, without / in it")
        _check_run(self)

    def checked_layout(self, world_size: int) -> Layout:
        """The layout of a job on this many ranks, once all has been checked that the config says.

        Raises:
            ConfigError: the layout does not fit the number of ranks or the model.
        """
        layout = self.layout.to_layout(world_size, self.model.fp8_rows)
        check_sizes(self.model, layout)
        if self.critic.hf_path is not None:
            check_sizes(self.critic_model, layout)
        shares_scales = self.model.fp8 == "delayed"
        check_policy(self.plan, layout, self.plan.micro_batch_size, shares_fp8_scales=shares_scales)
        return layout

    @property
    def executor(self) -> Executor:
        """What runs the steps."""
        return choose_executor(self.plan, self.train.executor)

    @property
    def row_plan(self) -> PlanConfig:
        """`plan`, with what the model allows.

        share_prefixes="off" where Transformer Engine's ring runs over several ranks: shared rows
        would gather the keys of all ranks, and the memory model counts none for the ring. Its
        kernel is preferred in bf16 on GPUs. In a hybrid model rows lie over no more ranks than its
        heads divide over, and pieces are worth the states at their end.
        """
        model = self.model
        memory = self.memory_model()
        widest, least_piece = memory.sizes.max_width(self.layout), memory.least_piece(self.layout)
        plan = self.plan.within(widest, least_piece)
        is_wide = plan.context_parallel == "dynamic" and self.layout.dp != 1
        preferred = self.device == "cuda" and model.dtype == "bf16" and model.attention == "auto"
        on_te = preferred or model.attention == "te" or model.fp8 is not None
        if on_te and (self.layout.cp > 1 or is_wide):
            plan = dataclasses.replace(plan, share_prefixes="off")
        return plan

    @property
    def tokenizer_folder(self) -> str | None:
        """The folder of the Hugging Face tokenizer; None = text is bytes.

        Raises:
            ConfigError: data.tokenizer=hf, and no key names a folder.
        """
        data = self.data
        if data.path is None or data.tokenizer == "bytes":
            return None
        folder = data.tokenizer_path or self.model.hf_path
        if folder is None and data.tokenizer == "hf":
            raise ConfigError(
                "data.tokenizer=hf needs a folder; set data.tokenizer_path or model.hf_path"
            )
        return folder

    @property
    def absent_models(self) -> dict[str, str]:
        """Keys whose model is not there but for its sizes, and a line on each for people."""
        folders = {
            "model.hf_path": self.model.hf_path,
            "objective.reference_hf_path": self.objective.reference_hf_path,
            "critic.hf_path": self.critic.hf_path,
        }
        return {key: line for key, path in folders.items() if (line := absent_weights(path))}

    @property
    def longest_sample(self) -> int:
        """Tokens that a sample may have, prompt and response."""
        return self.data.max_length or self.model.max_position_embeddings

    @functools.cached_property
    def critic_model(self) -> ModelConfig:
        """The critic's model, see `critic.critic_model`."""
        return critic_model(self.model, self.critic.hf_path)

    @property
    def stage_layers(self) -> StageLayers:
        """The number of transformer layers of each pipeline chunk."""
        return self._split(self.layout)

    def _split(self, layout: ParallelSizes) -> StageLayers:
        """`stage_layers` on a layout that may have another pp and vpp than this config's."""
        return self.layout.stage_layers(
            self.model.num_layers,
            pp=layout.pp,
            vpp=layout.vpp,
            num_mtp_layers=self.model.mtp_num_layers,
        )

    @property
    def typical_sample(self) -> int:
        """Tokens of the sample that a typical token is in, for the share of attention."""
        return max(1, self.longest_sample // _LONGEST_OVER_TYPICAL)

    @property
    def assumed_speed(self) -> GpuSpeed:
        """The speed of a GPU that is assumed without a measured cost model."""
        return GpuSpeed.of(self.device, self.model.dtype)

    @property
    def measures_speed(self) -> bool:
        """Whether a run measures the speeds of its kernels when it starts."""
        plan = self.plan
        on_gpu = self.device == "cuda" and plan.calibrate in ("auto", "online")
        return plan.cost_model is None and (on_gpu or plan.calibrate == "start")

    @property
    def cost_basis(self) -> str:
        """Where the cost model comes from, in one line."""
        if self.plan.cost_model is not None:
            return f"of the cost model {self.plan.cost_model}"
        return f"from the model's sizes; {self.assumed_speed.basis}"

    def cost_model(self, layout: Layout) -> CostModel:
        """The cost model of a run: `plan.cost_model`, or of the model's sizes on an assumed GPU.

        Where chunks have different layers and the file has no `stage_weights`, these follow from
        the sizes.

        Raises:
            ConfigError: see `cost_file.read_cost`.
        """
        if self.plan.cost_model is None:
            return self.cost_from_sizes(layout)
        measured = read_cost(self.plan.cost_model, layout)
        split = self._split(layout)
        is_even = split.is_even and len(set(self.model.layer_pattern or "")) < 2
        if is_even or measured.stage_weights is not None:
            return measured
        sizes = self.cost_from_sizes(layout)
        return dataclasses.replace(
            measured, stage_weights=sizes.stage_weights, square_factors=sizes.square_factors
        )

    def cost_from_sizes(
        self, layout: Layout, speed: GpuSpeed | None = None, *, value_head: bool = False
    ) -> CostModel:
        """The cost model of the model's sizes.

        Args:
            speed: of a GPU; None for `assumed_speed`.
            value_head: of the critic; a value head, of one row, replaces the vocabulary's
                projection.
        """
        model = self.critic_model if value_head else self.model
        has_policys_layers = not value_head or self.critic.hf_path is None
        has_value_head = value_head or self.objective.has_value_head
        speed = speed or self.assumed_speed
        cost = cost_from_sizes(
            dataclasses.replace(model.with_value_head(), vocab_size=1) if has_value_head else model,
            layout,
            speed,
            mean_length=self.typical_sample,
            stage_layers=self._split(layout) if has_policys_layers else None,
        )
        return self.model.with_image_costs(cost, layout, speed, model.recompute)

    def memory_model(self) -> MemoryModel:
        """The memory model of this config, with the kernels that its device is meant to have."""
        model = self.model
        on_gpu = self.device == "cuda"
        preferred: Kernel = "te" if on_gpu and model.dtype == "bf16" else "sdpa"
        is_swiglu = model.activation in (None, "silu")
        fused_swiglu = model.bias_activation_fusion if is_swiglu else False
        return MemoryModel(
            sizes=self.model,
            # None fits other layouts of the model too.
            stage_layers=None if self.stage_layers.is_even else self.stage_layers,
            distributed_optimizer=self.optim.distributed_optimizer,
            muon=self.optim.name == "muon",
            logprob_chunk_tokens=self.objective.logprob_chunk_tokens,
            attention=preferred if model.attention == "auto" else model.attention,
            fused_swiglu=on_gpu if fused_swiglu is None else fused_swiglu,
            composite_norms=not on_gpu and model.normalization == "RMSNorm",
            critic=self.critic.enabled,
            critic_sizes=self.critic_model if self.critic.hf_path is not None else None,
            value_head=self.objective.has_value_head,
            executor=self.executor,
            tower=model.tower_sizes,
            trains_tower=model.vision == "train",
        )


def check_installed(names: Sequence[str]) -> None:
    """Raise ConfigError for the first tracker whose package, of the same name, is missing."""
    for name in names:
        spec = importlib.util.find_spec(name)
        # W&B leaves a folder `wandb` behind, which Python finds as a package without an origin.
        if spec is None or spec.origin is None:
            raise ConfigError(
                f"train.trackers has {name}, which is not installed; pip install {name}, or leave "
                "it out"
            )


def _check_run(config: TrainConfig) -> None:
    """Raise ConfigError for the first settings that do not fit each other."""
    _check_division(config)
    _check_folders(config)
    for table in (_critic, _rewards, _routing_replay, _others):
        for is_wrong, text in table(config):
            if is_wrong:
                raise ConfigError(text)


def _check_division(config: TrainConfig) -> None:
    """Check what the layout has to divide, before a job fails on it on a cluster."""
    layout, model, plan = config.layout, config.model, config.plan
    try:
        _ = config.stage_layers
    except ConfigError as error:
        raise ConfigError(f"layout: {error}") from None
    check_division(model, layout)
    _check_row_heads(config)
    if model.num_experts is None and (layout.etp or 1) > 1:
        raise ConfigError(
            f"layout.etp={layout.etp} splits experts, but model.num_experts is null; set "
            "layout.etp=1"
        )
    if layout.sequence_parallel and layout.tp == 1:
        raise ConfigError("layout.sequence_parallel needs layout.tp > 1; set it to false")
    # null is any number of data-parallel ranks; the least that the experts may lie over will do.
    dp = layout.dp or layout.ep * (layout.etp or layout.tp)
    whole = layout.to_layout(dp * layout.tp * layout.pp * layout.cp)
    try:
        check_policy(plan, whole, plan.micro_batch_size, mtp_num_layers=model.mtp_num_layers)
    except ConfigError as error:
        raise ConfigError(f"plan: {error}") from None
    try:
        _ = config.executor
    except ConfigError as error:
        raise ConfigError(f"train: {error}") from None


def _check_row_heads(config: TrainConfig) -> None:
    """Check the heads of layers G and M, which the GPUs of a row divide."""
    layout, plan = config.layout, config.plan
    widest = config.model.max_width(layout)
    if widest is None:
        return
    names = ["linear_num_key_heads", "linear_num_value_heads", "mamba_num_heads"]
    names += ["mamba_num_groups"] if "M" in (config.model.layer_pattern or "") else []
    heads = ", ".join(
        f"model.{name}={value}" for name in names if (value := getattr(config.model, name))
    )
    if widest == 0:
        raise ConfigError(
            f"{heads} do not divide over layout.tp * layout.cp = {layout.tp} * {layout.cp} GPUs; "
            "set smaller ones"
        )
    if plan.context_parallel == "dynamic" and (plan.max_width or 1) > widest:
        raise ConfigError(
            f"plan.max_width={plan.max_width} with layout.tp={layout.tp} and layout.cp="
            f"{layout.cp}: {heads} divide over rows of up to {widest} DP ranks; set {widest}, or "
            "null"
        )


def _check_folders(config: TrainConfig) -> None:
    """Check the folders of other models than the policy's."""
    reference = config.objective.reference_hf_path
    if reference is not None:
        try:
            config.model.check_same_sizes(reference)
        except ConfigError as error:
            raise ConfigError(f"objective.reference_hf_path: {error}") from None
    if config.critic.enabled and config.critic.hf_path is not None:
        positions, longest = config.critic_model.max_position_embeddings, config.longest_sample
        if positions < longest:
            raise ConfigError(
                f"critic.hf_path: {config.critic.hf_path} supports samples of {positions} tokens, "
                f"data.max_length is {longest}; set it to that, or another folder"
            )


_Table = Iterator[tuple[object, str]]
"""Whether something is wrong, and what."""


def _critic(config: TrainConfig) -> _Table:
    objective, critic, mtp = config.objective, config.critic, config.model.mtp_num_layers
    if not critic.enabled:
        needed = "without a critic; set critic.enabled=true"
        without_effect(critic, "critic", needed, "hf_path", "warmup_steps")
        without_effect(objective, "objective", needed, "gamma", "gae_lambda", "kl_in_reward_coef")
        return
    yield (
        objective.kind not in ("ppo", "grpo"),
        f"critic.enabled=true gives advantages per token, which objective.kind={objective.kind} "
        "does not use; set objective.kind=ppo or critic.enabled=false",
    )
    relative = "with a critic, whose advantages are not relative to a prompt group; set "
    without_effect(objective, "objective", f"{relative}critic.enabled=false", "advantage_norm")
    # With layers of multi-token prediction the final norm is beside the last other layer.
    yield (
        critic.hf_path is None and mtp and not config.stage_layers.num_layers[-1],
        f"critic.enabled=true with model.mtp_num_layers={mtp} and no transformer layer in the last "
        "of the layout's chunks, where the critic has the final norm that it copies from the "
        "policy; give that chunk a layer",
    )


def _rewards(config: TrainConfig) -> _Table:
    """What changes rewards where they are not read, or would be read wrongly."""
    objective, data = config.objective, config.data
    has_buffer = objective.overlong_buffer_tokens is not None
    if not objective.reads_rewards:
        kind = f"under objective.kind={objective.kind}, which reads no rewards; set another kind"
        without_effect(data, "data", kind, "drop_equal_rewards")
        without_effect(objective, "objective", kind, "overlong_buffer_tokens")
    yield (
        has_buffer and data.overlong == "truncate",
        "objective.overlong_buffer_tokens with data.overlong=truncate would read the lengths after "
        "truncation; set data.overlong=skip or error, or leave the buffer out",
    )
    for name, is_set in (
        ("critic.enabled=true", config.critic.enabled),
        ("objective.advantage_norm=none", objective.advantage_norm == "none"),
    ):
        yield (
            is_set and data.drop_equal_rewards,
            f"data.drop_equal_rewards=true with {name} would leave out prompt groups that have a "
            "gradient; set data.drop_equal_rewards=false",
        )


def _routing_replay(config: TrainConfig) -> _Table:
    replay, kind = config.train.routing_replay, config.objective.kind
    of_rollout, of_pass = replay == "rollout", replay not in ("none", "rollout")
    reasons = {
        "the model has no experts; set model.num_experts": replay != "none"
        and config.model.num_experts is None,
        "generated rollouts have no routed_experts; set data.path": of_rollout
        and config.data.path is None,
        f"objective.kind={kind} has no pass for old log-probs; set grpo": of_pass
        and kind not in ("ppo", "grpo", "gspo"),
        # Each rank keeps the routes of its own samples only.
        "that pass must run the rows of the steps; set plan.forward_max_tokens_per_gpu=null": (
            of_pass and config.plan.forward_max_tokens_per_gpu is not None
        ),
    }
    for reason, holds in reasons.items():
        yield holds, f"train.routing_replay={replay}: {reason}, or train.routing_replay=none"


def _others(config: TrainConfig) -> _Table:
    model, data, kind = config.model, config.data, config.objective.kind
    vocab_size, positions = model.vocab_size, model.max_position_embeddings
    yield (
        config.objective.has_value_head and model.mtp_num_layers,
        f"model.mtp_num_layers={model.mtp_num_layers} predicts tokens, which objective.kind={kind} "
        "does not; set model.mtp_num_layers=0",
    )
    yield (
        config.train.export_hf is not None and model.hf_path is None,
        f"train.export_hf={config.train.export_hf} needs a model of a Hugging Face folder; set "
        "model.hf_path, or train.export_hf=null",
    )
    yield (
        model.fp8 is not None and config.device == "cpu",
        f"model.fp8={model.fp8} needs a GPU; set device=cuda or model.fp8=null",
    )
    yield (
        config.optim.name == "muon" and model.vision == "train",
        "optim.name=muon with model.vision=train: a tower is trained by Adam only; set "
        "optim.name=adam, or model.vision=frozen",
    )
    yield (
        config.plan.images == "row",
        "plan.images=row is for models of other frameworks; set plan.images=ahead",
    )
    yield (
        data.path is None and vocab_size is not None and vocab_size < BYTE_VOCAB_SIZE,
        f"model.vocab_size={vocab_size} is less than the {BYTE_VOCAB_SIZE} of generated rollouts; "
        f"set {BYTE_VOCAB_SIZE} or more, or data.path",
    )
    yield (
        config.tokenizer_folder is not None and vocab_size is None,
        f"the tokenizer of {config.tokenizer_folder} with model.vocab_size=null; set the model's "
        "vocabulary, or model.hf_path",
    )
    yield (
        (data.max_length or 0) > positions,
        f"data.max_length={data.max_length} is above model.max_position_embeddings={positions}; "
        f"set it to {positions} or less",
    )
