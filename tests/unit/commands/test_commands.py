"""Commands on files: their output, their exit codes, and one line for every kind of bad input."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from megapack import Layout, Plan, Policy, build_dp_schedule, check_plan
from megapack.config.shipped import shipped_models

pytestmark = pytest.mark.unit

LENGTHS = [5, 9, 3, 7, 2, 8, 4, 6]
LAYOUT = ("--dp", "2", "--pp", "2", "--vpp", "2")
BUDGET = ("--max-tokens-per-gpu", "16")
TINY = {
    **{"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 64, "vocab_size": 512},
    **{"intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4},
    **{"max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 1e4},
}
MODEL = ("--model", "./tiny.json")
SPEED = ("--peak-tflops", "1")
TUNE = ("tune", "a.csv", "--gpus", "4", *MODEL, *SPEED)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a file of lengths."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").write_text("length,id\n" + "".join(f"{n},{n % 3}\n" for n in LENGTHS))
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    return tmp_path


Call = Callable[..., tuple[int, str, str]]


def edit(path: str, change: Callable[[dict[str, Any]], object]) -> None:
    payload = json.loads(Path(path).read_text())
    change(payload)
    Path(path).write_text(json.dumps(payload))


def test_plan_writes_a_valid_plan_and_compares(call: Call) -> None:
    code, out, err = call("plan", "a.csv", *LAYOUT, *BUDGET, "--rollout-column", "id")
    assert (code, err) == (0, "")
    plan = Plan.from_json(Path("plan.json").read_text())
    check_plan(plan, LENGTHS)
    assert plan.layout == Layout(dp=2, pp=2, vpp=2)
    assert plan.rollout_ids == tuple(n % 3 for n in LENGTHS)
    assert "8 samples, 44 tokens (length), the longest 9, on 4 GPUs" in out
    assert [line.split("  ")[0] for line in out.splitlines()[2:6]] == [
        "megapack",
        "next-fit",
        "padded",
        "one sample",
    ]
    assert f"digest {plan.digest()[:12]}" in out
    assert list(Path().glob("*.part")) == []


def test_plan_compares_with_other_schedulers_and_says_their_best_budget(call: Call) -> None:
    Path("cost.yaml").write_text("cost:\n  per_token: 1.0\n  per_token_sq: 0.1\n")
    args = ("plan", "a.csv", "--dp", "2", "--pp", "4", "--max-tokens-per-gpu", "22")
    args += ("--cost", "cost.yaml", "--compare", "nemo_rl,slime,verl")
    code, out, err = call(*args)
    assert (code, err) == (0, "")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[6:-2] == [
        "NeMo-RL 1 2 4 50.0% 0.0% 1.133 268.3% 113.2 0 4.171 2.05",
        "slime --balance-data 1 2 4 50.0% 0.0% 1.119 221.0% 97.5 0 3.591 1.76",
        "slime --balance-by-flops 1 1 2 100.0% 0.0% 1.011 300.0% 109.8 0 4.044 1.98",
        "verl 1 1 2 100.0% 0.0% 1.022 300.0% 111 0 4.088 2.01",
        "NeMo-RL at train_mb_tokens/cp 9: 1.12",
        "slime --balance-data at --max-tokens-per-gpu 9: 1.11",
        "slime --balance-by-flops at --max-tokens-per-gpu 9: 1.11",
        "verl at ppo_max_token_len_per_gpu 9: 1.07",
    ]
    printed = json.loads(call(*args, "--json")[1])
    assert list(printed["strategies"])[4:] == list(printed["best_budgets"])
    assert printed["best_budgets"]["verl"]["setting"] == "ppo_max_token_len_per_gpu 9"
    assert printed["strategies"]["verl"]["seconds"] == 111


def test_plan_prints_json(call: Call) -> None:
    args = ("plan", "a.csv", *BUDGET, *MODEL, *SPEED, "-o", "b.json", "--json")
    code, out, _ = call(*args)
    printed = json.loads(out)
    assert (code, printed["plan"], printed["time_unit"]) == (0, "b.json", "seconds")
    # Token times are not called seconds.
    counted = json.loads(call("plan", "a.csv", *BUDGET, "-o", "b.json", "--json")[1])
    assert counted["strategies"]["megapack"]["token_times"] > 0
    assert not any("seconds" in key for key in counted["strategies"]["megapack"])
    ours = printed["strategies"]["megapack"]
    assert ours["tokens"] == sum(LENGTHS)
    assert ours["seconds"] >= ours["equal_work_seconds"] > 0
    assert printed["digest"] == Plan.from_json(Path("b.json").read_text()).digest()


def test_every_argument_of_the_planner_is_an_option(call: Call) -> None:
    out = "".join(call("plan", flag)[1] for flag in ("--help", "--help-policy", "--help-model"))
    names = [field.name for cls in (Layout, Policy) for field in fields(cls)]
    names += list(signature(build_dp_schedule).parameters)
    # The columns of LENGTHS have these.
    elsewhere = {"lengths", "layout", "policy", "prefixes"}
    elsewhere |= {"rollout_ids", "colocate_ids", "adapter_ids"}
    assert [n for n in names if n not in elsewhere and flag_of(n) not in out] == []


def test_rows_of_one_adapter_from_a_column(call: Call) -> None:
    rows = [f"{length},{('math', 'code')[k % 2]}" for k, length in enumerate(LENGTHS)]
    Path("c.csv").write_text("\n".join(["length,adapter", *rows]) + "\n")
    options = (*BUDGET, "--adapter-column", "adapter", "--adapters", "one")
    assert call("plan", "c.csv", *options, "-o", "c.json")[0] == 0
    plan = Plan.from_json(Path("c.json").read_text())
    assert plan.adapter_ids is not None
    found = [{plan.adapter_ids[i] for i in mb.samples} for mb in plan.steps[0].microbatches]
    assert set(map(len, found)) <= {0, 1}
    assert len({name for names in found for name in names}) == 2


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def test_an_older_plan_is_kept_unless_its_name_is_given(call: Call) -> None:
    digests = []
    for budget in ("16", "32", "32", "64"):
        code, out, err = call("plan", "a.csv", "--max-tokens-per-gpu", budget)
        digests.append(out.split()[-1])
        kept = {"32": "plan.1.json", "64": "plan.2.json"}.get(budget)
        is_new = digests[-1] not in digests[:-1] and kept is not None
        assert (code, err) == (0, f"plan.json was there: it is {kept} now\n" if is_new else "")
    names = ("plan.1.json", "plan.2.json", "plan.json")
    for name, digest in zip(names, (digests[0], digests[1], digests[3]), strict=True):
        assert Plan.from_json(Path(name).read_text()).digest().startswith(digest)
    # With -o the file is written over.
    assert call("plan", "a.csv", *BUDGET, "-o", "plan.json")[2] == ""
    assert sorted(path.name for path in Path().glob("plan*")) == list(names)


@pytest.mark.parametrize("given", ["folder/config.json", "Qwen3-4B"])
def test_a_model_is_a_folder_a_file_or_a_known_name(given: str, call: Call) -> None:
    Path("folder").mkdir()
    shipped = shipped_models()["Qwen3-4B"] / "config.json"
    Path("folder/config.json").write_text(shipped.read_text())
    Path("q.yaml").write_text(
        "name: q\nplan: {max_tokens_per_gpu: 16}\nmodel: {dtype: bf16, hf_path: folder}\n"
        "optim: {distributed_optimizer: true}\nlayout: {dp: 4}\n"
    )
    found = [
        json.loads(call("plan", "a.csv", *BUDGET, *args, "--json")[1])
        for args in (("--model", given), ("--config", "q.yaml"))
    ]
    assert found[0] == found[1]
    assert found[0]["time_unit"] == "seconds"
    tuned = [
        json.loads(
            call("tune", "a.csv", "--gpus", "2", "--pp", "2", "--vpp", "1", *args, "--json")[1]
        )
        for args in (("--model", given), ("--config", "q.yaml"))
    ]
    assert tuned[0] == tuned[1]


def test_check_refuses_an_edited_plan(call: Call) -> None:
    call("plan", "a.csv", *LAYOUT, *BUDGET)
    assert call("check", "plan.json", "a.csv")[0] == 0
    edit("plan.json", lambda plan: plan["steps"][0]["ranks"][0].pop())
    code, out, err = call("check", "plan.json", "a.csv")
    assert (code, err) == (1, "")
    assert out.startswith("plan.json: invariant 1 is broken: step 0 ")
    code, out, _ = call("check", "plan.json", "a.csv", "--json")
    assert (code, json.loads(out)["sound"]) == (1, False)


def test_plan_explains_each_freedom(call: Call) -> None:
    Path("long.csv").write_text("length\n" + "16\n" + "1\n" * 64)
    args = ("plan", "long.csv", "--dp", "2", "--pp", "2", *BUDGET, "--explain", "-o", "x.json")
    out = call(*args)[1]
    freedoms = json.loads(call(*args, "--json")[1])["freedoms"]
    for freedom in freedoms:
        flag = f"{flag_of(freedom['setting'])}={freedom['on']}"
        assert out.count(flag) == 1
    best = max(freedoms, key=lambda freedom: freedom["gain"] or 0)
    assert f"{flag_of(best['setting'])}={best['on']} would save {best['gain']:.1%} of the" in out
    assert "freedoms" not in json.loads(call("plan", "a.csv", *LAYOUT, *BUDGET, "--json")[1])


def test_show_prints_a_grid_that_marks_rows_over_the_budget(call: Call) -> None:
    assert call("plan", "a.csv", "--dp", "2", "--max-tokens-per-gpu", "8")[0] == 0
    grid = call("show", "plan.json")[1].splitlines()
    assert grid[1].startswith("step 0: M=")
    assert grid[2].split() == ["rank", "0", "rank", "1"]
    cells = [cell for line in grid[3:] for cell in line.split()[1:]]
    assert [cell for cell in cells if cell.endswith("!")] == ["1:9!"]
    assert sum(int(cell.partition(":")[0]) for cell in cells if cell != ".") == len(LENGTHS)
    rank = call("show", "plan.json", "--rank", "1")[1]
    assert "samples " in rank


def test_show_prints_a_line_per_step(call: Call) -> None:
    call("plan", "a.csv", *BUDGET, "--global-batch-size", "1")
    lines = call("show", "plan.json")[1].splitlines()
    assert len(lines) == 1 + len(LENGTHS)
    assert "step 3: M=1" in call("show", "plan.json", "--step", "3")[1]


def test_simulate_predicts_the_seconds_of_plan(call: Call) -> None:
    config = ("--config", "gpt_tiny_dp2_pp2_vpp2_cpu.yaml", "--json")
    planned = json.loads(call("plan", "a.csv", *LAYOUT, *BUDGET, *config)[1])
    simulated = json.loads(call("simulate", "plan.json", *config)[1])
    assert simulated["steps"]["0"]["makespan"] == pytest.approx(
        planned["strategies"]["megapack"]["seconds"], rel=1e-6
    )
    code, out, _ = call("simulate", "plan.json")
    assert (code, "token times" in out) == (0, True)


def test_diff_shows_settings_and_rows(call: Call) -> None:
    call("plan", "a.csv", *BUDGET)
    call("plan", "a.csv", *BUDGET, "--dp", "2", "-o", "b.json")
    assert call("diff", "plan.json", "plan.json")[0] == 0
    code, out, _ = call("diff", "plan.json", "b.json")
    assert code == 1
    assert "layout.dp: 1 -> 2" in out
    assert "\nsteps[0].ranks[1]: null -> [[[" in out
    found = json.loads(call("diff", "plan.json", "b.json", "--json")[1])
    assert not found["equal"]
    assert found["differences"] == out.splitlines()[1:]


def test_tune_ranks_what_fits(call: Call) -> None:
    args = (*TUNE, "--search", "64", "--json")
    code, out, _ = call(*args)
    ranked = json.loads(out)["ranked"]
    assert code == 0
    speeds = [candidate["tokens_per_gpu_second"] for candidate in ranked]
    assert speeds == sorted(speeds, reverse=True)
    sizes = [c["layout"] for c in ranked]
    assert {one["dp"] * one["tp"] * one["pp"] for one in sizes} == {4}
    assert {one["tp"] for one in sizes} == {1, 2, 4}
    code, out, _ = call(*args[:-1], "--gpu-memory-gib", "0.0001")
    assert code == 1
    assert "nothing fits: the least is " in out
    assert re.search(r"longest samples \(up to \d+ tokens\)", out)


def test_tune_plans_what_the_config_sets_and_marks_it(call: Call) -> None:
    Path("a.yaml").write_text("name: a\nplan: {max_tokens_per_gpu: 12}\nmodel: {vocab_size: 512}\n")
    args = ("tune", "a.csv", "--gpus", "2", "--config", "a.yaml", *SPEED, "--pp", "1", "--cp", "1")
    found = json.loads(call(*args, "--tp", "2", "--json")[1])
    assert not found["distributed_optimizer"]
    (own,) = (one for one in found["ranked"] if one["is_config"])
    assert (own["layout"]["dp"], own["layout"]["tp"], own["max_tokens_per_gpu"]) == (2, 1, 12)
    code, out, _ = call(*args, "--tp", "2")
    assert (code, out.count("the config's own\n")) == (0, 1)
    assert "true takes less memory" in out
    # Where nothing fits with the config's optimizer, it is split over DP ranks.
    needed = own["memory_bytes"]
    gib = f"{(needed['total'] - needed['optimizer'] / 4) / 2**30:.9f}"
    args = (*args, "--tp", "1", "--recompute", "none", "--max-tokens-per-gpu", "12")
    code, out, _ = call(*args, "--gpu-memory-gib", gib)
    assert code == 0
    assert "optim.distributed_optimizer=true: with false, as in the config, nothing fits" in out


def test_stages_may_have_different_numbers_of_layers(call: Call) -> None:
    """The config's split, on its own pp and vpp, decides the seconds."""
    text = (
        "name: a\nplan: {max_tokens_per_gpu: 16}\nmodel: {num_layers: 4, vocab_size: 512}\n"
        "layout: {pp: 2, %s}\n"
    )
    plan = ("plan", "a.csv", "--pp", "2", *BUDGET, "--config", "a.yaml", *SPEED, "--json")

    def seconds(split: str) -> float:
        Path("a.yaml").write_text(text % split)
        out = call(*plan)[1]
        return float(json.loads(out)["strategies"]["one sample"]["seconds"])

    even = seconds("pipeline_model_parallel_layout: Et*2|t*2L")
    uneven = seconds("pipeline_model_parallel_layout: Et|t*3L")
    # The costlier stage has 3 of 4 layers instead of 2, and an eighth of the work is warm-up.
    assert 1.3 < uneven / even < 1.5
    tune = ("tune", "a.csv", "--gpus", "4", *SPEED, "--search", "16", "--vpp", "1", "--tp", "1")
    ranked = json.loads(call(*tune, "--config", "a.yaml", "--all", "--json")[1])["ranked"]
    splits = {c["layout"]["pp"]: c["stage_layers"] for c in ranked}
    assert splits == {1: [4], 2: [1, 3], 4: [1, 1, 1, 1]}
    Path("five.json").write_text(json.dumps(TINY | {"num_hidden_layers": 5}))
    three = ("--model", "./five.json", "--pp", "2", "--uneven")
    code, out, _ = call(*tune, *three)
    assert code == 0
    assert re.search(r"layers\n.* Et\*3\|t\*2L\n", out)


def test_a_measured_cost_model_gives_seconds(call: Call) -> None:
    Path("cost.yaml").write_text("cost:\n  per_token: 0.5\n")
    out = call("plan", "a.csv", *BUDGET, "--cost", "cost.yaml", "--json")[1]
    assert json.loads(out)["strategies"]["one sample"]["seconds"] == pytest.approx(44 * 0.5 * 3)


@pytest.mark.parametrize("text", ["cost: {}\n", "cost:\n  p2p: 1.0\n"])
def test_a_cost_model_of_zero_seconds_is_refused(call: Call, text: str) -> None:
    Path("cost.yaml").write_text(text)
    code, _, err = call("plan", "a.csv", *BUDGET, "--cost", "cost.yaml")
    assert (code, "cost.yaml: a micro-batch takes 0 seconds" in err) == (2, True)
    Path("cost.yaml").write_text("cost:\n  fixed: 1.0\n")
    code, out, _ = call("plan", "a.csv", *BUDGET, "--cost", "cost.yaml", "--json")
    assert (code, json.loads(out)["strategies"]["padded"]["time_over_equal_work"]) == (0, None)


PLAN = ("plan", "a.csv", *BUDGET)
BAD = [
    (("plan",), ["LENGTHS"]),
    (("plan", ".", *BUDGET), ["directory"]),
    (("plan", "a.csv"), ["neither of --max-tokens-per-gpu and", "--max-tokens-per-gpu=9 or"]),
    ((*PLAN, "--micro-batch-size", "2"), ["both of --max-tokens-per-gpu and --micro-batch-size"]),
    (("plan", "a.csv", "--max-tokens-per-gpu", "0"), ["--max-tokens-per-gpu=0", "at least 1"]),
    (("plan", "a.csv", "--max-tokens-per-gpu", "9" * 20), ["at most 1099511627776"]),
    ((*PLAN, "--search", "9" * 20), ["search=999", "at most 1099511627776"]),
    ((*PLAN, "--dp", "9" * 20), ["dp=999", "at most 1048576"]),
    ((*PLAN, "--length-column", "size"), ["'size'", "length, id"]),
    ((*PLAN, "--prompt-column", "length"), ["'length'", "set both"]),
    ((*PLAN, "--pp", "4", "--vpp", "2", "--microbatch-group-size", "2"), ["below --pp=4"]),
    ((*PLAN, "--fp8", "e4m3"), ["--fp8", "mxfp8"]),
    ((*PLAN, "--count-rule", "any"), ["--count-rule", "legal", "per_rank"]),
    ((*PLAN, "--search", "-1"), ["search=-1"]),
    ((*PLAN, "--num-steps", "2", "--global-batch-size", "2"), ["--num-steps=2", "set one"]),
    ((*PLAN, "--oversize", "error", "--max-tokens-per-gpu", "8"), ["1 sample(s) over", "9 tokens"]),
    ((*PLAN, "--unreachable", "error", "--dp", "16"), ["unreachable"]),
    ((*PLAN, "--max-token", "5"), ["--max-token"]),
    ((*PLAN, "--cost", "a.csv"), ["a.csv"]),
    ((*PLAN, "--config", "none.yaml"), ["none.yaml", "no such file"]),
    ((*PLAN, *SPEED), ["--peak-tflops given without a model"]),
    ((*PLAN, *MODEL, "--peak-tflops", "nan"), ["--peak-tflops=nan", "above 0"]),
    ((*PLAN, *MODEL, *SPEED, "--utilisation", "40"), ["--utilisation=40", "at most 1"]),
    ((*PLAN, *MODEL, *SPEED, "--pp", "3"), ["num_layers=4", "pp * vpp = 3"]),
    ((*PLAN, *MODEL, *SPEED, "--cost", "c.yaml"), ["--cost", "set one"]),
    (("check", "good.json", "none.csv"), ["none.csv"]),
    (("show", "good.json", "--step", "1"), ["step 1 of 1", "0 to 0"]),
    (("simulate", "unequal.json"), ["M=5", "legal"]),
    (("simulate", "ranks.json"), ["1 ranks", "dp=2"]),
    (("diff", "good.json"), ["OTHER"]),
    (("tune", "a.csv"), ["--gpus"]),
    (("tune", "a.csv", "--gpus", "0", *MODEL, *SPEED), ["0 GPUs"]),
    ((*TUNE, "--tp", "3"), ["tp [3]", "4 GPUs"]),
    ((*TUNE, "--tp", "1,x"), ["'1,x'", "commas"]),
    (
        (*TUNE, "--gpu-memory-gib", "inf"),
        ["--gpu-memory-gib=inf"],
    ),
    ((*TUNE, "--ep", "2"), ["ep [2]", "no experts"]),
    ((*TUNE, "--backward", "joint,both"), ["--backward", "'both'; set some of joint, split"]),
    ((*PLAN, "--model", "Qwen9"), ["no such folder or file; megapack knows", "Qwen3-4B"]),
    ((*PLAN, "--model", "a", "--config", "b"), ["both --config and --model given"]),
    ((*PLAN, "--compare", "verl,slim"), ["'slim'", "some of megatron_lm, slime, nemo_rl, verl"]),
    (
        (*PLAN[:2], "--micro-batch-size", "2", "--compare", "verl"),
        ["fill a budget of tokens; set --max-tokens-per-gpu"],
    ),
    (
        (*PLAN, "--split-samples", "auto", "--row-shape", "uniform"),
        ["--split-samples=auto with --row-shape=uniform", "set --row-shape=planned, or --split-"],
    ),
    (
        (*PLAN[:2], "--micro-batch-size", "2", "--row-shapes", "3"),
        ["set --max-tokens-per-gpu, or no --row-shapes"],
    ),
]


@pytest.mark.parametrize(("args", "words"), BAD, ids=[" ".join(args) for args, _ in BAD])
def test_bad_input_prints_one_line_and_writes_no_file(
    args: tuple[str, ...], words: list[str], call: Call, folder: Path
) -> None:
    if args[0] not in ("plan", "tune"):
        _write_plans(folder)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    code, out, err = call(*args)
    *warnings, line = err.splitlines()
    assert (code, out) == (2, "")
    assert warnings == []
    assert line.startswith("megapack: ")
    assert all(word in line for word in words), line
    # An error names options as they are typed, never as Python has them.
    names = [field.name for cls in (Layout, Policy) for field in fields(cls)]
    names += list(signature(build_dp_schedule).parameters)
    assert [name for name in names if "_" in name and name in line] == []
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def _write_plans(folder: Path) -> None:
    layout = Layout(dp=2, pp=2, vpp=2)
    text = build_dp_schedule(LENGTHS, layout=layout, max_tokens_per_gpu=16).to_json()
    (folder / "good.json").write_text(text)
    for name in ("ranks.json", "unequal.json"):
        (folder / name).write_text(text)
    edit(str(folder / "ranks.json"), lambda plan: plan["steps"][0]["ranks"].pop())
    row = json.loads(text)["steps"][0]["ranks"][0][:1] * 5
    edit(str(folder / "unequal.json"), lambda plan: plan["steps"][0].update(ranks=[row, row]))
