"""Settings of a model that a training loop changes between an adapter's steps."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.spawn import run_code

pytestmark = pytest.mark.unit

CHILD = """
import json, warnings
warnings.simplefilter("ignore")
import torch
from megapack import Layout, build_dp_schedule, launch
from megapack.config.sections import ModelConfig
from megapack.errors import ConfigError
from megapack.gpt import build_model, initialize_parallel
from megapack.loss import SFT
from megapack.ranks.links import Ranks
from megapack.samples import SampleBatch
from megapack.schedule import ScheduleAdapter

launch.start("cpu")
layout = Layout()
initialize_parallel(layout, 1)
sizes = ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=4, init_std=0.2)
(chunk,) = build_model(sizes, layout, vocab_size=128, seed=1, distributed_optimizer=False)
config = chunk.module.config
ids = torch.randint(0, 128, (3, 12), generator=torch.Generator().manual_seed(2))
batch = SampleBatch.from_prompt_response(list(ids[:, :4]), list(ids[:, 4:]))
plan = build_dp_schedule(batch.lengths, layout=layout, max_tokens_per_gpu=64)
layers = [p for name, p in chunk.named_parameters() if "embedding" not in name]
adapters = {
    executor: ScheduleAdapter([chunk], layout=layout, ranks=Ranks.alone(), executor=executor)
    for executor in ("megatron", "operations")
}

def gradients(executor="megatron"):
    chunk.zero_grad_buffer()
    adapters[executor].step(plan, batch, objective=SFT())
    return torch.cat([p.main_grad.flatten() for p in layers])

def refusal(executor="megatron", **settings):
    before = {name: getattr(config, name) for name in settings}
    vars(config).update(settings)
    try:
        gradients(executor)
    except ConfigError as error:
        return str(error)
    finally:
        vars(config).update(before)
    return ""

before = gradients()
assert torch.equal(gradients("operations"), before)
found = {
    "sequence parallelism": refusal(sequence_parallel=True),
    "offloading": refusal("operations", fine_grained_activation_offloading=True),
}
for param in chunk.module.embedding.parameters():
    param.requires_grad_(False)
config.recompute_granularity = "full"
config.recompute_method, config.recompute_num_layers = "uniform", 1
after = gradients()
found["error"] = float((after - before).norm() / before.norm())
launch.stop()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Results of the child."""
    return run_code(CHILD)


def test_settings_are_checked_at_each_step(found: dict[str, Any]) -> None:
    assert "config.sequence_parallel=True" in found["sequence parallelism"]
    assert "config.fine_grained_activation_offloading=True" in found["offloading"]


def test_layers_after_an_embedding_frozen_between_steps_still_train(found: dict[str, Any]) -> None:
    """Under recompute, which was switched on at the same time."""
    assert found["error"] < 1e-6
