"""UniRL's own training step with megapack's patch and without; see tests/hosts/steps/unirl.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hosts.steps.job import run_step

pytestmark = [pytest.mark.hosts, pytest.mark.host_steps]

OWN = ("count", "count+two", "count+tokens", "count+drpo", "count+anchor", "count+wide")
PATCHED = (
    *("count", "dense", "dense+two", "dense+tokens", "dense+two+tokens+defer"),
    *("dense+drpo", "dense+anchor", "dense+empty", "dense+wide", "dense+drpo+wide"),
)
ON_ONE_RANK = ("whole+all+tokens", "whole+all+two+tokens", "whole+all+empty")


@dataclass(frozen=True)
class Job:
    """The cases of one run."""

    folder: Path
    ranks: list[dict[str, Any]]
    """Rank -> case -> what it saw."""

    def gradients(self, case: str) -> list[torch.Tensor]:
        """Whole gradients of the model, one per update."""
        found: list[torch.Tensor] = torch.load(self.folder / f"{case}.pt")
        return found

    def of_ranks(self, case: str, name: str) -> list[Any]:
        return [rank[case][name] for rank in self.ranks]


def run(folder: Path, cases: tuple[str, ...], *, world: int, patches: tuple[str, ...] = ()) -> Job:
    reports = run_step(
        "unirl",
        folder,
        layout=f"dp={world}",
        world=world,
        patches=patches,
        case=",".join(cases),
        timeout_s=900,
    )
    return Job(folder, [report.more for report in reports])


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return run(tmp_path_factory.mktemp("own"), OWN, world=2)


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return run(tmp_path_factory.mktemp("patched"), PATCHED, world=2, patches=("unirl",))


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """UniRL's own on one rank, with the samples of both in one micro-batch."""
    return run(tmp_path_factory.mktemp("exact"), ON_ONE_RANK, world=1)


def differences(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> list[float]:
    """Relative distances of gradients, one per update."""
    assert len(found) == len(wanted)
    pairs = zip(found, wanted, strict=True)
    return [((a - b).norm() / b.norm()).item() for a, b in pairs]


@pytest.mark.parametrize(
    ("case", "count"),
    [
        ("dense", "count"),
        ("dense+two", "count+two"),
        ("dense+drpo", "count+drpo"),
        ("dense+anchor", "count+anchor"),
        ("dense+wide", "count+wide"),
    ],
)
def test_means_over_samples_have_the_gradients_of_counts(
    own: Job, patched: Job, case: str, count: str
) -> None:
    assert max(differences(patched.gradients(case), own.gradients(count))) < 3e-6
    for found, wanted in zip(
        patched.of_ranks(case, "logprobs"), own.of_ranks(count, "logprobs"), strict=True
    ):
        for sample, other in zip(found, wanted, strict=True):
            assert sample == pytest.approx(other, abs=1e-5)


def test_without_a_budget_all_is_unirls_own(own: Job, patched: Job) -> None:
    assert differences(patched.gradients("count"), own.gradients("count")) == [0, 0]
    assert patched.of_ranks("count", "losses") == own.of_ranks("count", "losses")
    assert patched.of_ranks("count", "tokens") == own.of_ranks("count", "tokens")


@pytest.mark.parametrize(
    ("case", "whole"),
    [
        ("dense+tokens", "whole+all+tokens"),
        ("dense+two+tokens+defer", "whole+all+two+tokens"),
    ],
)
def test_means_over_tokens_are_exact(patched: Job, exact: Job, case: str, whole: str) -> None:
    assert max(differences(patched.gradients(case), exact.gradients(whole))) < 3e-6


def test_unirls_own_means_over_tokens_are_not(own: Job, exact: Job) -> None:
    assert differences(own.gradients("count+tokens"), exact.gradients("whole+all+tokens"))[0] > 0.1


def test_samples_without_responses_make_no_rank_wait(patched: Job, exact: Job) -> None:
    """Rank 0 has micro-batches without any response token, which add nothing."""
    found = differences(patched.gradients("dense+empty"), exact.gradients("whole+all+empty"))
    assert max(found) < 3e-6


def test_ranks_run_equally_many_micro_batches_within_the_budget(patched: Job, own: Job) -> None:
    one, other = patched.of_ranks("dense", "tokens")
    assert [len(step) for step in one] == [len(step) for step in other]
    assert max(max(step) for step in (*one, *other)) <= 64
    by_count = [sum(step[0]) for step in own.of_ranks("count", "tokens")]
    planned = [sum(step[0]) for step in patched.of_ranks("dense", "tokens")]
    assert sum(planned) < sum(by_count)


def test_one_long_prompt_widens_no_other_micro_batch(patched: Job, own: Job) -> None:
    """UniRL pads prompts to the track's longest, here 50 tokens: two of 12 computed 100 and more.

    What the model is given is within the budget, if it is not one sample alone, and
    `packing_efficiency` is of that.
    """
    for rank, counted in zip(patched.ranks, own.ranks, strict=True):
        wide = rank["dense+wide"]
        for given, metrics in zip(wide["tokens"], wide["metrics"], strict=True):
            assert sorted(given)[-2] <= 64
            assert metrics["packing_efficiency"] == pytest.approx(wide["real"] / sum(given))
        assert sum(wide["tokens"][0]) < sum(counted["count+wide"]["tokens"][0]) / 1.5
        # Anchors are replayed as they train; then one pass has the log-probs of all samples.
        anchored = rank["dense+drpo+wide"]
        assert anchored["replayed"][:-1] == anchored["tokens"]


@pytest.mark.parametrize(
    ("case", "count"), [("dense+drpo", "count+drpo"), ("dense+anchor", "count+anchor")]
)
def test_anchors_are_in_track_order(own: Job, patched: Job, case: str, count: str) -> None:
    for found, wanted in zip(
        patched.of_ranks(case, "anchors"), own.of_ranks(count, "anchors"), strict=True
    ):
        assert found == pytest.approx(wanted, abs=1e-5)


def test_the_loss_is_the_mean_and_a_budget_adds_metrics(own: Job, patched: Job) -> None:
    for rank, other in zip(patched.ranks, own.ranks, strict=True):
        sums = [loss / 4 for loss in other["count"]["losses"]]
        assert rank["dense"]["losses"] == pytest.approx(sums, abs=1e-5)
        assert rank["dense"]["metrics"][0]["num_micro_batches"] > 0
    efficiency = patched.of_ranks("dense", "metrics")
    assert all(0.5 < rank[0]["packing_efficiency"] < 1 for rank in efficiency)
