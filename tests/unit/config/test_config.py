"""YAML becomes dataclasses and back, and the main job's config is checked."""

from __future__ import annotations

import dataclasses
import doctest
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

import megapack.config.load
from megapack.config import dump_yaml, find_config, load_config, parse_config
from megapack.errors import ConfigError
from megapack.job.config.sections import TrainConfig
from megapack.job.data.toy import write_toy
from megapack.layout import Layout
from megapack.policy import Policy
from tests.toy_towers import write_image_model

pytestmark = pytest.mark.unit


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner:
    rate: float = 0.5
    count: int = 1
    kind: Literal["fast", "slow"] = "fast"
    limit: int | None = None
    betas: tuple[float, ...] = (0.9, 0.95)
    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ConfigError(f"inner.count is {self.count}; set 0 or more")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer:
    name: str
    on: bool = False
    inner: Inner = Inner()


def parse(text: str, *overrides: str) -> Outer:
    return parse_config(text, overrides, Outer, source="c.yaml")


def test_doctests_of_load() -> None:
    result = doctest.testmod(megapack.config.load)
    assert result.attempted > 0
    assert result.failed == 0


def test_every_type_of_value_is_read() -> None:
    config = parse(
        "name: run\non: true\ninner:\n  rate: 1\n  kind: slow\n  limit: 3\n"
        "  betas: [0, 1e-5]\n  sizes: [1_000, 0x10]\n"
    )
    inner = Inner(rate=1.0, kind="slow", limit=3, betas=(0.0, 1e-5), sizes=(1000, 16))
    assert config == Outer(name="run", on=True, inner=inner)
    assert type(config.inner.rate) is float


@pytest.mark.parametrize(
    ("scalar", "value"),
    [("1e-5", 1e-5), ("1.", 1.0), (".5", 0.5), ("-2E+3", -2000.0), ("7", 7.0), ("1.5e3", 1500.0)],
)
def test_numbers_follow_yaml_1_2(scalar: str, value: float) -> None:
    assert parse(f"name: x\ninner: {{rate: {scalar}}}").inner.rate == value


@pytest.mark.parametrize("scalar", ["yes", "on", "2024-01-01", "010", "1:30", "<<", "1e", "=", "-"])
def test_words_that_yaml_1_1_converts_stay_strings(scalar: str) -> None:
    assert parse(f"name: {scalar}" if scalar != "-" else 'name: "-"').name == scalar


def test_overrides_replace_values_and_are_typed() -> None:
    config = parse("name: x\ninner: {count: 1}", "inner.count=2", "inner.count=3", "inner.limit=~")
    assert config.inner == Inner(count=3, limit=None)
    assert parse("name: x", "inner={rate: 2}", "name=a=b").inner.rate == 2.0
    assert parse("name: x", "name=a=b").name == "a=b"
    assert parse("", "name=x").name == "x"


BAD: list[Any] = [
    ("name: x\ninner:\n  rat: 1", [], "c.yaml:3: unknown key inner.rat; did you mean inner.rate?"),
    ("name: x\ncount: 1", [], "c.yaml:2: unknown key count; did you mean inner.count?"),
    ("name: x\nzzz: 1", [], "c.yaml:2: unknown key zzz; valid keys are name, on, inner"),
    ("name: x\nname: y", [], "c.yaml:2: key name appears twice; keep one of them"),
    ("name: x\ninner: {count: 1.0}", [], "c.yaml:2: inner.count is 1.0, expected an integer"),
    ("name: x\ninner: {count: true}", [], "inner.count is true, expected an integer"),
    ("name: x\ninner: {rate: '1'}", [], "inner.rate is '1', expected a number"),
    ("name: x\ninner: {rate: .nan}", [], "inner.rate is nan, expected a finite number"),
    (f"name: x\ninner: {{rate: 1{'0' * 400}}}", [], "c.yaml:2: a whole number of 2^63"),
    ("name: x\ninner: {rate: null}", [], "inner.rate is null, expected a number"),
    ("name: x\ninner: {kind: slwo}", [], "expected fast or slow; did you mean slow?"),
    ("name: x\ninner: {limit: a}", [], "inner.limit is 'a', expected an integer or null"),
    ("name: x\ninner: {sizes: [1, b]}", [], "inner.sizes[1] is 'b', expected an integer"),
    ("name: x\ninner:", [], "inner is a section, got null; set keys of it (rate, count"),
    ("name: 5", [], "name is 5, expected a string"),
    ("on: true", [], "name has no default; set it"),
    ("- a", [], "c.yaml:1: a config is `key: value` lines, got a list of 1"),
    ("name: x\ninner: {count: -1}", [], "c.yaml: inner.count is -1; set 0 or more"),
    ("name: !!python/object/apply:os.system [ls]", [], "c.yaml:1: tags are refused"),
    ("name: &a x\ninner: *a", [], "c.yaml:2: aliases (*name) are refused"),
    ("name: **", [], "but found '*'; quote a text that begins with *"),
    ("name: x\n1: y", [], "c.yaml:2: keys are words, got '1'"),
    ("name: x\n? 'a\n\n  b'\n: y", [], "c.yaml:2: keys are words"),
    ("name: x\n" + "k" * 999 + ": y", [], "unknown key kkk"),
    ("name: x", ["na\nme=1"], "is not of the form section.key=value"),
    ("name: [x", [], "c.yaml:1: expected ',' or ']'"),
    (
        "name: x\n---\nname: y",
        [],
        "c.yaml:2: expected a single document in the stream but",
    ),
    ("name: \x07", [], "c.yaml: not plain YAML"),
    ("name: " + "[" * 5000, [], "c.yaml:1: nested deeper than 16"),
    (f"name: x\ninner: {{count: {2**63}}}", [], "a whole number of 2^63 or more; write a smaller"),
    ("name: x", ["inner.rate"], "override 'inner.rate' is not of the form section.key=value"),
    ("name: x", ["name.a=1"], "override 'name.a=1': name is 'x', not a section"),
    ("name: x", ["inner.cuont=1"], "unknown key inner.cuont; did you mean inner.count?"),
    ("name: x", ["inner.count=b"], "override 'inner.count=b': inner.count is 'b'"),
    ("name: x", ["inner.count=*b"], "override 'inner.count=*b': aliases (*name) are refused"),
]


@pytest.mark.parametrize(("text", "overrides", "message"), BAD, ids=range(len(BAD)))
def test_errors_are_one_line_with_the_position(
    text: str, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, *overrides)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_unreadable_files_are_config_errors(tmp_path: Path) -> None:
    latin = tmp_path / "latin.yaml"
    long = tmp_path / "long.yaml"
    latin.write_bytes("name: é".encode("latin-1"))
    long.write_bytes(b"#" * (1 << 21))
    for path, message in [
        (tmp_path / "absent.yaml", "cannot be read"),
        (tmp_path, "cannot be read"),
        (Path("a\0b"), "cannot be read"),
        (latin, "not UTF-8"),
        (long, "longer than"),
    ]:
        with pytest.raises(ConfigError, match=message):
            load_config(path, [], Outer)


texts = st.text(max_size=20)
whole = st.integers(1 - 2**63, 2**63 - 1)
floats = st.floats(allow_nan=False, allow_infinity=False)


@pytest.mark.property
@given(
    name=texts,
    rate=floats,
    limit=st.none() | whole,
    sizes=st.lists(whole).map(tuple),
)
def test_dump_is_the_inverse_of_parse(
    name: str, rate: float, limit: int | None, sizes: Any
) -> None:
    config = Outer(name=name, inner=Inner(rate=rate, limit=limit, sizes=sizes))
    assert parse_config(dump_yaml(config), [], Outer) == config


def outcome(text: str) -> str:
    try:
        return parse(text, text).name.replace("\n", " ")
    except ConfigError as error:
        return str(error)


@pytest.mark.property
@given(st.text(max_size=60))
def test_any_text_is_a_config_or_a_config_error(text: str) -> None:
    assert "\n" not in outcome(text)


def test_find_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repo_root: Path) -> None:
    shipped = sorted((repo_root / "configs").glob("*.yaml"))
    assert shipped
    monkeypatch.chdir(tmp_path)
    assert find_config(f"configs/{shipped[0].name}").samefile(shipped[0])
    assert find_config(shipped[0].name).samefile(shipped[0])
    assert find_config(shipped[0].stem).samefile(shipped[0])
    with pytest.raises(ConfigError, match=r"no such file, .*; `megapack train --list`"):
        find_config("absent.yaml")
    with pytest.raises(ConfigError, match=f"did you mean {shipped[0].stem}"):
        find_config(f"elsewhere/{shipped[0].name}")


def job(*overrides: str) -> TrainConfig:
    return parse_config("{name: x, plan: {max_tokens_per_gpu: 99}}", overrides, TrainConfig)


def test_defaults_are_valid_and_round_trip() -> None:
    config = job()
    assert parse_config(dump_yaml(config), [], TrainConfig) == config


def test_every_shipped_config_loads(
    repo_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    write_toy("toy")
    write_image_model("toy_images")
    paths = sorted((repo_root / "configs").glob("*.yaml"))
    assert paths
    for path in paths:
        load_config(path, [], TrainConfig)


def test_every_policy_field_is_a_key_of_the_plan_section() -> None:
    policy = Policy(
        count_rule="multiple",
        unreachable="drop",
        oversize="error",
        row_shape="uniform",
        step_split="balanced",
        search=7,
        max_live_tokens_per_gpu=65536,
        share_prefixes="off",
    )
    keys = policy.to_payload()
    kept = {name for name in keys if keys[name] == getattr(Policy(), name)}
    assert kept == {"group_size", "balance"}
    plan = job(*(f"plan.{name}={value}" for name, value in keys.items())).plan
    assert plan.to_policy() == policy
    assert dataclasses.replace(plan, search=8).to_policy() == dataclasses.replace(policy, search=8)


def test_to_layout_computes_dp() -> None:
    config = job("layout.tp=2", "layout.pp=2", "layout.vpp=2", "layout.sequence_parallel=true")
    layout = config.layout.to_layout(8)
    assert (layout.dp, layout.tp, layout.pp, layout.vpp) == (2, 2, 2, 2)
    assert layout.sequence_parallel
    for world in (3, 6, 9):
        with pytest.raises(ConfigError, match=f"the job has {world}"):
            config.layout.to_layout(world)


@pytest.mark.parametrize(
    ("recipe", "rows"),
    [
        ("null", False),
        ("delayed", True),
        ("tensorwise", True),
        ("blockwise", "blockwise"),
        ("mxfp8", "mxfp8"),
        ("nvfp4", "nvfp4"),
    ],
)
def test_rows_are_aligned_for_the_fp8_recipe(recipe: str, rows: object) -> None:
    config = job(f"model.fp8={recipe}", "model.dtype=bf16")
    assert config.layout.to_layout(1, config.model.fp8_rows) == Layout(fp8=rows)  # type: ignore[arg-type]


UNEVEN = ("layout.pp=2", "layout.vpp=2", "layout.pipeline_model_parallel_layout=Et*2|t|t|L")


def test_uneven_stages_weigh_as_their_layers(tmp_path: Path) -> None:
    layout = Layout(pp=2, vpp=2)
    config = job(*UNEVEN)
    split = config.stage_layers
    assert split.num_layers == (2, 1, 1, 0)
    assert config.layout.to_layout(2) == layout
    weights = config.cost_model(layout).stage_weights
    assert weights is not None
    assert weights[0] / weights[1] == pytest.approx(2, rel=0.01)
    assert config.memory_model().stage_layers == split
    # A file without weights gets those of the split; one with weights keeps its own.
    bare = tmp_path / "bare.yaml"
    bare.write_text("cost: {per_token: 2.0e-6}\n")
    measured = job(*UNEVEN, f"plan.cost_model={bare}").cost_model(layout)
    assert measured.per_token == 2e-6
    assert measured.stage_weights == weights
    own = tmp_path / "own.yaml"
    own.write_text("cost: {per_token: 2.0e-6, stage_weights: [1.0, 0.5, 1.5, 1.0]}\n")
    for keys in (UNEVEN, UNEVEN[:2]):
        found = job(*keys, f"plan.cost_model={own}").cost_model(layout)
        assert found.stage_weights == (1.0, 0.5, 1.5, 1.0)
    even = job(*UNEVEN[:2], f"plan.cost_model={bare}").cost_model(layout)
    assert even.stage_weights is None


EXPERTS = ("model.num_experts=4",)
REPLAY = (*EXPERTS, "train.routing_replay=old_logprobs")
DYNAMIC = ("plan.context_parallel=dynamic",)
REWARD = ["objective.kind=reward", "objective.loss_weighting=seq-mean-token-mean"]
LAST_WITHOUT_LAYER = ["layout.pp=2", "layout.pipeline_model_parallel_layout=Et*4|mL"]
BAD_JOBS: list[tuple[list[str], str]] = [
    (["name=a/b"], "name is 'a/b'"),
    (["seed=-1"], "seed is -1; set 0 or more"),
    (["layout.pp=0"], "layout.pp is 0; set 1 or more"),
    (
        ["layout.pp=3"],
        "num_layers=4 does not divide over pp * vpp = 3 chunks; set "
        "pipeline_model_parallel_layout='Et|t*2|tL'",
    ),
    (["layout.pp=2", "layout.pipeline_model_parallel_layout=Et*3|t"], "has 0 L, the model 1 L"),
    (["layout.tp=3"], "model.num_attention_heads=4 does not divide over layout.tp=3"),
    (["model.num_experts=2", "model.moe_top_k=3"], "moe_top_k=3 is above model.num_experts=2"),
    (["model.mtp_num_layers=1", "model.recompute=full"], "recompute=full, but with selective"),
    (["model.num_experts=3", "layout.ep=2"], "num_experts=3 does not divide over layout.ep=2"),
    (["layout.tp=2", "layout.etp=2"], "but model.num_experts is null; set layout.etp=1"),
    (["train.on_oom=replan"], "unknown key train.on_oom; "),
    (["model.num_experts=4", "layout.tp=2"], "needs layout.sequence_parallel=true"),
    (["layout.sequence_parallel=true"], "layout.sequence_parallel needs layout.tp > 1"),
    (["layout.sequence_paralel=true"], "did you mean layout.sequence_parallel?"),
    (["plan={}"], "neither of plan.max_tokens_per_gpu and plan.micro_batch_size set; set one"),
    (["plan.micro_batch_size=2"], "both of plan.max_tokens_per_gpu"),
    (["plan.global_batch_size=2", "plan.num_steps=2"], "unset one"),
    (["max_tokens_per_gpu=9"], "did you mean plan.max_tokens_per_gpu?"),
    (["model.hidden_size=66"], "set a multiple of 8"),
    (["model.kv_channels=15"], "model.kv_channels=15 is odd; rotary embeddings"),
    (["model.fp8=mxfp8"], "model.fp8=mxfp8 does not run with dtype=fp32"),
    (["model.dtype=fp16"], "expected fp32 or bf16"),
    (["data.path=''"], "data.path is empty"),
    (["data.max_length=5000"], "above model.max_position_embeddings=4096"),
    (["objective.loss_weighting=token_mean"], "did you mean token-mean?"),
    (["objective.loss_weighting=seq-mean-token-sum-norm"], "set objective.norm_constant"),
    (["objective.kind=ppo", "objective.kl_coef=0.1"], "has no effect under kind=ppo"),
    (["objective.kind=dpo"], "loss_weighting=token-mean would weight pairs by their tokens"),
    (["objective.dpo_beta=0"], "objective.dpo_beta=0.0 and objective.dpo_label_smoothing=0.0; set"),
    ([*REWARD, "model.mtp_num_layers=1"], "set model.mtp_num_layers=0"),
    (["objective.correction_high=3"], "has no effect without objective.correction"),
    (["objective.correction=mask", "objective.correction_low=2"], "set 0 <= low < high"),
    (
        ["objective.correction=truncate", "objective.correction_weight_level=token"],
        "has no effect under correction=truncate",
    ),
    (
        ["objective.overlong_buffer_tokens=9", "objective.max_response_tokens=8"],
        "overlong_buffer_tokens=9 with objective.max_response_tokens=8; set",
    ),
    (["objective.overlong_penalty=0.5"], "has no effect without objective.overlong_buffer_tokens"),
    (
        [
            *("objective.overlong_buffer_tokens=8", "objective.max_response_tokens=8"),
            "data.overlong=truncate",
        ],
        "would read the lengths after truncation; set data.overlong=skip",
    ),
    (
        ["data.drop_equal_rewards=true", "objective.advantage_norm=none"],
        "drop_equal_rewards=true with objective.advantage_norm=none would leave out",
    ),
    (["objective.kind=sft", "data.drop_equal_rewards=true"], "has no effect under objective.kind"),
    (["objective.dual_clip=1"], "objective.dual_clip is 1.0"),
    (["objective.gamma=1.5"], "objective.gamma is 1.5; set it in [0, 1]"),
    (["objective.kl_in_reward_coef=0.1"], "has no effect without a critic"),
    (["critic.enabled=true", "objective.kind=gspo"], "which objective.kind=gspo does not use"),
    (["critic.enabled=true", "objective.advantage_norm=group-std"], "has no effect with a critic"),
    (
        ["critic.enabled=true", "model.mtp_num_layers=1", *LAST_WITHOUT_LAYER],
        "no transformer layer in the last of the layout's chunks",
    ),
    (["critic.clip=0"], "critic.clip is 0.0; set a number above 0, or null"),
    (["train.routing_replay=rollout"], "the model has no experts; set model.num_experts, or"),
    ([*EXPERTS, "train.routing_replay=rollout"], "generated rollouts have no routed_experts"),
    ([*REPLAY, "objective.kind=sft"], "objective.kind=sft has no pass for old log-probs"),
    ([*REPLAY, "plan.forward_max_tokens_per_gpu=99"], "set plan.forward_max_tokens_per_gpu=null"),
    (["plan.group_size=search"], "expected fixed"),
    (["plan.balance=tokens"], "expected time"),
    (["optim.adam_beta2=1"], "must be below 1"),
    (["optim.min_lr=1"], "optim.min_lr=1.0 is above optim.lr"),
    (["optim.name=muon", "optim.muon_momentum=1"], "optim.muon_momentum=1.0 must be below 1"),
    (
        ["optim.name=muon", "optim.distributed_optimizer=true"],
        "optim.distributed_optimizer=true splits them; set it to false",
    ),
    (["train.export_hf=last"], "needs a model of a Hugging Face folder; set model.hf_path"),
    (["model.recompute_modules=[mlp, mlp]"], "name one or more, each once"),
    (["model.recompute_modules=[moe]"], "has moe, but the model has no experts"),
    (
        ["model.fp8=delayed", "model.dtype=bf16", "model.recompute_modules=[layernorm]"],
        "does not run with model.fp8=delayed",
    ),
    (["optim.muon_nesterov=true"], "optim.muon_nesterov=True has no effect with optim.name=adam"),
]


@pytest.mark.parametrize(
    ("overrides", "share"),
    [
        ([], "auto"),
        (["layout.cp=2"], "auto"),
        (["model.attention=te"], "auto"),
        (["model.attention=te", "layout.cp=2"], "off"),
        (["model.fp8=delayed", "model.dtype=bf16", "layout.cp=2"], "off"),
        ([*DYNAMIC, "model.attention=te"], "off"),
        ([*DYNAMIC, "model.attention=te", "layout.dp=1"], "auto"),
        (["device=cuda", "model.dtype=bf16", "layout.cp=2"], "off"),
        (["device=cuda", "model.dtype=bf16", "layout.cp=2", "model.attention=varlen"], "auto"),
    ],
)
def test_rows_share_prefixes_where_the_attention_can(overrides: list[str], share: str) -> None:
    assert job(*overrides).row_plan.share_prefixes == share


@pytest.mark.parametrize(("overrides", "message"), BAD_JOBS, ids=lambda value: str(value)[:40])
def test_invalid_jobs_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        job(*overrides)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
