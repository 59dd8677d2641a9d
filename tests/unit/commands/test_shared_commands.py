"""Commands on samples that share prompts: LENGTHS with groups, and what is printed about plans."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megapack import Plan, check_plan

pytestmark = pytest.mark.unit

Call = Callable[..., tuple[int, str, str]]

# Three prompts of 60, 40 and 50 tokens with four responses each.
ROWS = [(prompt, 10 + 3 * k, f"g{prompt}") for prompt in (60, 40, 50) for k in range(4)]
LENGTHS = [prompt + response for prompt, response, _ in ROWS]
TOKENS = sum(LENGTHS)
PLAN = ("plan", "groups.csv", "--dp", "2", "--pp", "2", "--max-tokens-per-gpu", "256")
GROUPS = ("--group-column", "group")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a file of prompts and responses."""
    monkeypatch.chdir(tmp_path)
    lines = [f"{prompt},{response},{group}\n" for prompt, response, group in ROWS]
    (tmp_path / "groups.csv").write_text("prompt_len,response_len,group\n" + "".join(lines))
    return tmp_path


def saved_tokens() -> int:
    plan = Plan.from_json(Path("plan.json").read_text())
    check_plan(plan, LENGTHS)
    return plan.counts.shared_tokens


def test_samples_of_a_group_share_their_prompt(call: Call) -> None:
    code, out, err = call(*PLAN, *GROUPS)
    assert (code, err) == (0, "")
    saved = saved_tokens()
    assert 0 < saved <= 3 * (59 + 39 + 49)
    assert f"shared prefixes: {saved} of {TOKENS} tokens ({saved / TOKENS:.1%})\n" in out
    totals = json.loads(call(*PLAN, *GROUPS, "--json")[1])["strategies"]
    assert totals["megapack"]["shared_tokens"] == saved
    assert totals["next-fit"]["shared_tokens"] == 0


def test_without_groups_or_with_off_nothing_is_shared(call: Call) -> None:
    for options in ((), (*GROUPS, "--share-prefixes", "off")):
        _, out, _ = call(*PLAN, *options)
        assert saved_tokens() == 0
        assert "shared" not in out


def test_a_plan_that_shares_is_shown_checked_and_simulated(call: Call) -> None:
    call(*PLAN, *GROUPS)
    saved = saved_tokens()
    assert f"; shared prefixes: {saved} of {TOKENS} tokens" in call("show", "plan.json")[1]
    assert call("check", "plan.json", "groups.csv")[0] == 0
    head, step, *_ = call("simulate", "plan.json")[1].splitlines()
    assert head.split()[-1] == "shared"
    assert step.split()[-1] == f"{saved / TOKENS:.1%}"
    (simulated,) = json.loads(call("simulate", "plan.json", "--json")[1])["steps"].values()
    assert (simulated["tokens"], simulated["shared_tokens"]) == (TOKENS, saved)


def test_tune_plans_with_groups(call: Call) -> None:
    Path("a.yaml").write_text("name: a\nplan: {max_tokens_per_gpu: 16}\nmodel: {vocab_size: 512}\n")
    tune = ("tune", "groups.csv", "--gpus", "4", "--config", "a.yaml", "--peak-tflops", "1")
    tune = (*tune, "--tp", "1", "--pp", "1,2")
    assert "first, shared prefixes: " in call(*tune, *GROUPS)[1]
    assert "shared" not in call(*tune)[1]


def test_groups_need_prompts(call: Call) -> None:
    Path("bare.csv").write_text("length,group\n5,1\n6,1\n")
    code, out, err = call("plan", "bare.csv", *GROUPS, "--max-tokens-per-gpu", "16")
    assert (code, out) == (2, "")
    assert err.strip() == (
        "megapack: bare.csv: groups 'group' and no column of prompts beside 'length'; set "
        "--prompt-column and --response-column"
    )
