"""What is refused before ranks meet."""

from __future__ import annotations

import pytest
import torch

from megapack import launch
from megapack.errors import ConfigError

pytestmark = pytest.mark.unit


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "2")
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "4")
    message = r"LOCAL_RANK=2, but .* 2 GPU\(s\); .*--nproc-per-node=2"
    with pytest.raises(ConfigError, match=message):
        launch.start("cuda")


@pytest.mark.parametrize("name", ["LOCAL_RANK", "MASTER_PORT"])
def test_half_of_torchruns_environment_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for one in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(one, "1")
    monkeypatch.delenv(name)
    with pytest.raises(ConfigError, match=f"RANK is set but {name} is not; start with torchrun"):
        launch.start("cpu")
