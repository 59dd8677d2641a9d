"""megapack.hosts.verl through verl's own signatures, on one rank."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megapack import ConfigError, CostModel, Layout
from megapack.hosts import verl
from tests.hosts.partitions import evenly

pytestmark = [pytest.mark.hosts, pytest.mark.usefixtures("partitions")]

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)


class Batch(dict[str, Any]):
    """The parts of a TensorDict that the replacements use."""

    def __init__(self, fields: dict[str, Any], batch_size: list[int]) -> None:
        super().__init__(fields)
        self.batch_size = batch_size


def padded(lengths: list[int], width: int = 64) -> Batch:
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    ids = torch.arange(len(lengths))[:, None] * 1000 + torch.arange(width)
    fields = {"input_ids": ids, "attention_mask": mask, "loss_mask": mask.clone()}
    return Batch({**fields, "temperature": 0.5}, [len(lengths)])


def nested(lengths: list[int]) -> Batch:
    ids = [torch.arange(n) + 1000 * i for i, n in enumerate(lengths)]
    positions = [torch.arange(4 * n).reshape(n, 4) for n in lengths]
    jagged = torch.nested.as_nested_tensor(positions, layout=torch.jagged)
    fields = {
        "input_ids": torch.nested.as_nested_tensor(ids, layout=torch.jagged),
        "position_ids": jagged.transpose(1, 2),
    }
    return Batch(fields, [len(lengths)])


def tokens(lengths: list[int], rows: list[list[int]]) -> list[int]:
    return [sum(lengths[i] for i in row) for row in rows]


@pytest.mark.parametrize("host", ["verl", "areal"])
def test_the_import_loads_neither_torch_nor_the_host(host: str) -> None:
    code = f"import sys, megapack.hosts.{host}; print({{'torch', {host!r}}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_samples_of_a_uid_stay_together(originals: dict[str, Any]) -> None:
    """verl's own function gets them side by side."""

    def own(lengths: list[int], uids: list[str], parts: int) -> list[list[int]]:
        assert (lengths, uids, parts) == ([10, 11, 40, 41], ["a", "a", "b", "b"], 2)
        return [[2, 3], [0, 1]]

    originals["verl.utils.seqlen_balancing.get_group_balanced_partitions"] = own
    for kind in (list, np.array, torch.tensor):
        lengths = kind([10, 40, 11, 41])
        parts = verl.get_group_balanced_partitions(lengths, ["a", "b", "a", "b"], 2)
        assert parts == [[1, 3], [0, 2]]
    with pytest.raises(AssertionError, match="3 uids for 4 samples"):
        verl.get_group_balanced_partitions([1, 1, 1, 1], ["a", "b", "a"], 1)


@settings(max_examples=60)
@given(lengths=LENGTHS, budget=st.integers(60, 200), divisor=st.sampled_from([None, 1, 2]))
def test_rows_have_every_sample_once_within_the_budget(
    lengths: list[int], budget: int, divisor: int | None
) -> None:
    batch = padded(lengths)
    try:
        micro_batches, rows = verl.rearrange_micro_batches(
            batch, budget, num_batches_divided_by=divisor
        )
    except AssertionError:
        # An odd number of samples can be too few for an even number of rows, as 3 for 4 rows.
        assert divisor == 2
        assert len(lengths) % 2 == 1
        return
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert max(tokens(lengths, rows)) <= budget
    assert len(rows) % (divisor or 1) == 0
    assert [int(mb["attention_mask"].sum()) for mb in micro_batches] == tokens(lengths, rows)
    assert all(
        mb["temperature"] == 0.5 and mb.batch_size == [len(r)]
        for mb, r in zip(micro_batches, rows, strict=True)
    )
    outputs = torch.cat([mb["input_ids"] for mb in micro_batches])
    assert torch.equal(verl.restore_dynamic_batch(outputs, rows), batch["input_ids"])
    assert verl.rearrange_micro_batches(batch, budget, num_batches_divided_by=divisor)[1] == rows


@settings(max_examples=30)
@given(groups=st.lists(st.integers(1, 30), min_size=1, max_size=12), size=st.integers(1, 3))
def test_groups_are_not_split(groups: list[int], size: int) -> None:
    lengths = [length for length in groups for _ in range(size)]
    _, rows = verl.rearrange_micro_batches(padded(lengths), 90, force_group_size=size)
    for row in rows:
        assert row == [i for i in row[::size] for i in range(i, i + size)]
        assert all(i % size == 0 for i in row[::size])
    assert max(tokens(lengths, rows)) <= 90


def test_the_heaviest_micro_batch_is_in_the_middle() -> None:
    lengths = [60, 50, 40, 30, 20]
    _, rows = verl.rearrange_micro_batches(padded(lengths), 60, min_num_micro_batch=5)
    assert tokens(lengths, rows) == [20, 40, 60, 50, 30]
    _, rows = verl.rearrange_micro_batches(
        padded(lengths), 60, min_num_micro_batch=5, use_dynamic_bsz_balance=False
    )
    assert tokens(lengths, rows) == lengths


def test_a_budget_that_the_hosts_partition_exceeds_is_kept() -> None:
    # Two samples of 30 and three of 20 fit into two rows of 60; the partition makes one of 70.
    lengths = [30, 30, 20, 20, 20]
    assert max(tokens(lengths, evenly(lengths, 2))) == 70
    _, rows = verl.rearrange_micro_batches(padded(lengths), 60)
    assert max(tokens(lengths, rows)) <= 60
    # With an even count, a third row is not allowed; megapack's packer finds two that fit.
    _, rows = verl.rearrange_micro_batches(padded(lengths), 60, num_batches_divided_by=2)
    assert max(tokens(lengths, rows)) <= 60
    assert len(rows) in (2, 4)


@pytest.mark.parametrize(
    ("lengths", "budget", "settings", "says"),
    [
        ([10, 64], 63, {}, "a sample of 64 tokens is over max_token_len=63"),
        ([40, 40], 64, {"force_group_size": 2}, "a group of samples of 80 tokens"),
        ([5, 5, 5], 64, {"force_group_size": 2}, "give a multiple"),
        ([5, 5, 5], 64, {"min_num_micro_batch": 4}, "a rank can fill 3"),
        ([5] * 12, 64, {"num_batches_divided_by": 16}, "a rank can fill 12"),
    ],
)
def test_unsplittable_batches_are_refused(
    lengths: list[int], budget: int, settings: dict[str, int], says: str
) -> None:
    for error in (AssertionError, ValueError):
        with pytest.raises(error, match=says):
            verl.rearrange_micro_batches(padded(lengths), budget, **settings)


def test_a_nested_field_with_gaps_between_its_samples_is_split() -> None:
    batch = nested([3, 9, 5, 7])
    values = torch.arange(4 * 6).reshape(4, 6)
    counts = torch.tensor([2, 6, 1, 3])
    starts = torch.tensor([1, 0, 4, 2])
    batch["mask"] = torch.nested.narrow(values, 1, starts, counts, layout=torch.jagged)
    micro_batches, rows = verl.rearrange_micro_batches(batch, 12)
    assert sorted(map(len, rows)) == [2, 2]
    for mb, row in zip(micro_batches, rows, strict=True):
        expected = [values[i, starts[i] : starts[i] + counts[i]].tolist() for i in row]
        assert [sample.tolist() for sample in mb["mask"].unbind()] == expected


def test_a_real_tensordict_is_split() -> None:
    tensordict = pytest.importorskip("tensordict")
    lengths = [9, 4, 6]
    more = {
        "name": tensordict.NonTensorStack("a", "b", "c"),
        "temperature": tensordict.NonTensorData(0.5),
    }
    batch = tensordict.TensorDict({**padded(lengths), **more}, batch_size=[3])
    verl.configure(light_rank="pad")
    micro_batches, rows = verl.rearrange_micro_batches(batch, 10, min_num_micro_batch=4)
    assert all(type(mb) is tensordict.TensorDict for mb in micro_batches)
    assert [list(mb["name"]) for mb in micro_batches] == [["abc"[i] for i in r] for r in rows]
    assert [mb["temperature"] for mb in micro_batches] == [0.5] * 4
    assert micro_batches[3]["loss_mask"].sum() == 0


LAYOUT = Layout(pp=4, vpp=2, cp=2, microbatch_group_size=8)


def test_a_layout_makes_legal_counts_and_counts_alignment() -> None:
    verl.configure(layout=LAYOUT)
    lengths = [17] * 40
    _, rows = verl.rearrange_micro_batches(padded(lengths), 80, num_batches_divided_by=8)
    # Samples are padded to 20 tokens, so a row holds 4. Between G=8 and 2 G, M can be 12 to 15.
    assert max(map(len, rows)) <= 4
    assert 12 <= len(rows) <= 15
    with pytest.raises(ConfigError, match="num_batches_divided_by=4"):
        verl.rearrange_micro_batches(padded(lengths), 80, num_batches_divided_by=4)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"light_rank": "drop"}, 'set "error" or "pad"'),
        ({"cost": CostModel()}, "cost is used with a layout only"),
        ({"lihgt_rank": "pad"}, "did you mean light_rank"),
    ],
)
def test_bad_verl_options_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        verl.configure(**options)


def test_wide_rows_hold_every_sample_once_on_aligned_gpus() -> None:
    """As verl checks the answers of Megatron-Core's scheduler: every GPU has a row each time."""
    lengths = [40, 31, 25, 22, 20, 18, 17, 15, 14, 12, 11, 9, 8, 7, 6, 5]
    scheduler = SimpleNamespace(dp_size=2, cp_size=2, max_seqlen_per_dp_cp_rank=24)
    verl.configure(layout=Layout(dp=2, cp=2, pp=2, vpp=2))
    rows = verl.wide_rows(scheduler, list(enumerate(lengths)))
    assert Layout(pp=2, vpp=2).is_legal_count(len(rows))
    found = []
    for gpus in rows:
        assert len(gpus) == 4
        members: dict[tuple[int, ...], list[int]] = {}
        for gpu, samples in enumerate(gpus):
            assert samples
            members.setdefault(tuple(samples), []).append(gpu)
        for samples_of_row, own in members.items():
            width = len(own)
            assert own == list(range(own[0], own[0] + width))
            assert own[0] % width == 0
            assert sum(lengths[i] for i in samples_of_row) <= 24 * width
            found += samples_of_row
    assert sorted(found) == list(range(len(lengths)))


def test_dynamic_cp_refuses_what_verl_does_but_for_what_it_brings(
    originals: dict[str, Any],
) -> None:
    seen = []
    name = "verl.workers.engine.megatron.transformer_impl._check_dcp_unsupported_features"
    originals[name] = lambda *arguments: seen.append(arguments)
    engine = SimpleNamespace(
        dynamic_context_parallel=True,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
    )
    with pytest.raises(
        ConfigError, match=r"pp=2 and vpp=2, actor_rollout_ref.megapack.layout pp=1"
    ):
        verl.check_dynamic_cp(engine, "model")
    verl.configure(layout=Layout(dp=2, pp=2, vpp=2))
    verl.check_dynamic_cp(engine, "model", "transformer", batch="distillation")
    ((given, *others),) = seen
    assert vars(given) == {**vars(engine), "virtual_pipeline_model_parallel_size": None}
    assert others == ["model", "transformer"]
    assert engine.virtual_pipeline_model_parallel_size == 2
