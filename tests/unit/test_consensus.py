"""Ranks agree before they communicate; here one process, and the messages about many."""

from __future__ import annotations

import pytest
import torch

from megapack import consensus
from megapack.consensus import agree, agree_with_flags
from megapack.errors import DataError, MegapackError, ScheduleError
from tests.job_in_process import job_of_one

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")
Rank = tuple[str, list[str]]


def rank(*values: str, error: str = "") -> Rank:
    """What one rank tells: its error, and its values."""
    return error, list(values)


def pretend(monkeypatch: pytest.MonkeyPatch, *ranks: Rank) -> None:
    """Make the ranks these, not all alike."""
    alike = len({tuple(values) for _, values in ranks}) == 1 and not any(e for e, _ in ranks)
    monkeypatch.setattr(consensus, "_are_alike", lambda *_: alike)
    monkeypatch.setattr(consensus, "_exchange", lambda *_: list(ranks))


def test_one_process_gets_the_result_of_its_work() -> None:
    assert agree(lambda: [1, 2], device=CPU) == [1, 2]
    assert agree(lambda: [1, 2], device=CPU, same={"plan": "a"}) == [1, 2]


def test_work_runs_once() -> None:
    calls: list[int] = []
    agree(lambda: calls.append(1), device=CPU)
    assert calls == [1]


def test_the_error_of_a_rank_is_named_and_chained(monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> None:
        raise DataError("sample 3 has no tokens")

    pretend(monkeypatch, rank(error="DataError: sample 3 has no tokens"), rank())
    with pytest.raises(ScheduleError, match=r"1 of 2 ranks.*rank 0: DataError: sample 3") as caught:
        agree(work, device=CPU)
    assert isinstance(caught.value, MegapackError)
    assert isinstance(caught.value.__cause__, DataError)
    assert caught.value.on_all_ranks


def test_an_error_of_all_ranks_is_raised_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> None:
        raise DataError("bad line")

    pretend(monkeypatch, *[rank(error="DataError: bad line")] * 3)
    with pytest.raises(DataError, match=r"^bad line$"):
        agree(work, device=CPU)


def test_an_error_without_a_message_is_an_error_still(monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> None:
        raise AssertionError

    with pytest.raises(AssertionError):
        agree(work, device=CPU)
    pretend(monkeypatch, rank(error="AssertionError: "), rank())
    with pytest.raises(ScheduleError, match="rank 0: AssertionError"):
        agree(work, device=CPU)


def test_flags_come_back_where_nothing_fails() -> None:
    calls: list[int] = []
    assert agree_with_flags(lambda: calls.append(1), [True, False], device=CPU) == [True, False]
    assert calls == [1]


def test_a_failure_beside_flags_is_raised() -> None:
    def work() -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        agree_with_flags(work, [True], device=CPU)


def test_ctrl_c_is_not_an_error_of_the_work() -> None:
    def work() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        agree(work, device=CPU)


def test_a_rank_that_succeeded_raises_for_those_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(monkeypatch, rank(), rank(error="DataError: a"), rank(), rank(error="OSError: b"))
    with pytest.raises(ScheduleError, match=r"2 of 4 ranks.*rank 1: DataError: a; rank 3: OSErr"):
        agree(lambda: 1, device=CPU)


def test_a_failure_is_told_before_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, rank("a"), rank("b", error="OSError: disk"))
    with pytest.raises(ScheduleError, match="disk"):
        agree(lambda: 1, device=CPU, same={"plan": "a"})


def test_the_ranks_that_differ_are_named_with_the_thing(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, *[rank("same", text) for text in ("a", "b", "a", "c", "a")])
    with pytest.raises(ScheduleError, match=r"ranks \[1, 3\] differ from the other 3 in call"):
        agree(lambda: 1, device=CPU, same={"plan": "same", "call": "a"})


def test_the_first_thing_that_differs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, rank("a", "x"), rank("a", "x"), rank("b", "y"))
    with pytest.raises(ScheduleError, match=r"ranks \[2\] differ from the other 2 in plan"):
        agree(lambda: 1, device=CPU, same={"plan": "a", "call": "x"})


def test_equal_values_of_many_ranks_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, *[rank("a", "x")] * 3)
    assert agree(lambda: 7, device=CPU, same={"plan": "a", "call": "x"}) == 7


def test_short_values_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, rank("M", "8"), rank("M", "8"), rank("M", "16"))
    with pytest.raises(ScheduleError, match=r"in M \(rank 2: '16', most: '8"):
        agree(lambda: 1, device=CPU, same={"plan": "M", "M": "8"})


@pytest.mark.parametrize("message", ["", "OSError: disk", "DataError: é" + "é" * 1000])
@pytest.mark.parametrize("values", [[], ["", "a"], ["é" * 50]])
def test_what_a_rank_tells_is_read_back(message: str, values: list[str]) -> None:
    row = consensus._packed(message, consensus._MESSAGE_BYTES)
    row += b"".join(consensus._packed(value, consensus._VALUE_BYTES) for value in values)
    text, read = consensus._unpacked(row, len(values))
    assert text == message.encode()[: consensus._MESSAGE_BYTES].decode(errors="replace")
    assert read == [v.encode()[: consensus._VALUE_BYTES].decode(errors="replace") for v in values]


def test_long_values_differ_by_their_digest() -> None:
    one, other = "x" * 200 + "1", "x" * 200 + "2"
    assert consensus._shortened("abc") == "abc"
    assert consensus._shortened(one) != consensus._shortened(other)
    assert len(consensus._shortened(one).encode()) <= consensus._VALUE_BYTES
    assert consensus._number(one) != consensus._number(other)
    assert 0 <= consensus._number(one) < 2**62


def test_one_process_goes_first_and_alone() -> None:
    calls: list[int] = []
    assert consensus.agree_one_per_node_first(lambda: calls.append(1) or 7, device=CPU) == 7
    assert calls == [1]
    with pytest.raises(DataError, match="bad line"):
        consensus.agree_one_per_node_first(_fail, device=CPU)


def _fail() -> None:
    raise DataError("bad line")


def test_a_path_that_is_no_text_can_be_told() -> None:
    def work() -> None:
        raise DataError("runs/\udcff: no such file")

    with job_of_one(), pytest.raises(DataError, match="no such file"):
        agree(work, device=CPU, same={"runs_dir": "runs/\udcff"})
