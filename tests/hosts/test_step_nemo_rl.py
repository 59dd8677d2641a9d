"""NeMo-RL's own policy worker on a CPU, with and without patches."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hosts.steps.job import Report, assert_same_tensors, assert_shared, run_step
from tests.hosts.steps.mamba import needs_mamba

pytestmark = [pytest.mark.hosts, pytest.mark.host_steps]

WORLD = 2
OURS = ("nemo_rl", "nemo_rl_rows")
Ranks = list[Report]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """NeMo-RL's own step on one rank."""
    (report,) = run_step("nemo_rl", tmp_path_factory.mktemp("one"), layout="dp=1", world=1)
    return report


def run(folder: Path, layout: str, patches: tuple[str, ...] = (), steps: int = 2) -> Ranks:
    return run_step("nemo_rl", folder, layout=layout, world=WORLD, patches=patches, steps=steps)


def assert_same_training(ranks: Ranks, alone: Report) -> None:
    for rank in ranks:
        assert rank.losses == pytest.approx(alone.losses, abs=3e-6)
        assert rank.grad_norms == pytest.approx(alone.grad_norms, rel=1e-5)


def sums_of_samples(ranks: Ranks) -> list[float]:
    """The sum of each sample's log-probs, sorted: ranks have samples in different orders."""
    return sorted(sum(row) for rank in ranks for row in rank.logprobs)


@pytest.mark.parametrize("layout", ["dp=2", "pp=2", "cp=2"])
def test_losses_gradients_and_sums_of_logprobs_are_those_without_patches(
    tmp_path: Path, alone: Report, layout: str
) -> None:
    without = run(tmp_path / "without", layout)
    patched = run(tmp_path / "with", layout, OURS)
    assert_same_training(without, alone)
    assert_same_training(patched, alone)
    assert not without[0].patched
    assert len(patched[0].patched) == 6
    assert sums_of_samples(patched) == pytest.approx(sums_of_samples(without), abs=2e-3)


def test_rows_of_a_pipeline_stay_as_long_as_they_are(tmp_path: Path, alone: Report) -> None:
    padded = run(tmp_path / "padded", "pp=2")
    natural = run(tmp_path / "natural", "pp=2", OURS)
    assert_same_training(natural, alone)
    for own, row_tokens in zip(padded, natural, strict=True):
        assert len(set(own.row_tokens[0])) == 1
        assert len(set(row_tokens.row_tokens[0])) > 1
        # All samples, without more padding than that of each sample.
        assert sum(row_tokens.row_tokens[0]) == sum(alone.row_tokens[0])
        assert sum(own.row_tokens[0]) > sum(row_tokens.row_tokens[0])
        assert row_tokens.num_shape_exchanges == 0


def test_without_planned_shapes_megatron_exchanges_them(tmp_path: Path, alone: Report) -> None:
    ranks = run(tmp_path, "pp=2", (*OURS, "-megatron_core"))
    assert_same_training(ranks, alone)
    assert all(rank.num_shape_exchanges > 0 for rank in ranks)


@pytest.mark.parametrize("layout", ["dp=1", "pp=2", "cp=2"])
def test_shared_prefixes_change_no_number(tmp_path: Path, layout: str) -> None:
    (plain,) = run_step("nemo_rl", tmp_path / "plain", layout="dp=1", world=1, case="prompts")
    shared = run_step(
        "nemo_rl",
        tmp_path / "shared",
        layout=layout,
        world=1 if layout == "dp=1" else WORLD,
        patches=OURS,
        case="prompts_shared",
    )
    assert_same_training(shared, plain)
    assert sums_of_samples(shared)[:: len(shared)] == pytest.approx(
        sums_of_samples([plain]), abs=2e-3
    )
    assert_shared(shared)


def test_a_draft_model_is_refused_with_shared_prefixes(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"captures the output of embedding \(HiddenState"):
        run_step(
            "nemo_rl",
            tmp_path,
            layout="dp=1",
            world=1,
            patches=OURS,
            case="prompts_shared_draft",
        )


@pytest.mark.parametrize("case", ["", "temperature"])
def test_virtual_stages_train_as_one_sample_at_a_time(tmp_path: Path, case: str) -> None:
    """Its log-prob pass, step and reference model; the worker checks what Bridge is given."""
    alone = run_step("nemo_rl", tmp_path / "a", layout="", world=1, case=f"{case}alone")
    stages = run_step("nemo_rl", tmp_path / "p", layout="pp=2", world=2, case=case, patches=OURS)
    virtual = run_step(
        "nemo_rl",
        tmp_path / "v",
        layout="pp=2,vpp=2",
        world=2,
        case=case,
        patches=("nemo_rl", "nemo_rl_vpp"),
    )
    for ranks in (stages, virtual):
        assert_same_training(ranks, alone[0])
        assert_same_tensors(ranks, alone, gradients=1e-6, weights=2e-4)
        assert sums_of_samples(ranks)[::2] == pytest.approx(sums_of_samples(alone), abs=2e-3)
    assert all(rank.num_shape_exchanges == 0 for rank in virtual)


def test_stages_of_nemo_rl_divide_hidden_states_by_the_temperature(tmp_path: Path) -> None:
    """Without nemo_rl_rows."""
    alone = run_step("nemo_rl", tmp_path / "a", layout="", world=1, case="temperature")
    stages = run_step("nemo_rl", tmp_path / "p", layout="pp=2", world=2, case="temperature")
    assert abs(stages[0].losses[0] - alone[0].losses[0]) > 0.05


def test_without_the_patch_nemo_rl_has_no_virtual_stages(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="object is not subscriptable"):
        run(tmp_path, "pp=2,vpp=2", OURS)


@needs_mamba
def test_shared_prefixes_of_recurrent_layers_change_no_number(tmp_path: Path) -> None:
    plain, shared = (
        run_step(
            "nemo_rl", tmp_path / case, layout="dp=1", world=1, steps=1, case=case, patches=OURS
        )
        for case in ("hybrid_prompts", "hybrid_prompts_shared")
    )
    assert_same_training(shared, plain[0])
    assert shared[0].params_sum == pytest.approx(plain[0].params_sum, rel=1e-6)
    assert sums_of_samples(shared) == pytest.approx(sums_of_samples(plain), abs=2e-3)
    assert_shared(shared)


@needs_mamba
def test_a_row_tells_mamba_layers_its_samples(tmp_path: Path) -> None:
    """NeMo-RL's does, without patches too."""

    def run_alone(patches: tuple[str, ...]) -> Report:
        place = tmp_path / str(len(patches))
        return run_step(
            "nemo_rl", place, layout="dp=1", world=1, steps=1, case="mamba", patches=patches
        )[0]

    plain, patched = run_alone(()), run_alone(("nemo_rl",))
    for report in (plain, patched):
        assert all(told == [True, True] for told in report.more["told"])
    # Other rows, the same loss: no state runs from one sample into the next.
    assert plain.row_tokens != patched.row_tokens
    assert plain.losses == pytest.approx(patched.losses, rel=1e-5)
    assert plain.grad_norms == pytest.approx(patched.grad_norms, rel=1e-5)
