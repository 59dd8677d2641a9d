"""The layouts and plans that are compared with the reference, as data."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from megapack.cost import LayerSplit, StageLayers
from megapack.dp_schedule import build_dp_schedule
from megapack.job.config.sections import ModelConfig
from megapack.layout import Layout
from megapack.plan import Plan
from megapack.policy import Policy
from tests.dist import problem
from tests.megatron import MODEL_CLASS


@dataclass(frozen=True, kw_only=True)
class Case:
    """One layout and one plan of the problem's samples."""

    layout: Layout
    split: LayerSplit = field(default_factory=LayerSplit)
    budget: int | None = 64
    micro_batch_size: int | None = None
    policy: Policy = field(default_factory=Policy)
    weighting: str = "token-mean"
    norm_constant: float | None = None
    recompute: str = "none"
    variant: str = "plain"
    """The name of one of `problem.MODELS`."""
    frozen: tuple[str, ...] = ()
    """Parameters that are not trained, as in `ModelConfig.freeze`."""
    forward_budget: int | None = None
    """Run the forward pass with a separate plan of this budget."""
    config: dict[str, Any] = field(default_factory=dict)
    """Settings of Megatron's config that are changed after the model is built."""
    num_samples: int = problem.NUM_SAMPLES
    staged: bool = False
    """Stages exchange tensors through the host, as they must if they share a GPU."""
    expect: dict[str, Any] = field(default_factory=dict)
    """Facts about the plan that the case's name states."""

    @property
    def model(self) -> ModelConfig:
        """The model: with few layers, unless the case speaks of more or has more chunks."""
        model = problem.MODELS[self.variant][0]
        needs_all = (
            self.split != LayerSplit()
            or self.layout.pp * self.layout.vpp > problem.FEW_LAYERS
            or any("layers.[" in name for name in self.frozen)
            # The tests' limit on rounding errors is of a deep model.
            or self.variant in problem.PRECISE
            or model.moe_first_dense_layers
        )
        model = model if needs_all else problem.shallow(model)
        if MODEL_CLASS and model.layer_pattern is None and model.megatron_class == "auto":
            model = replace(model, megatron_class=MODEL_CLASS)
        return replace(model, recompute=self.recompute, freeze=self.frozen)

    @property
    def references(self) -> tuple[str, ...]:
        """The reference's files: in fp32, and in the case's own precision where that is lower."""
        variants = (problem.PRECISE.get(self.variant), self.variant)
        return tuple(f"{name}-{self.model.num_layers}" for name in variants if name)

    @property
    def stage_layers(self) -> StageLayers:
        """The layers of each chunk."""
        return self.split.stage_layers(
            self.model.num_layers,
            pp=self.layout.pp,
            vpp=self.layout.vpp,
            num_mtp_layers=self.model.mtp_num_layers,
        )

    @property
    def world(self) -> int:
        """Processes that the case needs."""
        return self.layout.world_size

    def plan(self) -> Plan:
        """The plan, the same on every rank."""
        return build_dp_schedule(
            problem.make_batch(self.num_samples).lengths,
            layout=self.layout,
            max_tokens_per_gpu=self.budget,
            micro_batch_size=self.micro_batch_size,
            rollout_ids=problem.ROLLOUT_IDS[: self.num_samples],
            cost=problem.COST,
            policy=self.policy,
        )

    def forward_plan(self) -> Plan:
        """The plan of the forward pass: a separate one if the case has a `forward_budget`."""
        if self.forward_budget is None:
            return self.plan()
        return build_dp_schedule(
            problem.make_batch(self.num_samples).lengths,
            layout=self.layout,
            max_tokens_per_gpu=self.forward_budget,
            forward_only=True,
        )


PP2 = Layout(pp=2)
PP4 = Layout(pp=4)
PP2_VPP2 = Layout(pp=2, vpp=2)
PP3 = Layout(pp=3)
PP4_VPP2 = Layout(pp=4, vpp=2)
DP2_PP2 = Layout(dp=2, pp=2)
DP2_PP2_VPP2 = Layout(dp=2, pp=2, vpp=2)
TP2 = Layout(tp=2)
TP2_SP = Layout(tp=2, sequence_parallel=True)
DP2_EP2 = Layout(dp=2, ep=2)
DP2_TP2_SP = Layout(dp=2, tp=2, sequence_parallel=True)
UNIFORM = Policy(row_shape="uniform")


def _split(text: str) -> LayerSplit:
    return LayerSplit(pipeline_model_parallel_layout=text)


def _layers(*counts: int) -> list[list[int]]:
    """Numbers of the layers of each chunk."""
    ends = list(accumulate(counts))
    return [list(range(end - count, end)) for end, count in zip(ends, counts, strict=True)]


def named(name: str) -> Case:
    """The case of a name that says all of it: a variant, the sizes of a layout, and words.

    >>> named("moe_pp2_vpp2_recompute").layout
    Layout(pp=2, vpp=2)
    """
    begins = [v for v in problem.MODELS if f"{name}_".startswith(f"{v}_")]
    variant = max(begins, key=len, default="")
    words = name.removeprefix(variant).split("_")
    variant = "bf16" if "bf16" in words else variant or "plain"
    sizes = {w[:-1]: int(w[-1]) for w in words if w[:-1].isalpha() and w[-1].isdigit()}
    layout = Layout(**sizes, sequence_parallel="sp" in words)
    expect = {"chunks": layout.vpp} if layout.vpp > 1 else {}
    case = Case(layout=layout, variant=variant, expect=expect)
    if "uniform" in words:
        case = replace(case, policy=UNIFORM, expect={**expect, "dummies": True})
    recompute = {"selective": "selective", "recompute": "full"}
    kinds = [kind for word, kind in recompute.items() if word in words]
    return replace(case, recompute=(*kinds, "none")[0], staged="staged" in words)


_NAMED = (
    *("single", "pp2", "pp2_uniform", "pp2_recompute", "pp2_staged", "pp2_vpp2", "pp2_vpp2_staged"),
    *("pp2_vpp2_uniform", "pp2_bf16", "tp2_sp_bf16_recompute", "tp2", "tp2_sp", "dp2", "moe"),
    *("moe_dp2", "moe_dp2_ep2", "moe_dp2_ep2_uniform", "moe_pp2", "moe_pp2_vpp2"),
    *("moe_pp2_vpp2_recompute", "moe_cp2", "moe_replay_cp2", "moe_bias_cp2_recompute"),
    *("moe_tp2_sp", "moe_bias_dp2_ep2", "moe_bias_pp2_recompute", "moe_replay"),
    *("moe_replay_dp2_ep2", "moe_replay_tp2_sp", "moe_replay_pp2_vpp2_recompute"),
    *("moe_cp2_pp2_vpp2", "moe_dp2_cp2_ep2", "moe_replay_tp2_sp_cp2", "moe_dp2_pp2_ep2"),
    *("moe_tp2_sp_etp2", "moe_tp2_sp_ep2", "moe_replay_tp2_sp_ep2"),
    *("moe_bias_tp2_sp_ep2_recompute", "moe_dp2_tp2_sp", "moe_dp2_tp2_sp_ep2"),
    *("moe_dp2_tp2_sp_ep2_etp2", "moe_dp2_tp2_sp_ep4", "moe_tp2_sp_pp2_ep2", "moe_tp2_sp_pp2_etp2"),
    *("moe_tp2_sp_pp2_vpp2_ep2", "moe_shared", "moe_shared_dp2_ep2"),
    *("moe_shared_tp2_sp_ep2_recompute", "moe_shared_cp2", "moe_shared_pp2_vpp2", "mla"),
    *("moe_latent", "moe_latent_dp2_ep2", "moe_latent_tp2_sp_ep2_recompute", "moe_latent_cp2"),
    *("moe_latent_pp2_vpp2", "moe_latent_tp2_sp_etp2", "moe_latent_dp2_tp2_sp_ep2_selective"),
    *("mla_pp2_vpp2", "mla_tp2_sp", "mla_cp2", "mla_cp2_recompute", "window", "window_tp2_sp"),
    *("window_cp2", "window_pp2_vpp2_recompute", "gpt_oss", "gpt_oss_tp2_sp", "gpt_oss_tp2_sp_ep2"),
    *("gpt_oss_dp2_tp2_sp_ep4", "dsa", "dsa_cp2_recompute", "dsa_cp2_tp2_sp", "mtp", "mtp_pp2"),
    *("mtp_pp2_uniform", "mtp_pp2_vpp2", "mtp_tp2_sp", "mtp_cp2", "mtp_cp2_pp2_vpp2"),
    *("mtp_moe_dp2_ep2", "mtp_moe_dp2_pp2_vpp2_ep2", "pp4", "pp4_vpp2", "dp2_pp2", "tp2_sp_pp2"),
    *("tp2_sp_pp2_recompute", "tp2_sp_pp2_recompute_selective", "dp2_pp2_vpp2_bf16", "cp2"),
    *("cp2_uniform", "cp2_recompute", "cp2_pp2", "cp2_pp2_vpp2", "cp2_pp2_vpp2_uniform", "cp2_tp2"),
    *("cp2_tp2_sp", "cp4", "tp2_pp2_vpp2", "moe_dp2_tp2_sp_pp2_vpp2_ep2_etp1"),
    *("moe_dp2_tp2_sp_pp2_vpp2_ep2_etp2",),
)

_FEW_PROCESSES: dict[str, Case] = {
    **{name: named(name) for name in _NAMED},
    "pp2_count_based": Case(layout=PP2, budget=None, micro_batch_size=3),
    "pp2_other_model": Case(layout=PP2, variant="other"),
    "pp2_vpp2_deallocating": Case(
        layout=PP2_VPP2, config={"deallocate_pipeline_outputs": True}, expect={"chunks": 2}
    ),
    "pp2_vpp2_remainder": Case(
        layout=Layout(pp=2, vpp=2, microbatch_group_size=3),
        num_samples=14,
        expect={"remainder": True},
    ),
    "pp2_vpp2_pad": Case(
        layout=Layout(pp=2, vpp=2, microbatch_group_size=8),
        num_samples=6,
        expect={"padding": True},
    ),
    "pp2_vpp2_pad_uniform": Case(
        layout=Layout(pp=2, vpp=2, microbatch_group_size=8),
        num_samples=6,
        policy=UNIFORM,
        expect={"padding": True, "dummies": True},
    ),
    "pp2_frozen_stage": Case(
        layout=PP2, frozen=("embedding.*", "decoder.layers.[0-3].*"), expect={"frozen_ranks": 1}
    ),
    "pp2_frozen_head_recompute": Case(
        layout=PP2,
        variant="other",
        recompute="full",
        frozen=("embedding.*", "output_layer.*", "decoder.layers.*.mlp.*"),
    ),
    "pp2_vpp2_frozen_chunks": Case(
        layout=PP2_VPP2,
        frozen=("embedding.*", "decoder.layers.[0145].*", "decoder.final_layernorm.weight"),
        expect={"chunks": 2, "frozen_ranks": 1},
    ),
    "pp2_forward_plan": Case(layout=PP2, forward_budget=128),
    "pp2_vpp2_forward_plan": Case(layout=PP2_VPP2, forward_budget=128),
    "tp2_other_model": Case(layout=TP2, variant="other"),
    "tp2_sp_other_model": Case(layout=TP2_SP, variant="other"),
    "tp2_sp_recompute": Case(layout=TP2_SP, recompute="selective"),
    "tp2_sp_recompute_full": Case(layout=TP2_SP, recompute="full"),
    "dp2_drop": Case(
        layout=Layout(dp=2),
        budget=16,
        policy=Policy(unreachable="drop"),
        num_samples=3,
        expect={"dropped": True},
    ),
    "seq-mean-token-mean": Case(layout=PP2, weighting="seq-mean-token-mean"),
    "seq-mean-token-sum": Case(layout=PP2, weighting="seq-mean-token-sum"),
    "seq-mean-token-sum-norm": Case(
        layout=PP2, weighting="seq-mean-token-sum-norm", norm_constant=41.0
    ),
    "rollout-mean": Case(layout=PP2, weighting="rollout-mean"),
    "moe_dp2_pp2_vpp2_ep2_pad": Case(
        layout=Layout(dp=2, pp=2, vpp=2, ep=2),
        variant="moe",
        num_samples=3,
        expect={"chunks": 2, "padding": True},
    ),
    "moe_dp2_tp2_sp_ep2": Case(layout=replace(DP2_TP2_SP, ep=2), variant="moe"),
    "moe_shared_pp2_vpp2_uneven": Case(
        layout=PP2_VPP2,
        split=_split("Et|t*4|t*2|tL"),
        variant="moe_shared",
        expect={"layers": _layers(1, 4, 2, 1)},
    ),
    "mla_tp2_sp_recompute": Case(layout=TP2_SP, variant="mla", recompute="selective"),
    "mla_plain_tp2_sp": Case(layout=TP2_SP, variant="mla_plain", recompute="selective"),
    "dsa_dp2_pp2_vpp2": Case(
        layout=replace(PP2_VPP2, dp=2), variant="dsa", expect={"chunks": 2, "packed": True}
    ),
    "dsa_tp2_sp_recompute": Case(layout=TP2_SP, variant="dsa", recompute="selective"),
    "mtp_dp2": Case(layout=Layout(dp=2), variant="mtp", weighting="seq-mean-token-mean"),
    "mtp_pp2_untied": Case(layout=PP2, variant="mtp_other"),
    "pp4_vpp2_uniform": Case(layout=PP4_VPP2, policy=UNIFORM, expect={"chunks": 2}),
    "dp2_pp2_uniform_pad": Case(
        layout=DP2_PP2, policy=UNIFORM, num_samples=1, expect={"padding": True}
    ),
    "dp2_pp2_vpp2": Case(layout=DP2_PP2_VPP2, weighting="rollout-mean", expect={"chunks": 2}),
    "dp2_pp2_vpp2_pad": Case(
        layout=DP2_PP2_VPP2, num_samples=3, expect={"chunks": 2, "padding": True}
    ),
    "dp2_frozen_embedding": Case(layout=Layout(dp=2), recompute="full", frozen=("embedding.*",)),
    "cp2_recompute_attention": Case(layout=Layout(cp=2), recompute="selective"),
    "cp2_pp2_vpp2_pad": Case(
        layout=Layout(cp=2, pp=2, vpp=2, microbatch_group_size=8),
        num_samples=6,
        expect={"padding": True},
    ),
    "dp2_cp2": Case(layout=Layout(dp=2, cp=2), weighting="rollout-mean"),
    "shapes_cp2": Case(layout=Layout(cp=2), policy=Policy(row_shapes=3), expect={"row_lengths": 2}),
    "shapes_pp2_vpp2": Case(
        layout=PP2_VPP2, policy=Policy(row_shapes=2), expect={"chunks": 2, "row_lengths": 2}
    ),
    "shapes_tp2_sp": Case(layout=TP2_SP, policy=Policy(row_shapes=2), expect={"row_lengths": 2}),
    "shapes_mla_cp2": Case(
        layout=Layout(cp=2),
        variant="mla",
        policy=Policy(row_shapes=3),
        expect={"row_lengths": 2},
    ),
    "shapes_mtp_pp2": Case(
        layout=PP2, variant="mtp", policy=Policy(row_shapes=2), expect={"row_lengths": 2}
    ),
    "shapes_moe_dp2_ep2": Case(
        layout=DP2_EP2, variant="moe", policy=Policy(row_shapes=1), expect={"row_lengths": 1}
    ),
    "shapes_dp2_pad": Case(
        layout=Layout(dp=2),
        policy=Policy(row_shapes=2),
        num_samples=1,
        expect={"padding": True},
    ),
    "pp2_uneven": Case(
        layout=PP2,
        split=_split("Et*3|t*5L"),
        expect={"layers": _layers(3, 5)},
    ),
    "pp3_uneven_loss_counts": Case(
        layout=PP3,
        split=_split("Et*3|t*3|t*2L"),
        variant="other",
        expect={"layers": _layers(3, 3, 2)},
    ),
    "pp2_vpp2_uneven_ends": Case(
        layout=PP2_VPP2,
        split=_split("Et|t*3|t|t*3L"),
        expect={"layers": _layers(1, 3, 1, 3)},
    ),
    "pp2_vpp2_loss_alone": Case(
        layout=PP2_VPP2, split=_split("Et*3|t|t*4|L"), expect={"layers": _layers(3, 1, 4, 0)}
    ),
    "pp2_vpp2_embedding_alone_recompute": Case(
        layout=PP2_VPP2,
        split=_split("E|t*3|t*4|tL"),
        recompute="full",
        expect={"layers": _layers(0, 3, 4, 1)},
    ),
    "pp2_embedding_alone": Case(
        layout=PP2, split=_split("E|t*8L"), expect={"layers": _layers(0, 8)}
    ),
    "pp2_embedding_alone_frozen": Case(
        layout=PP2,
        split=_split("E|t*8L"),
        variant="other",
        recompute="full",
        frozen=("embedding.*",),
        expect={"layers": _layers(0, 8), "frozen_ranks": 1},
    ),
    "tp2_sp_pp2_loss_alone": Case(
        layout=Layout(tp=2, pp=2, sequence_parallel=True),
        split=_split("Et*8|L"),
        variant="other",
        expect={"layers": _layers(8, 0)},
    ),
    "cp2_pp2_vpp2_uneven": Case(
        layout=Layout(cp=2, pp=2, vpp=2),
        split=_split("E|t*3|t*5|L"),
        expect={"layers": _layers(0, 3, 5, 0)},
    ),
    "moe_pp2_uneven_recompute": Case(
        layout=PP2,
        split=_split("Et*5|t*3L"),
        variant="moe",
        recompute="full",
        expect={"layers": _layers(5, 3)},
    ),
    "moe_bias_pp2_loss_alone": Case(
        layout=PP2, split=_split("Et*8|L"), variant="moe_bias", expect={"layers": _layers(8, 0)}
    ),
    "moe_replay_pp2_vpp2_uneven": Case(
        layout=PP2_VPP2,
        split=_split("E|t*3|t*4|tL"),
        variant="moe_replay",
        expect={"layers": _layers(0, 3, 4, 1)},
    ),
    "moe_dp2_pp2_vpp2_ep2_uneven": Case(
        layout=Layout(dp=2, pp=2, vpp=2, ep=2),
        split=_split("Et*2|t*3|t*3|L"),
        variant="moe",
        expect={"layers": _layers(2, 3, 3, 0)},
    ),
    "mtp_pp2_layers_alone": Case(
        layout=PP2, split=_split("Et*8|mmL"), variant="mtp", expect={"layers": _layers(8, 0)}
    ),
    "mtp_pp2_vpp2_uneven_untied": Case(
        layout=PP2_VPP2,
        split=_split("E|t*3|t*2|t*3mmL"),
        variant="mtp_other",
        expect={"layers": _layers(0, 3, 2, 3)},
    ),
}

_DP2_TP2_PP2_VPP2_EP2 = replace(DP2_TP2_SP, pp=2, vpp=2, ep=2)
ALL_CASES = _FEW_PROCESSES | {
    f"moe_dp2_tp2_sp_pp2_vpp2_ep2_etp{etp}": Case(
        layout=replace(_DP2_TP2_PP2_VPP2_EP2, etp=etp), variant="moe", expect={"chunks": 2}
    )
    for etp in (1, 2)
}
"""The cases of tools/exactness.py, on 1 to 8 processes."""

# Each way to divide a model, its samples and its steps once, on up to 4 processes. The other cases
# combine these: of plans, weights and frozen parts on pp2, pp2_uniform, dp2_pp2_vpp2 (with
# rollout-mean), pp2_vpp2_forward_plan and pp2_embedding_alone_frozen have the code. Ways to divide
# a model are combined by cp2_pp2_vpp2_pad, tp2_sp_pp2_recompute, mtp_moe_dp2_pp2_vpp2_ep2,
# moe_cp2_pp2_vpp2 and moe_dp2_pp2_vpp2_ep2_uneven, whose loss has a stage of its own.
_TESTED = (
    *("single", "pp2", "pp2_uniform", "pp2_staged", "pp2_vpp2", "pp2_vpp2_deallocating"),
    *("pp2_vpp2_remainder", "pp2_frozen_head_recompute", "pp2_vpp2_forward_plan"),
    *("tp2_sp_bf16_recompute", "dp2_drop", "seq-mean-token-sum-norm", "moe"),
    *("moe_bias_cp2_recompute", "moe_bias_dp2_ep2", "moe_replay_pp2_vpp2_recompute"),
    *("moe_cp2_pp2_vpp2", "moe_tp2_sp_etp2", "moe_dp2_tp2_sp_ep2"),
    *("moe_tp2_sp_pp2_vpp2_ep2", "moe_shared_dp2_ep2", "moe_shared_pp2_vpp2_uneven", "mla_tp2_sp"),
    "moe_latent_dp2_tp2_sp_ep2_selective",
    *("mla_plain_tp2_sp", "mla_cp2", "window_pp2_vpp2_recompute", "gpt_oss_tp2_sp"),
    *("gpt_oss_tp2_sp_ep2", "dsa_dp2_pp2_vpp2", "dsa_tp2_sp_recompute", "dsa_cp2_recompute"),
    *("mtp", "mtp_cp2", "mtp_moe_dp2_pp2_vpp2_ep2", "pp4_vpp2", "dp2_pp2_vpp2"),
    *("tp2_sp_pp2_recompute", "cp2_pp2_vpp2_pad", "shapes_cp2", "shapes_pp2_vpp2", "shapes_tp2_sp"),
    *("shapes_mla_cp2", "shapes_mtp_pp2", "shapes_moe_dp2_ep2", "shapes_dp2_pad"),
    *("pp2_vpp2_embedding_alone_recompute", "pp2_embedding_alone_frozen"),
    *("moe_dp2_pp2_vpp2_ep2_uneven", "mtp_pp2_vpp2_uneven_untied"),
)
CASES = {name: ALL_CASES[name] for name in _TESTED}
"""The cases of the tests, on 1, 2 and 4 processes."""


_OF_HYBRIDS = (
    *(
        "single",
        "pp2",
        "pp2_recompute",
        "pp2_vpp2",
        "pp2_uniform",
        "tp2_sp",
        "tp2_sp_pp2_recompute",
    ),
    *("tp2_sp_pp2_recompute_selective", "cp2", "cp2_pp2_vpp2_recompute", "cp2_tp2_sp", "cp4"),
)


def _hybrid(variant: str) -> dict[str, Case]:
    """The layouts that a hybrid model of the problem runs on."""

    def uneven(*counts: int) -> Case:
        split = _split(StageLayers(counts, pp=2).to_text())
        return Case(layout=PP2_VPP2, split=split, expect={"layers": _layers(*counts)})

    others = ("tp2",) if variant == "hybrid" else ("dp2_ep2", "dp2_tp2_sp_ep2")
    cases = {name: named(f"{variant}_{name}") for name in (*_OF_HYBRIDS, *others)} | {
        "pp2_vpp2_uneven": uneven(1, 4, 2, 1),
        "pp2_vpp2_ends_alone_recompute": replace(uneven(0, 3, 5, 0), recompute="full"),
        "pp2_frozen": Case(layout=PP2, frozen=("embedding.*", "decoder.layers.[0-3].*")),
    }
    return {f"{variant}_{name}": replace(case, variant=variant) for name, case in cases.items()}


_OTHER_HYBRIDS = (
    *("mla_as_hybrid", "mla_as_hybrid_tp2_sp_pp2", "mtp_hybrid_single", "mtp_hybrid_cp2_pp2_vpp2"),
    *("dsa_as_hybrid_tp2_sp", "dsa_as_hybrid_cp2_pp2_vpp2_recompute"),
    *("mtp_hybrid_tp2_sp_ep2", "mtp_hybrid_pp2", "mamba_latent", "mamba_latent_dp2_ep2"),
    *("mamba_latent_tp2_sp_ep2", "mamba_latent_pp2_vpp2", "mamba_latent_cp2_pp2"),
    *("mamba_latent_dp2_tp2_sp_ep2_etp2", "mamba_latent_tp2_sp_pp2"),
)
HYBRID_CASES = {
    name: case
    for variant in ("gated_delta", "mamba", "hybrid", "gpt_as_hybrid")
    for name, case in _hybrid(variant).items()
} | {name: named(name) for name in _OTHER_HYBRIDS}
"""Hybrid models, which need Megatron-Core 0.18 or later."""

STREAMS_CASES = {
    f"streams_{name}": named(f"streams_{name}")
    for name in (
        *("single", "single_selective", "tp2", "tp2_sp", "tp2_sp_selective", "cp2", "cp4", "dp2"),
        *("cp2_tp2_sp", "pp2", "pp2_selective", "pp2_staged", "pp2_vpp2", "pp4", "tp2_sp_pp2"),
        *("cp2_pp2_vpp2", "dp2_pp2_vpp2"),
    )
}
"""Hyper-connections, which no tested release of Megatron-Core has."""
EVERY_CASE = ALL_CASES | HYBRID_CASES | STREAMS_CASES
