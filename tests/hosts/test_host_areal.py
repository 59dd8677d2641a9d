"""megapack.hosts.areal through AReaL's own signatures, on one rank."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megapack import ConfigError, CostModel, Layout, patching
from megapack.hosts import areal

pytestmark = [pytest.mark.hosts, pytest.mark.usefixtures("partitions")]

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)


@pytest.fixture(autouse=True)
def default_options() -> Iterator[None]:
    yield
    areal.configure()


def spec(max_tokens: int, n_mbs: int = 1, divisor: int = 1) -> Any:
    """AReaL's MicroBatchSpec."""
    return types.SimpleNamespace(
        max_tokens_per_mb=max_tokens, n_mbs=n_mbs, n_mbs_divisor=divisor, granularity=1
    )


def sums(values: list[int], groups: list[list[int]]) -> list[int]:
    return [sum(values[i] for i in group) for group in groups]


def test_the_import_loads_neither_torch_nor_areal() -> None:
    code = "import sys, megapack.hosts.areal; print({'torch', 'areal'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@given(values=LENGTHS, capacity=st.integers(60, 200), least=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_micro_batches_hold_every_sequence_once_within_the_budget(
    values: list[int], capacity: int, least: int
) -> None:
    least = min(least, len(values))
    rows = areal.allocate_balanced_mbs_synced(spec(capacity, least), values)
    assert sorted(i for row in rows for i in row) == list(range(len(values)))
    assert max(sums(values, rows)) <= capacity
    assert len(rows) >= least
    assert all(rows)


def test_counts_are_multiples() -> None:
    assert len(areal.allocate_balanced_mbs_synced(spec(30, divisor=4), [10] * 9)) == 4
    with pytest.raises(RuntimeError, match=r"8 micro-batches .*in multiples of 4.* can fill 5"):
        areal.allocate_balanced_mbs_synced(spec(10, divisor=4), [10] * 5)


def test_micro_batches_are_ordered_by_their_first_sequence() -> None:
    rows = areal.allocate_balanced_mbs_synced(spec(10), [6, 4, 5, 5])
    assert rows == sorted(sorted(row) for row in rows)
    assert sums([6, 4, 5, 5], rows) == [10, 10]


def test_with_a_layout_m_is_one_that_megatron_runs() -> None:
    # G=4 and vpp=2: AReaL's multiples of pp=2 give M=6 as well as 4 and 8.
    areal.configure(layout=Layout(pp=2, vpp=2, microbatch_group_size=4))
    rows = areal.allocate_balanced_mbs_synced(spec(10, divisor=2), [10] * 5 + [2, 3, 4])
    assert Layout(pp=2, vpp=2, microbatch_group_size=4).is_legal_count(len(rows))
    assert max(sums([10] * 5 + [2, 3, 4], rows)) <= 10


def test_too_long_and_too_few_are_refused_together() -> None:
    with pytest.raises(RuntimeError, match="over max_tokens_per_mb=10"):
        areal.allocate_balanced_mbs_synced(spec(10), [11, 1])
    with pytest.raises(RuntimeError, match="a rank can fill 2"):
        areal.allocate_balanced_mbs_synced(spec(10, n_mbs=4), [5, 5])


def test_cost_needs_a_layout() -> None:
    with pytest.raises(ConfigError, match="layout"):
        areal.configure(cost=CostModel(per_token=1.0))


class _Mpu(types.SimpleNamespace):
    """megatron.core.parallel_state without tensor parallelism."""

    get_tensor_model_parallel_world_size = staticmethod(lambda: 1)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """AReaL's engine module with the functions that the replacement calls."""
    module = types.ModuleType("areal.engine.megatron_engine")
    module.mpu = _Mpu()  # type: ignore[attr-defined]
    module.gather_logprobs = lambda logits, labels, **_: logits[: len(labels), 0] + labels  # type: ignore[attr-defined]
    module.reassemble_cp_packed_logprobs = lambda values, ends: values.repeat(2)  # type: ignore[attr-defined]
    module.unpad_logits = lambda values, padding, ends, old: values[: len(values) - padding]  # type: ignore[attr-defined]
    package = types.ModuleType("areal.engine")
    package.megatron_engine = module  # type: ignore[attr-defined]
    for name, value in {
        "areal": types.ModuleType("areal"),
        "areal.engine": package,
        "areal.engine.megatron_engine": module,
    }.items():
        monkeypatch.setitem(sys.modules, name, value)
    own = {areal._FORWARD_RESULT: lambda self, output, inputs: "the host's"}
    monkeypatch.setattr(patching, "original", lambda name: own[name])
    config = types.SimpleNamespace(is_critic=False, temperature=1.0)
    return types.SimpleNamespace(enable_tree_training=False, config=config)


def test_outputs_of_cp_ranks_are_restored_with_the_option_only(
    engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    logits = torch.zeros(3, 1)
    inputs = {
        "input_ids": torch.tensor([7, 8, 9]),
        "_cp_local_labels": torch.tensor([1, 2, 3]),
        "_cp_padded_cu_seqlens": torch.tensor([0, 6]),
        "_cp_padding_length": 1,
    }
    areal._warn_of_positions.cache_clear()
    assert areal.compute_forward_result(engine, logits, inputs) == "the host's"
    assert "restore_cp_outputs=True" in caplog.text
    areal.configure(restore_cp_outputs=True)
    assert areal.compute_forward_result(engine, logits, inputs).tolist() == [1, 2, 3, 1, 2]
    engine.config.is_critic = True
    values = torch.tensor([[1.0], [2.0], [3.0]])
    assert areal.compute_forward_result(engine, values, inputs).tolist() == [1, 2, 3, 1, 2]
    engine.enable_tree_training = True
    assert areal.compute_forward_result(engine, values, inputs) == "the host's"


def test_outputs_that_are_not_split_are_the_hosts(engine: Any) -> None:
    """cp = 1, and AReaL 2.0, which gathers outputs first and gives hidden states in chunks."""
    areal.configure(restore_cp_outputs=True)
    inputs = {"input_ids": torch.tensor([7, 8, 9])}
    assert areal.compute_forward_result(engine, torch.zeros(3, 1), inputs) == "the host's"
