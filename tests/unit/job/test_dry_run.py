"""`train --dry-run`: shipped configs plan and fit, and it makes the checks of a real start."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megapack import Layout, Policy, build_dp_schedule, cli
from megapack.config import load_config
from megapack.cost.memory import GIB
from megapack.job.config.sections import TrainConfig
from megapack.job.data.toy import write_toy
from megapack.job.data.toy_images import write_images
from tests.toy_towers import write_image_model

pytestmark = pytest.mark.unit

CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("*.yaml"))
TINY = "gpt_tiny_dp2_pp2_vpp2_cpu.yaml"
# It has its sizes in the config; the next two read them from a folder.
SIZES = "llama3_70b_dp2_tp8_pp4_vpp5_gpu64.yaml"
DENSE = "qwen3_4b_dp4_tp2_gpu8.yaml"
EXPERTS = "qwen3_30b_a3b_dp32_pp2_vpp4_ep8_gpu64.yaml"

ADV = ("objective.advantage_norm=group", "objective.kl_coef=0")

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shipped configs need no download: config.json of their models is shipped too."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """A dry run: exit code, stdout, stderr."""

    def run(config: str | Path, world: int, *args: str) -> tuple[int, str, str]:
        argv = ["train", str(config), *args, "--dry-run", f"world={world}"]
        return cli.main(argv), *capsys.readouterr()

    return run


def output_of(done: tuple[int, str, str]) -> dict[str, Any]:
    code, out, err = done
    assert (code, err) == (0, "")
    return json.loads(out)  # type: ignore[no-any-return]


def sizes_in(name: str) -> dict[str, int]:
    return {what: int(size) for what, size in re.findall(r"_([a-z]+)(\d+)(?=_|$)", name)}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configs_match_their_names_and_fit(path: Path, call: Call) -> None:
    if "images" in path.stem:
        pytest.importorskip("transformers")
        write_image_model("toy_images")
        write_images("toy_images")
    elif "toy" in path.stem:
        write_toy("toy")
    config = load_config(path, [], TrainConfig)
    named = sizes_in(path.stem)
    product = math.prod(named.get(name, 1) for name in ("dp", "tp", "pp", "cp"))
    gpus = named.pop("gpu", product)
    assert config.name == path.stem
    found = output_of(call(path, gpus, "--json"))
    assert found["num_gpus"] == gpus
    degrees = {k: v for k, v in found["layout"].items() if k in ("dp", "tp", "pp", "vpp", "cp")}
    assert {k: v for k, v in degrees.items() if v > 1} == {
        k: v for k, v in named.items() if k != "ep"
    }
    assert found["layout"]["ep"] == named.get("ep", 1)
    assert found["fits"]
    assert len(found["memory_bytes"]) == config.layout.pp
    assert found["steps"]["num_padding_rows"] == 0
    # Experts launch many kernels for each micro-batch, so fewer of them are planned.
    assert found["steps"]["bubble_fraction"] < 0.16
    assert found["tokens_per_gpu_second"] > 0


@pytest.mark.parametrize(
    ("config", "world", "overrides", "words"),
    [
        (DENSE, 12, [], ["4 * 2 * 1 * 1 = 8 ranks", "the job has 12"]),
        (DENSE, 8, ["train.trackers=[wandb]"], ["wandb", "not installed"]),
        (SIZES, 64, ["model.num_query_groups=4"], ["model.num_query_groups=4", "tp=8"]),
        (DENSE, 8, ["model.num_query_groups=1"], ["num_query_groups is 1", "Qwen3-4B", "gives 8"]),
        (DENSE, 8, ["plan.cost_model=none.yaml"], ["none.yaml", "cannot be read"]),
        (
            DENSE,
            8,
            ["plan.oversize=error", "plan.max_tokens_per_gpu=99"],
            ["budget of 98"],
        ),
        (
            SIZES,
            64,
            ["model.fp8=mxfp8", "model.ffn_hidden_size=28688"],
            ["fp8=mxfp8", "28688", "256"],
        ),
        (EXPERTS, 2, ["layout.dp=1", "layout.ep=2"], ["ep=2"]),
        (EXPERTS, 8, ["layout.dp=2", "layout.tp=2", "layout.sequence_parallel=true"], ["ep=8"]),
        (
            TINY,
            4,
            [
                *("layout.dp=1", "layout.tp=2", "layout.vpp=1", "layout.etp=2"),
                *("layout.sequence_parallel=true", "model.num_experts=4"),
                "model.moe_ffn_hidden_size=771",
            ],
            ["771", "does not divide over layout.etp=2"],
        ),
        (
            EXPERTS,
            4,
            [
                *("layout.dp=1", "layout.tp=2", "layout.ep=1", "layout.etp=3"),
                "layout.sequence_parallel=true",
            ],
            ["layout.etp=3 does not divide layout.tp=2"],
        ),
        (
            EXPERTS,
            64,
            ["layout.ep=1", "plan.split_samples=auto", "model.fp8=delayed"],
            ["largest"],
        ),
        (TINY, 4, ["data.path=none.jsonl"], ["none.jsonl", "cannot be read"]),
    ],
)
def test_a_dry_run_makes_the_checks_of_the_start(
    config: str, world: int, overrides: list[str], words: list[str], call: Call
) -> None:
    code, out, err = call(config, world, *overrides)
    (line,) = err.splitlines()
    assert (code, out) == (2, "")
    assert line.startswith("megapack: ")
    assert all(word in line for word in words), line


@pytest.mark.parametrize("text", ["0", "world=0", "world=x", "ranks=8"])
def test_a_bad_world_size_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["train", TINY, "--dry-run", text])
    assert exit_.value.code == 2
    assert "set world=N" in capsys.readouterr().err


def test_json_needs_a_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", TINY, "--json"]) == 2
    assert "set --dry-run world=N" in capsys.readouterr().err


def test_a_run_that_does_not_fit_is_exit_code_1(call: Call) -> None:
    code, out, _ = call(DENSE, 8, "--gpu-memory-gib", "40")
    assert code == 1
    assert re.search(r"does not fit: stage 0 takes [\d.]+ of 40 GiB; set more layout.tp", out)
    code, out, _ = call(DENSE, 8, "--gpu-memory-gib", "40", "model.recompute=full")
    assert code == 0
    assert "fits: stage 0" in out


def test_the_first_batch_of_the_data_is_planned(call: Call, tmp_path: Path) -> None:
    rng = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26]
    rows = [
        {"prompt_ids": [1] * 5, "response_ids": [2] * n, "group": k // 2, "reward": float(k % 2)}
        for k, n in enumerate(rng)
    ]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    overrides = [f"data.path={path}", "data.prompts_per_batch=4", "plan.max_tokens_per_gpu=128"]
    overrides.append("plan.share_prefixes=off")
    found = output_of(call(TINY, 4, *overrides, "--json"))
    layout = Layout(dp=2, pp=2, vpp=2)
    plan = build_dp_schedule(
        [5 + n for n in rng[:8]],
        layout=layout,
        max_tokens_per_gpu=128,
        global_batch_size=64,
        rollout_ids=range(8),
        policy=Policy(share_prefixes="off"),
        cost=load_config(CONFIGS[0].parent / TINY, [], TrainConfig).cost_model(layout),
    )
    assert found["plan_digest"] == plan.digest()
    assert f"12 samples in {path}" in found["lengths"]
    bare = [{k: v for k, v in row.items() if k != "reward"} for row in rows]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in bare))
    code, _, err = call(TINY, 4, *overrides)
    assert code == 2
    assert "reward" in err


def test_passes_recomputation_and_cost_models_change_seconds(call: Call, tmp_path: Path) -> None:
    base = output_of(call(DENSE, 8, "--json"))
    assert base["num_logprob_passes"] == 1
    assert base["seconds"] == base["steps"]["seconds"] + base["logprob_pass"]["seconds"]
    kl = output_of(call(DENSE, 8, "objective.kl_coef=0.1", "--json"))
    assert kl["num_logprob_passes"] == 2
    sft = output_of(call(DENSE, 8, "objective.kind=sft", "--json"))
    assert (sft["num_logprob_passes"], sft["logprob_pass"]) == (0, None)
    pairs = ["objective.loss_weighting=seq-mean-token-mean"]
    dpo = output_of(call(DENSE, 8, *pairs, "objective.kind=dpo", "--json"))
    # One pass, with the reference; each generated rollout is a pair of two samples.
    assert (dpo["num_logprob_passes"], dpo["num_samples"]) == (1, 2 * base["num_samples"])
    assert dpo["logprob_pass"]["num_samples"] == dpo["num_samples"]
    reward = output_of(call(DENSE, 8, *pairs, "objective.kind=reward", "--json"))
    assert (reward["num_logprob_passes"], reward["logprob_pass"]) == (0, None)
    # No vocabulary is projected to: less time, and less memory on the last stage.
    assert reward["steps"]["seconds"] < dpo["steps"]["seconds"]
    assert reward["memory_bytes"][-1]["head"] == 0 < dpo["memory_bytes"][-1]["head"]
    full = output_of(call(DENSE, 8, "model.recompute=full", "--json"))
    # Recomputation adds a forward to the work of three, and half as much traffic again. The head,
    # a tenth of the work here, is not recomputed.
    assert 1.3 <= full["steps"]["seconds"] / base["steps"]["seconds"] <= 3 / 2
    cost = tmp_path / "cost.yaml"
    cost.write_text("cost: {per_token: 1.0e-6}\n")
    measured = output_of(call(DENSE, 8, f"plan.cost_model={cost}", "--json"))
    assert measured["time_basis"] == f"of the cost model {cost}"


def test_uneven_stages_are_planned_and_printed(call: Call) -> None:
    keys = ["layout.pipeline_model_parallel_layout=Et*2|t|t|L"]
    even = output_of(call(TINY, 4, "--json"))
    uneven = output_of(call(TINY, 4, *keys, "--json"))
    assert (even["stage_layers"], uneven["stage_layers"]) == ([1, 1, 1, 1], [2, 1, 1, 0])
    assert even["layout"] == uneven["layout"]
    assert uneven["plan_digest"] != even["plan_digest"]
    first, last = uneven["memory_bytes"]
    assert first["parameters"] > even["memory_bytes"][0]["parameters"]
    assert last["parameters"] < even["memory_bytes"][1]["parameters"]
    _, out, _ = call(TINY, 4, *keys)
    assert "layers of the 4 chunks: Et*2|t|t|L" in out
    code, _, err = call(TINY, 4, "model.num_layers=37")
    assert code == 2
    (advice,) = re.findall(r"set (pipeline_model_parallel_layout='.*')", err)
    assert call(TINY, 4, "model.num_layers=37", "layout." + advice)[0] == 0


def test_memory_counts_a_sample_over_the_budget(call: Call) -> None:
    at = {
        n: output_of(call(DENSE, 8, f"plan.max_tokens_per_gpu={n}", "--json")) for n in (99, 24576)
    }
    longest = max(stage["activations"] for stage in at[99]["memory_bytes"]) / GIB
    most = max(stage["activations"] for stage in at[24576]["memory_bytes"]) / GIB
    assert most / 2 < longest < most


def test_a_critics_steps_and_memory_are_counted(call: Call, tmp_path: Path) -> None:
    policy = output_of(call(DENSE, 8, "--json"))
    with_critic = ["critic.enabled=true", "objective.kind=ppo", *ADV, "--gpu-memory-gib", "141"]
    critic = output_of(call(DENSE, 8, *with_critic, "--json"))
    assert policy["critic_steps"] is policy["value_pass"] is None
    parts = ("steps", "logprob_pass", "critic_steps", "value_pass")
    assert critic["seconds"] == pytest.approx(sum(critic[part]["seconds"] for part in parts))
    # The value head takes no time; the vocabulary head a tenth of a step here.
    assert 0.8 < critic["critic_steps"]["seconds"] / critic["steps"]["seconds"] < 0.99
    assert 0.8 < critic["value_pass"]["seconds"] / critic["logprob_pass"]["seconds"] < 1
    for one, other in zip(critic["memory_bytes"], policy["memory_bytes"], strict=True):
        state = one["parameters"] + one["gradients"] + one["optimizer"]
        # The policy's embedding is tied, so it has no output matrix that the critic lacks.
        assert one["critic"] == pytest.approx(state, rel=1e-3)
        assert one["total"] == other["total"] + one["critic"]
    assert "critic's steps" in call(DENSE, 8, *with_critic)[1]
    both = [*with_critic, "objective.kl_in_reward_coef=0.1"]
    assert output_of(call(DENSE, 8, *both, "--json"))["num_logprob_passes"] == 2
    cost = tmp_path / "cost.yaml"
    cost.write_text("cost: {per_token: 1.0e-6}\n")
    measured = output_of(call(DENSE, 8, *both, f"plan.cost_model={cost}", "--json"))
    assert measured["critic_steps"]["seconds"] == measured["steps"]["seconds"]


def test_a_critic_needs_rewards(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    rows = [{"prompt": "a", "response": "b", "advantage": 1.0}] * 4
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = ["critic.enabled=true", "objective.kind=ppo", *ADV, f"data.path={path}"]
    code, _, err = call(TINY, 4, *settings)
    assert code != 0
    assert "a critic's advantages need; give `reward`" in err


def test_images_are_counted(call: Call) -> None:
    pytest.importorskip("transformers")
    write_image_model("toy_images")
    write_images("toy_images")
    found = {
        vision: output_of(call("grpo_images_toy_cpu", 2, f"model.vision={vision}", "--json"))
        for vision in ("frozen", "train")
    }
    steps = found["train"]["steps"]
    assert 0 < steps["num_images"] < steps["num_image_uses"]
    assert steps["image_patches"] / 4 <= steps["most_patches"] < steps["image_patches"]
    frozen, trained = (found[name]["memory_bytes"][0]["tower"] for name in ("frozen", "train"))
    assert 0 < frozen < trained / 3
    # A frozen tower runs once for all passes; a trained one forward in each, and backward.
    passes = {name: one["logprob_pass"]["image_seconds"] for name, one in found.items()}
    assert steps["image_seconds"] > 2.9 * passes["train"]
    assert found["frozen"]["steps"]["image_seconds"] < 0.2 * passes["train"]
    # Old and reference log-probs are two passes, and their mean is given.
    assert found["frozen"]["num_logprob_passes"] == 2
    assert passes["frozen"] == pytest.approx(passes["train"] / 2, rel=0.1)
    critic = ["critic.enabled=true", "objective.kind=ppo", "objective.kl_coef=0"]
    frozen = output_of(call("grpo_images_toy_cpu", 2, *critic, "--json"))
    assert frozen["critic_steps"]["image_seconds"] < 0.2 * frozen["value_pass"]["image_seconds"]
    code, out, _ = call("grpo_images_toy_cpu", 2)
    assert code == 0
    assert f"{steps['image_patches']} patches" in out
