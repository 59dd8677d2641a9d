"""Known warnings of Megatron-Core are silenced, and no others."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator

import pytest

from megapack.base.known_warnings import LOGGED, quiet_known_warnings

pytestmark = pytest.mark.unit

DDP = "megatron.core.distributed.distributed_data_parallel"


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quiet_known_warnings()
        yield
    for name in LOGGED:
        logging.getLogger(name).filters.clear()


@pytest.mark.parametrize(
    ("name", "message", "shown"),
    [
        ("megatron.core.models.gpt.gpt_model", "GPTModel IS DEPRECATED. GPTModel is", False),
        ("megatron.core.models.gpt.gpt_model", "a row is lost", True),
        (DDP, "DistributedDataParallel: full_param_layout not provided with", False),
        (DDP, "GPTModel IS DEPRECATED", True),
    ],
)
def test_announcements_are_not_logged(
    name: str, message: str, shown: bool, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger(name).warning(message)
    assert [record.getMessage() for record in caplog.records] == [message] * shown


def test_other_warnings_are_shown() -> None:
    warnings.warn("absl.logging is not installed. Using logging.getLogger", stacklevel=1)
    with pytest.raises(UserWarning, match="is installed twice"):
        warnings.warn("absl.logging is installed twice", stacklevel=1)
