"""What a training loop changes and leaves behind in a model between an adapter's steps."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.spawn import run_code

pytestmark = pytest.mark.unit

CHILD = """
import json, logging, warnings
warnings.simplefilter("ignore")
import torch
from megapack import Layout, build_dp_schedule, launch
from megapack.job.config.sections import ModelConfig
from megapack.errors import ConfigError
from megapack.job.gpt import build_model, initialize_parallel
from megapack.loss import SFT
from megapack.ranks.links import Ranks
from megapack.samples import SampleBatch
from megapack.schedule import ScheduleAdapter

launch.start("cpu")
layout = Layout()
initialize_parallel(layout, 1)
sizes = ModelConfig(
    num_layers=2, hidden_size=32, num_attention_heads=4, init_std=0.2, untie_embeddings=True
)
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
def step():
    adapters["megatron"].step(plan, batch, objective=SFT())

def refusal_of(attempt):
    try:
        attempt()
    except ConfigError as error:
        return str(error)
    return ""

class Log(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())

lines = []
logging.getLogger("megapack").addHandler(Log())
params = dict(chunk.module.named_parameters())
weight = params["output_layer.weight"]

# Left behind in .grad: the gradient itself under DDP's name, zeros, and something else.
for p in params.values():
    p.grad = p.main_grad
found = {"alias": torch.equal(gradients(), before)}
for p in params.values():
    p.grad = p.main_grad.view(-1)[:p.numel()].view_as(p)
found["view"] = torch.equal(gradients("operations"), before)
weight.grad = torch.zeros_like(weight)
found["zeros"] = torch.equal(gradients(), before)
weight.grad = weight.main_grad.clone()
found["copy"] = refusal_of(gradients)
weight.grad = None

# Gradients add up over steps, and not over an update.
chunk.zero_grad_buffer()
step()
step()
found["sum"] = float((weight.main_grad.norm() / 2).item())
found["norm"] = float(before[-weight.numel():].norm())
values = weight.detach().clone()
with torch.no_grad():
    weight += 1e-3
found["updated"] = refusal_of(step)
with torch.no_grad():
    weight.copy_(values)

with torch.inference_mode():
    forward = adapters["megatron"].forward(plan, batch)
batch.set_field("old_logprobs", forward["logprobs"])
with torch.autocast("cpu", dtype=torch.bfloat16):
    found["autocast"] = refusal_of(gradients)
    found["autocast_forward"] = refusal_of(lambda: adapters["megatron"].forward(plan, batch))
found["no_grad"] = refusal_of(torch.no_grad()(gradients))
# The next step is announced and packed before the loop changes the mode.
adapters["megatron"].step(plan, batch, objective=SFT(), next_step=0)
chunk.eval()
found["evaluation"] = refusal_of(gradients)
chunk.train()

# A hook sees the gradient, also of the head, which adds it to main_grad itself otherwise.
seen = []
hook = weight.register_hook(lambda grad: seen.append(grad.clone()))
found["hooked"] = float((gradients() - before).norm() / before.norm())
total = sum(seen)
found["seen"] = float((total - weight.main_grad).norm() / weight.main_grad.norm())
chunk.module.output_layer.gradient_accumulation_fusion = True
found["hook"] = refusal_of(gradients)
chunk.module.output_layer.gradient_accumulation_fusion = False
hook.remove()

norm = params["decoder.final_layernorm.weight"]
norm.requires_grad_(False)
chunk.ddp_config.overlap_grad_reduce = True
found["frozen"] = refusal_of(gradients)
chunk.ddp_config.overlap_grad_reduce = False
norm.requires_grad_(True)
last = chunk.module.decoder.final_layernorm
last.scale = torch.nn.Parameter(torch.ones_like(norm))
added = last.register_forward_hook(lambda module, _, output: output * module.scale)
gradients()
wanted = norm.main_grad * norm.detach()
found["added"] = float((last.scale.grad - wanted).norm() / wanted.norm())
last.scale.grad = None
for buffer in chunk.buffers:
    buffer.data_parallel_world_size = 2
found["unfrozen"] = refusal_of(gradients)
for buffer in chunk.buffers:
    buffer.data_parallel_world_size = 1
added.remove()
del last.scale

config.hidden_dropout = 0.1
gradients()
gradients()
config.hidden_dropout = 0.0
found["dropout"] = [line for line in lines if "dropout" in line]
assert torch.equal(gradients(), before)
found |= {
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


def test_a_gradient_that_is_left_behind_does_not_count_twice(found: dict[str, Any]) -> None:
    assert found["alias"]
    assert found["view"]
    assert found["zeros"]
    assert "output_layer.weight.grad holds a gradient" in found["copy"]
    assert "optimizer.zero_grad()" in found["copy"]


def test_gradients_add_up_over_steps_but_not_over_an_update(found: dict[str, Any]) -> None:
    assert found["sum"] == pytest.approx(found["norm"], rel=1e-6)
    assert "zero_grad_buffer() on each chunk" in found["updated"]


def test_hooks_see_gradients_or_are_refused(found: dict[str, Any]) -> None:
    assert found["hooked"] < 1e-6
    assert found["seen"] < 1e-6
    assert "output_layer.weight has a hook" in found["hook"]


def test_parameters_that_ddp_does_not_know_train_on_one_rank(found: dict[str, Any]) -> None:
    assert found["added"] < 1e-6


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("no_grad", "torch.no_grad()"),
        ("autocast", "torch.autocast is on"),
        ("autocast_forward", "torch.autocast is on"),
        ("evaluation", "call train() on each chunk"),
        ("frozen", "decoder.final_layernorm.weight was frozen after"),
        ("unfrozen", "decoder.final_layernorm.scale requires a gradient and has no main_grad"),
    ],
)
def test_states_that_give_other_gradients_are_refused(
    found: dict[str, Any], name: str, text: str
) -> None:
    assert text in found[name]


def test_dropout_is_warned_of_once(found: dict[str, Any]) -> None:
    (line,) = found["dropout"]
    assert line.startswith("hidden_dropout=0.1: dropout draws other numbers")
