"""What the tests of slime's and miles' steps share: runs of their workers, and comparisons."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType, SimpleNamespace

import megatron.core
import pytest

from tests.hosts.steps.images import assert_same_gradients
from tests.hosts.steps.job import Arguments, Report, Runs, assert_shared, parse_layout
from tests.hosts.steps.rollout_hosts import (
    PAD_MULTIPLE,
    ROLLOUTS_PER_STEP,
    host_arguments,
    make_samples,
    parallel_config,
)
from tools.hosting.sources import source

STEPS = 2


def check_patched(runs: Runs, host: ModuleType, layout: str) -> None:
    """Patched, a layout trains as one rank does without patches, and exchanges no shapes."""
    patched = runs(layout, runs.host)
    check_equal(patched, runs(""))
    assert all(report.num_shape_exchanges == 0 for report in patched)
    assert all(report.more["forward_exchanges"] == 0 for report in patched)
    if layout.startswith("pp"):
        check_planned_rows(host, patched, layout, "fanout")


def check_shared_prefixes(runs: Runs, layout: str) -> None:
    """With shared prefixes a layout trains as one rank does without, on fewer tokens."""
    plain = runs("", "", "tokens+prompts")
    shared = runs(layout, "megatron_core", "tokens+prompts+shared")
    check_equal(shared, plain)
    assert_shared(shared)
    assert plain[0].more["layer_tokens"] == sum(map(sum, plain[0].row_tokens))


def check_unpatched_exchanges(runs: Runs) -> None:
    """Without patches two stages train the same, and exchange shapes."""
    own = runs("pp=2")
    check_equal(own, runs(""))
    assert all(report.num_shape_exchanges > 0 for report in own)
    assert all(report.more["forward_exchanges"] > 0 for report in own)


def check_rows_of_mamba_layers(runs: Runs) -> None:
    """With the patch a toy with Mamba layers trains the same in other rows, without it it does not.

    The host's rows do not tell Mamba layers their samples, and Megatron-Core 0.17 and later do not
    find out.
    """
    skip_other_trees()
    cases = ("mamba", "mamba+narrow")
    plain = [runs("", f"{runs.host},-megatron_core", case)[0] for case in cases]
    patched = [runs("", runs.host, case)[0] for case in cases]
    for report in plain:
        assert all(told == [False, False] for told in report.more["told"])
    for report in patched:
        assert all(told == [False, True] for told in report.more["told"])
    assert patched[0].row_tokens != patched[1].row_tokens
    assert patched[0].grad_norms == pytest.approx(patched[1].grad_norms, rel=1e-4)
    assert plain[0].grad_norms != pytest.approx(plain[1].grad_norms, rel=1e-2)


def check_recurrent_layers(runs: Runs, layers: str, rel: float = 2e-6) -> None:
    """With shared prefixes recurrent layers train as one sample at a time, on fewer tokens.

    Args:
        layers: the word of the case, `hybrid` or `own`.
        rel: the error of the host's own gradient norm.
    """
    if layers == "hybrid":
        skip_other_trees()
    case = f"{layers}+tokens+prompts"
    (plain,) = runs("", "megatron_core", f"{case}+reference")
    shared = runs("", "megatron_core", f"{case}+shared")
    check_equal(shared, [plain])
    assert_shared(shared)
    assert plain.losses[0] == pytest.approx(plain.more["reference_loss"], rel=2e-6)
    assert plain.grad_norms[0] == pytest.approx(plain.more["reference_grad_norm"], rel=rel)


def check_own_layers_on_two_ranks(runs: Runs) -> None:
    """Without patches log-probs are right and gradients are not; shared prefixes are refused.

    The backward of the host's gather keeps a rank's own gradient of its tokens. But a loss of the
    other rank depends on them, too, through the state.
    """
    case = "own+tokens+prompts"
    (right,) = runs("", "megatron_core", f"{case}+reference")
    wrong = runs("cp=2", "", case)
    assert merged_logprobs(wrong)[:100] == pytest.approx(merged_logprobs([right])[:100], abs=2e-5)
    assert values_of(wrong, "grad_norms")[0] < 0.95 * right.grad_norms[0]
    with pytest.raises(AssertionError, match="loses gradients of states; set cp=1"):
        runs("cp=2", "megatron_core", f"{case}+shared")


def skip_other_trees() -> None:
    """Skip unless the tree of Megatron-LM is that of the installed Megatron-Core."""
    tree = source("megatron_lm") / "megatron/core/package_info.py"
    minor = megatron.core.__version__.split(".")[1]
    if not re.search(rf"MINOR = {minor}\b", tree.read_text(encoding="utf-8")):
        pytest.skip(f"needs Megatron-LM's tree of Megatron-Core {megatron.core.__version__}")


def check_interleaving_without_overlap_fails(runs: Runs, patches: str) -> None:
    """On the host's schedule a received tensor has the shape of another row.

    Transformer Engine, where it is installed, finds no angles for the positions that are too many;
    without it the rotation's split by samples fails before.
    """
    unlike_its_row = (
        r"split_with_sizes expects split_sizes to sum exactly|The size of tensor a \(\d+\) must "
        r"match the size of tensor b \(\d+\) at non-singleton dimension 0"
    )
    with pytest.raises(AssertionError, match=unlike_its_row):
        runs("pp=2,vpp=2", patches, "fanout+nooverlap")


def check_planned_interleaving_without_overlap(runs: Runs) -> None:
    """On planned shapes it is right."""
    patched = runs("pp=2,vpp=2", runs.host, "fanout+nooverlap")
    check_equal(patched, runs(""))
    assert all(report.num_shape_exchanges == 0 for report in patched)


def check_equal(found: list[Report], wanted: list[Report]) -> None:
    """Log-probs, losses and gradient norms of two runs are equal up to rounding.

    The second step's have been through Adam, which divides by small numbers.
    """
    assert merged_logprobs(found) == pytest.approx(merged_logprobs(wanted), abs=2e-5)
    for name, tolerances in (("losses", (1e-6, 2e-5)), ("grad_norms", (1e-5, 2e-4))):
        values = values_of(found, name)
        others = values_of(wanted, name)
        assert len(values) == len(others) == STEPS
        for value, other, tolerance in zip(values, others, tolerances, strict=True):
            assert value == pytest.approx(other, rel=tolerance, abs=tolerance), name


def check_tower(reports: list[Report], wanted: dict[str, list[float]]) -> None:
    """The tower's gradients of the first step, on the ranks that have it."""
    found = [report.more["tower_gradients"] for report in reports]
    assert found[0]
    for gradients in filter(None, found):
        assert_same_gradients(gradients, wanted, rel=1e-5)


def values_of(reports: list[Report], name: str) -> list[float]:
    """What the only rank that logs has logged."""
    (values,) = [getattr(report, name) for report in reports if getattr(report, name)]
    return list(values)


def merged_logprobs(reports: list[Report]) -> list[float]:
    """The log-probs of all samples in sample order, from the ranks that have them."""
    parts = [report.logprobs for report in reports if report.logprobs]
    samples = [max(versions, key=len) for versions in zip(*parts, strict=True)]
    assert all(samples), "a sample has no log-probs"
    return [value for values in samples for value in values]


def check_planned_rows(host: ModuleType, reports: list[Report], layout: str, case: str) -> None:
    """The model was given the rows of the planner, in its order."""
    arguments = Arguments(folder=Path(), layout=parse_layout(layout), case=case, steps=STEPS)
    samples = make_samples(_Sample, arguments)
    # Where the replacement looks for images, as in the hosts.
    data = {"tokens": [sample.tokens for sample in samples]}
    if "images" in case:
        data["multimodal_train_inputs"] = [sample.multimodal_train_inputs for sample in samples]
    partitions, rows, counts, _ = host.build_dp_schedule(
        host_arguments(arguments),
        parallel_config(arguments),
        [len(tokens) for tokens in data["tokens"]],
        global_batch_size=ROLLOUTS_PER_STEP,
        rollout_indices=[sample.rollout_id for sample in samples],
    )
    # Ranks of one pipeline have the same rows; the tests' layouts have one pipeline.
    (partition,) = partitions
    tokens = [sum(len(samples[partition[i]].tokens) for i in row) for row in rows[0]]
    padded = [-(-count // PAD_MULTIPLE) * PAD_MULTIPLE for count in tokens]
    for report in reports:
        assert report.num_microbatches == counts
        assert [row for step in report.row_tokens for row in step] == padded


class _Sample(SimpleNamespace):
    """A sample of no host."""

    Status = SimpleNamespace(COMPLETED=1)
