"""The critic's learning rate, and its weights from the policy's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megapack import ConfigError, Layout
from megapack.config import load_config
from megapack.job.config.critic import critic_model
from megapack.job.config.model import ModelConfig
from megapack.job.config.sections import TrainConfig
from megapack.job.train.learner import copy_weights, critic_optim
from tests.unit.job.config.hybrid_configs import HYBRID
from tests.unit.job.config.published_configs import CONFIGS

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


def folder(path: Path, name: str, **changes: Any) -> str:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**CONFIGS[name], **changes}))
    return str(path)


def test_a_critic_of_a_folder_has_its_sizes_and_the_policys_settings(tmp_path: Path) -> None:
    path = folder(tmp_path / "critic", "Qwen3-1.7B")
    policy = ModelConfig.from_hf(
        folder(tmp_path / "policy", "Qwen3-4B"), dtype="bf16", recompute="full", freeze=("*.mlp.*",)
    )
    critic = critic_model(policy, path)
    assert (critic.num_layers, critic.hidden_size, policy.num_layers) == (28, 2048, 36)
    assert (critic.dtype, critic.recompute) == ("bf16", "full")
    assert (critic.hf_path, critic.untie_embeddings, critic.freeze) == (None, True, ())


def test_a_critic_of_a_folder_must_fit_the_policy(tmp_path: Path) -> None:
    other = folder(tmp_path / "other", "Qwen3-1.7B", vocab_size=320)
    hybrid = tmp_path / "hybrid"
    hybrid.mkdir()
    (hybrid / "config.json").write_text(json.dumps({**HYBRID["qwen3_next"], "vocab_size": 259}))
    for path, message in (
        (other, "has a vocabulary of 320 tokens and the policy one of 259"),
        (str(hybrid), "hybrid model with other layers than the policy's"),
        (str(tmp_path / "none"), "critic.hf_path: .* cannot be read"),
    ):
        with pytest.raises(ConfigError, match=message):
            config(f"critic.hf_path={path}")
    short = folder(tmp_path / "short", "Qwen3-1.7B", vocab_size=259, max_position_embeddings=512)
    with pytest.raises(ConfigError, match=r"supports samples of 512 tokens, data\.max_length is"):
        config(f"critic.hf_path={short}")
    for key in (f"critic.hf_path={short}", "critic.warmup_steps=1"):
        with pytest.raises(ConfigError, match="has no effect without a critic"):
            config("critic.enabled=false", "objective.gae_lambda=1", key)


def test_memory_and_cost_are_of_the_critics_sizes(tmp_path: Path) -> None:
    path = folder(tmp_path / "critic", "Qwen3-1.7B", vocab_size=259)
    small, large = config(), config(f"critic.hf_path={path}")
    layout = Layout(dp=2)
    own, other = (
        one.memory_model().stage(layout, 0, live_tokens=1024, row_tokens=1024)
        for one in (small, large)
    )
    assert other.critic > 1000 * own.critic
    assert other.activations > own.activations
    assert (other.parameters, other.head) == (own.parameters, own.head)
    seconds = [
        one.cost_from_sizes(layout, value_head=True).forward_seconds(
            layout, row_tokens=1024, tokens_sq=1024**2, num_samples=1
        )
        for one in (small, large)
    ]
    assert seconds[1] > seconds[0]


def test_the_reference_of_a_folder_must_have_the_policys_sizes(tmp_path: Path) -> None:
    path = folder(tmp_path / "reference", "Qwen3-1.7B")
    with pytest.raises(ConfigError, match=r"reference_hf_path: model\.\w+ is .* but .* gives"):
        config(f"objective.reference_hf_path={path}", "objective.kl_in_reward_coef=0.1")
    with pytest.raises(ConfigError, match=r"reference_hf_path=.* has no effect under kind=ppo"):
        config(f"objective.reference_hf_path={path}")


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
