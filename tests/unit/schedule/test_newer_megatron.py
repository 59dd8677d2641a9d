"""Megatron-Core that is newer than tested is named once per job; what is new in it is known."""

from __future__ import annotations

from typing import Any

import megatron.core
import pytest
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel

from megapack.base.megatron import NEWEST_TESTED, TESTED_RELEASES, newer_than_tested
from megapack.schedule import checks
from tests.dist.spawn import run_code

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("version", [*TESTED_RELEASES, NEWEST_TESTED, f"{NEWEST_TESTED}rc0+abc"])
def test_tested_versions_have_no_line(version: str) -> None:
    assert newer_than_tested(version) == ""


@pytest.mark.parametrize(
    ("version", "rank", "num_lines"),
    [("9.1.0", 0, 1), ("9.1.0", 3, 0), ("9.1.0", None, 1), (NEWEST_TESTED, 0, 0)],
)
def test_the_first_rank_logs_one_line(
    version: str,
    rank: int | None,
    num_lines: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(megatron.core, "__version__", version)
    monkeypatch.setattr(dist, "is_initialized", lambda: rank is not None)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    checks.warn_of_newer_version.cache_clear()
    try:
        checks.warn_of_newer_version()
        checks.warn_of_newer_version()
    finally:
        checks.warn_of_newer_version.cache_clear()
    assert [record.levelname for record in caplog.records] == ["WARNING"] * num_lines


CHILD = """
import json, logging, warnings
warnings.simplefilter("ignore")
import megatron.core, torch
from megapack import Layout, build_dp_schedule, launch
from megapack.job.config.sections import ModelConfig
from megapack.job.gpt import build_model, initialize_parallel
from megapack.model.attention.packed import packed_seq_params
from megapack.ranks.links import Ranks
from megapack.samples import SampleBatch
from megapack.schedule import ScheduleAdapter

lines = []
class Lines(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())
logging.getLogger("megapack").addHandler(Lines())

launch.start("cpu")
layout = Layout()
initialize_parallel(layout, 1)
sizes = ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=4, init_std=0.2)
chunks = build_model(sizes, layout, vocab_size=128, seed=1, distributed_optimizer=False)
model = chunks[0].module
model.config.use_mup = True
model.config.mup_output_mult = 0.25

ids = torch.randint(0, 128, (3, 12), generator=torch.Generator().manual_seed(2))
batch = SampleBatch.from_prompt_response(list(ids[:, :4]), list(ids[:, 4:]))
plan = build_dp_schedule(batch.lengths, layout=layout, max_tokens_per_gpu=64)
megatron.core.__version__ = "9.1.0"
def logprobs(temperature):
    adapter = ScheduleAdapter(chunks, layout=layout, ranks=Ranks.alone(), temperature=temperature)
    return adapter.forward(plan, batch)["logprobs"]

errors = []
for temperature in (1.0, 0.5):
    for sample, found in zip(ids, logprobs(temperature)):
        with torch.no_grad():
            positions = torch.arange(12)[None]
            params = packed_seq_params(torch.tensor([0, 12], dtype=torch.int32), 12, 12)
            logits = model(sample[None], positions, None, packed_seq_params=params)[0].float()
        log_p = (logits[:, :128] / temperature).log_softmax(-1)
        expected = log_p[:-1].gather(1, sample[1:, None])[3:, 0]
        errors.append(float((found[4:] - expected).abs().max()))
launch.stop()
print(json.dumps({"lines": lines, "errors": errors}))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Results of the child."""
    return run_code(CHILD)


def test_adapters_of_a_process_log_the_line_once(found: dict[str, Any]) -> None:
    assert found["lines"] == [newer_than_tested("9.1.0")]


@pytest.mark.skipif(
    not hasattr(GPTModel, "_scale_logits"), reason="Megatron-Core scales logits since 0.17"
)
def test_logits_are_scaled_as_megatron_scales_them(found: dict[str, Any]) -> None:
    """It scales what the output layer returns: hidden states in a pass of the adapter."""
    assert max(found["errors"]) < 1e-5
