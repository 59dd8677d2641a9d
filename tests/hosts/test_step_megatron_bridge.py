"""Megatron-Bridge's own recipe on a CPU: with and without the patches, against transformers.

Bridge's release is installed from the package index without its dependencies.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from packaging.version import Version

from tests.hosts.steps.images import assert_same_gradients
from tests.hosts.steps.job import Report, Runs
from tests.marks import needs_te
from tests.te_python import VERSION
from tools.hosting import sources

pytestmark = [pytest.mark.hosts, pytest.mark.host_steps]

PATCHES = "megatron_bridge,megatron_core"
GLOBAL_BATCH = 4


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    release = sources.release("megatron_bridge")
    if Version(release.partition("==")[2]) < Version("0.4"):
        pytest.skip(f"the patches are for 0.4 and newer, not for {release}; use Python 3.12")
    try:
        sources.installed(sources.release("megatron_bridge"))
    except sources.NoSource as error:
        pytest.skip(str(error))
    # `finetune` starts a second process, which imports Bridge again: 300 s are too few on two
    # busy cores.
    folder = tmp_path_factory.mktemp("megatron_bridge")
    return Runs("megatron_bridge", folder, timeout_s=600)


@pytest.fixture(scope="module")
def run_with_images(run: Runs, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("megatron_bridge_images")
    return Runs("megatron_bridge", folder, timeout_s=600, te=VERSION)


def seen(reports: list[Report]) -> dict[str, list[float]]:
    """What Bridge logs of a run: its last rank has the losses."""
    return {
        "losses": reports[-1].losses,
        "grad_norms": reports[-1].grad_norms,
        "evaluated": reports[-1].more["evaluated"],
    }


def assert_same(got: list[Report], want: list[Report]) -> None:
    expected = seen(want)
    assert expected["losses"]
    for name, values in seen(got).items():
        assert values == pytest.approx(expected[name], rel=2e-5), name


def first_packs(folder: Path) -> list[dict[str, list[int]]]:
    """The packs of the first step, as Bridge wrote them."""
    (path,) = folder.glob("packed/*/training_*")
    # Bridge shuffles the packs of each epoch: here by its default seed.
    from pyarrow import parquet

    packs = parquet.read_table(path).to_pylist()
    order = torch.randperm(len(packs), generator=torch.Generator().manual_seed(1234))
    return [packs[i] for i in order[:GLOBAL_BATCH]]


def losses_of_transformers(folder: Path) -> float:
    """The first step's loss by transformers, one sample of the step's packs at a time."""
    from tests import hf_models

    model = hf_models.load(folder / "hf", "qwen2")
    total = 0.0
    count = 0
    for pack in first_packs(folder):
        bounds = [*pack["seq_start_id"], len(pack["input_ids"])]
        for start, stop in itertools.pairwise(bounds):
            tokens = torch.tensor(pack["input_ids"][start:stop])
            logprobs, _ = hf_models.logprobs_and_entropies(model, [tokens])
            # Bridge's mask is that of the labels, and leaves out what follows an end of text.
            has_loss = np.array(pack["loss_mask"][start : stop - 1], dtype=bool)
            has_loss &= tokens[:-1].numpy() != 2
            total -= float(logprobs[0][1:].numpy()[has_loss].sum())
            count += int(has_loss.sum())
    return total / count


@pytest.mark.parametrize("patches", ["", PATCHES])
def test_a_steps_loss_is_that_of_one_sample_at_a_time(run: Runs, patches: str) -> None:
    case = "planned" if patches else ""
    reports = run("dp=2", patches, case)
    folder = Path(reports[0].more["folder"])
    assert reports[-1].losses[0] == pytest.approx(losses_of_transformers(folder), rel=1e-5)


@pytest.mark.parametrize("layout", ["dp=2", "pp=2"])
def test_planned_steps_train_as_bridge_does_on_the_same_packs(run: Runs, layout: str) -> None:
    planned = run(layout, PATCHES, "planned")
    assert_same(planned, run("dp=2"))
    # Rows are the planner's: real tokens and labels, and no padding up to the pack size.
    rows = planned[0].row_tokens[0]
    assert len(rows) == planned[0].num_microbatches[0]
    assert set(rows) != {64}
    assert planned[0].num_shape_exchanges == 0


def test_bridges_own_step_runs_on_the_schedule(run: Runs) -> None:
    patched = run("pp=2", PATCHES, "")
    assert_same(patched, run("dp=2"))
    assert patched[0].row_tokens[0] == [64] * GLOBAL_BATCH
    assert "megatron.bridge.training.train.get_forward_backward_func" in patched[0].patched


def test_interleaved_stages_are_wrong_without_the_patches_and_right_with_them(run: Runs) -> None:
    right = seen(run("dp=2"))
    wrong = seen(run("pp=2,vpp=2"))
    assert wrong["losses"][0] != pytest.approx(right["losses"][0], rel=1e-3)
    assert wrong["grad_norms"][0] > 5 * right["grad_norms"][0]
    assert_same(run("pp=2,vpp=2", PATCHES, ""), run("dp=2"))


def test_planned_interleaved_stages_are_right_with_bridges_overlap(run: Runs) -> None:
    """Without the patches memory is freed while it is sent, which is wrong in some runs only."""
    assert_same(run("pp=2,vpp=2", PATCHES, "overlap,planned"), run("dp=2"))


def test_middle_stages_keep_samples_apart(run: Runs) -> None:
    assert_same(run("pp=4", case="crossing"), run("dp=2"))
    assert_same(run("pp=4", PATCHES, "crossing"), run("dp=2"))


@needs_te
@pytest.mark.parametrize(
    ("layout", "patches"),
    # Without the patches interleaved stages hang with the recipe's settings.
    [("", ""), ("", PATCHES), ("pp=2", ""), ("pp=2", PATCHES), ("pp=2,vpp=2", PATCHES)],
)
def test_images_are_those_of_one_sample_at_a_time(
    run_with_images: Runs, layout: str, patches: str
) -> None:
    """Bridge's own Qwen3-VL and forward step; the tower is on the first chunk."""
    (alone,) = run_with_images("", case="images,reference")
    assert alone.losses[0] == pytest.approx(alone.more["reference_loss"], rel=1e-6)
    reports = run_with_images(layout, patches, "images")
    assert reports[-1].losses == pytest.approx(alone.losses, rel=1e-6)
    assert reports[-1].grad_norms == pytest.approx(alone.grad_norms, rel=1e-6)
    wanted = alone.more["reference_tower_gradients"]
    assert_same_gradients(reports[0].more["tower_gradients"], wanted, rel=1e-5)
    exchanges = sum(report.num_shape_exchanges for report in reports)
    assert bool(exchanges) == ("pp" in layout and not patches)


@needs_te
def test_bridges_qwen3_vl_does_not_tell_its_decoder_the_virtual_stage(
    run_with_images: Runs,
) -> None:
    with pytest.raises(AssertionError, match="vp_stage must be provided"):
        run_with_images("pp=2,vpp=2", PATCHES, "images,unpatched")


def test_finetune_from_an_imported_checkpoint_trains_as_the_folder_does(run: Runs) -> None:
    planned = run("", PATCHES, "finetune,planned")
    assert_same(planned, run("dp=2"))
    assert "iter_0000002" in planned[0].more["saved"]
