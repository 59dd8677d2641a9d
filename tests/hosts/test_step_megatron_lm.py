"""Megatron-LM's `pretrain_gpt.py`, whole, on the CPU: with the patches it trains as it should."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hosts.steps.job import Report, run_step
from tests.hosts.steps.megatron_lm import BUDGET
from tests.marks import needs_te
from tests.te_python import VERSION

pytestmark = [pytest.mark.hosts, pytest.mark.host_steps]

Run = Callable[..., list[Report]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two steps and an evaluation of a layout, patches and a case; each is run once.

    Layers are Megatron's local ones, or those of a release of Transformer Engine.
    """

    @functools.cache
    def run_once(layout: str, patches: str, case: str, te: str = "") -> list[Report]:
        folder = Path(tempfile.mkdtemp(dir=tmp_path_factory.mktemp("mlm")))
        return run_step(
            "megatron_lm",
            folder,
            layout=layout,
            world=2,
            patches=[host for host in patches.split(",") if host],
            case=case,
            te=te,
        )

    return run_once


def assert_equal(got: list[Report], want: list[Report]) -> None:
    """The last stage's losses, all ranks' gradient norms and parameters, the evaluation."""
    assert len(got[-1].losses) == len(want[-1].losses) == 2
    assert got[-1].losses == pytest.approx(want[-1].losses, rel=1e-6)
    for mine, theirs in zip(got, want, strict=True):
        assert mine.grad_norms == pytest.approx(theirs.grad_norms, rel=1e-5)
        # A wrong gradient moves Adam's first steps by the learning rate, 1e-3 per parameter.
        assert mine.params_sum == pytest.approx(theirs.params_sum, rel=1e-6)
    evaluated = [losses["lm loss"] for losses in got[-1].more["evaluated"]]
    assert evaluated == pytest.approx(
        [losses["lm loss"] for losses in want[-1].more["evaluated"]], rel=1e-6
    )


def assert_planned(reports: list[Report]) -> None:
    """Rows are the planner's, filled up to the budget, and their shapes are not exchanged."""
    for report in reports:
        assert report.num_shape_exchanges == 0
        rows = [tokens for step in report.row_tokens for tokens in step]
        assert 128 < max(rows) <= BUDGET
        # Megatron-LM's own rows have 128 tokens: two of 64.
        assert set(rows) != {128}


@pytest.mark.parametrize("layout", ["dp=2", "pp=2", "tp=2"])
def test_planned_steps_train_as_megatron_lms_own(run: Run, layout: str) -> None:
    planned = run(layout, "megatron_lm", "")
    assert_equal(planned, run(layout, "", ""))
    assert_planned(planned)


def test_context_parallel_ranks_train_as_data_parallel_ones(run: Run) -> None:
    planned = run("cp=2", "megatron_lm", "spec")
    assert_equal(planned, run("dp=2", "", ""))
    assert planned[0].num_shape_exchanges == 0


@needs_te
@pytest.mark.parametrize("layout", ["dp=2", "pp=2", "tp=2"])
def test_the_default_flags_train_as_the_local_spec(run: Run, layout: str) -> None:
    own = run(layout, "", "", VERSION)
    assert_equal(own, run(layout, "", ""))
    assert_equal(run(layout, "megatron_lm", "", VERSION), own)


@needs_te
def test_the_ring_trains_as_data_parallel_ranks(run: Run) -> None:
    ring = run("cp=2", "", "", VERSION)
    assert_equal(ring, run("dp=2", "", ""))
    assert_equal(run("cp=2", "megatron_lm", "", VERSION), ring)


@needs_te
@pytest.mark.parametrize("layout", ["dp=2", "cp=2"])
def test_packed_conversations_train_as_on_the_local_spec(run: Run, layout: str) -> None:
    te = run(layout, "", "sft+flat", VERSION)
    own = run("dp=2", "", "sft+spec+flat")
    assert te[0].losses == pytest.approx(own[0].losses, rel=1e-6)
    assert te[0].grad_norms == pytest.approx(own[0].grad_norms, rel=1e-5)


@needs_te
def test_flat_bounds_of_samples_are_what_the_kernels_need(run: Run) -> None:
    with pytest.raises(AssertionError, match=r"fused rope with cu_seqlens \(1, \d+\)"):
        run("dp=2", "", "sft", VERSION)


@pytest.mark.parametrize("patches", ["megatron_lm", "megatron_core", "megatron_lm,megatron_core"])
def test_interleaved_stages_train_right(run: Run, patches: str) -> None:
    patched = run("pp=2,vpp=2", patches, "")
    assert patched[0].patched
    # Megatron-LM's own loop trains wrongly over gloo unless it keeps the outputs that it sends.
    assert_equal(patched, run("pp=2,vpp=2", "", "kept"))


def test_the_schedule_alone_leaves_constant_rows_as_they_are(run: Run) -> None:
    patched = run("pp=2", "megatron_core", "")
    assert_equal(patched, run("pp=2", "", ""))
    assert patched[0].row_tokens == [[128] * 8] * 2


def test_documents_inside_a_row_are_samples(run: Run) -> None:
    planned = run("pp=2", "megatron_lm", "documents")
    assert_equal(planned, run("pp=2", "", "documents"))
    assert_planned(planned)


def test_conversations_inside_a_row_are_samples(run: Run) -> None:
    planned = run("dp=2", "megatron_lm", "sft")
    own = run("dp=2", "", "sft+spec+flat")
    assert planned[0].losses == pytest.approx(own[0].losses, rel=1e-6)
    assert planned[0].grad_norms == pytest.approx(own[0].grad_norms, rel=1e-5)
    assert planned[0].params_sum == pytest.approx(own[0].params_sum, rel=1e-6)
    assert planned[0].num_microbatches < own[0].num_microbatches
    # With --sft Megatron-LM evaluates by a mean of its micro-batches' means.
    mean_of_tokens = planned[0].more["evaluated"][0]["lm loss"]
    mean_of_means = own[0].more["evaluated"][0]["lm loss"]
    assert mean_of_tokens != pytest.approx(mean_of_means, rel=1e-3)
    assert mean_of_tokens == pytest.approx(mean_of_means, rel=1e-2)


def test_multi_token_prediction_trains_as_megatron_lms_own(run: Run) -> None:
    planned = run("pp=2", "megatron_lm", "mtp")
    assert_equal(planned, run("pp=2", "", "mtp"))
    assert_planned(planned)
    assert planned[-1].more["logged"][0]["mtp_1_loss"] > 1


def test_experts_without_a_loss_train_as_megatron_lms_own(run: Run) -> None:
    planned = run("dp=2", "megatron_lm", "experts+free")
    assert_equal(planned, run("dp=2", "", "experts+free"))
    assert_planned(planned)


def test_experts_may_balance_their_load_over_each_sample(run: Run) -> None:
    # The coefficient of "strong" makes the gradient that of the balancing loss.
    planned = run("dp=2", "megatron_lm", "experts+each+strong")
    one = run("dp=2", "", "experts+sequence+strong+single")
    two = run("dp=2", "", "experts+sequence+strong")
    assert planned[0].losses[0] == pytest.approx(one[0].losses[0], rel=1e-6)
    # A sample of 64 labels has 65 tokens, and the load counts its last one; Megatron-LM's row has
    # 64: 0.7 % here.
    assert planned[0].grad_norms[0] == pytest.approx(one[0].grad_norms[0], rel=0.02)
    # Megatron-LM's own loss depends on the micro-batch size.
    assert two[0].grad_norms[0] == pytest.approx(one[0].grad_norms[0] / 2, rel=0.02)
    assert planned[0].more["logged"][0]["moe_balance_loss"] >= 1


def test_aux_loss_over_a_micro_batch_is_refused(run: Run) -> None:
    with pytest.raises(AssertionError, match="set 'seq_aux_loss' \\(each sample by itself\\)"):
        run("dp=2", "megatron_lm", "experts")
