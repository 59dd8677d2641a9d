"""The critic's learning rate, and its weights from the policy's."""

from __future__ import annotations

import pytest
import torch

from megapack.config import load_config
from megapack.config.critic import critic_model
from megapack.config.model import ModelConfig
from megapack.config.sections import TrainConfig
from megapack.train.critic import copy_weights, critic_optim

pytestmark = pytest.mark.unit


def config(*overrides: str) -> TrainConfig:
    return load_config("configs/ppo_critic_tiny_dp2_cpu.yaml", list(overrides), TrainConfig)


def test_the_lowest_learning_rate_changes_with_the_highest() -> None:
    found = critic_optim(config("optim.lr=1e-4", "optim.min_lr=1e-5", "critic.lr=2e-3"))
    assert (found.lr, found.min_lr) == (2e-3, pytest.approx(2e-4))
    same = config("critic.lr=null")
    assert critic_optim(same) == same.optim
    frozen = critic_optim(config("optim.lr=0", "critic.lr=1e-3"))
    assert (frozen.lr, frozen.min_lr) == (1e-3, 0)


def test_the_critics_model_trains_all_of_the_policys_layers() -> None:
    policy = ModelConfig(num_layers=6, freeze=("embedding.*",), mtp_num_layers=1)
    critic = critic_model(policy)
    assert (critic.num_layers, critic.untie_embeddings) == (6, True)
    assert (critic.freeze, critic.mtp_num_layers) == ((), 0)
    hybrid = {"num_layers": 2, "hybrid_layer_pattern": "*-/*-", "mtp_num_layers": 1}
    assert critic_model(ModelConfig(**hybrid)).hybrid_layer_pattern == "*-"


class Chunk(torch.nn.Module):
    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(5, 3)
        self.output_layer = torch.nn.Linear(3, outputs, bias=False)
        self.register_buffer("expert_bias", torch.rand(4))


def test_all_weights_but_the_head_are_copied() -> None:
    policy = Chunk(5)
    critic = Chunk(1)
    head = critic.output_layer.weight.clone()
    copy_weights([policy], [critic])
    assert torch.equal(critic.embedding.weight, policy.embedding.weight)
    assert torch.equal(critic.expert_bias, policy.expert_bias)
    assert torch.equal(critic.output_layer.weight, head)
