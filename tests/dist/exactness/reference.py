"""The reference: a single process that runs one unpadded sample at a time.

It uses nothing of megapack's execution: Megatron's own local spec with its own attention, whole
logits, and the objective written a second time. It writes per-sample gradients, losses and
log-probs; tests add them up to the expected result of a step.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.moe.router_replay import RouterReplayAction
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from megapack import launch
from megapack.job.config.sections import ModelConfig
from megapack.job.gpt import initialize_parallel, transformer_config
from megapack.job.gpt.init import initialize_by_name
from megapack.layout import Layout
from megapack.model.biases import repair_biases
from megapack.model.experts.router import moe_layers
from megapack.model.parameters import global_parameters
from megapack.samples import SampleBatch
from tests.dist import problem
from tests.dist.exactness.sparse_reference import (
    MaskedAttention,
    has_loss,
    indexer_loss,
    prepare,
)
from tests.dist.exactness.two_widths import TwoWidths
from tests.dist.streams import ModelWithStreams, add_streams, set_streams


class PlainProjection(torch.nn.Linear):
    """A projection to or from the latent width of experts, in torch alone."""

    def __init__(self, in_features: int, out_features: int, *, config: Any, **_: Any) -> None:
        super().__init__(in_features, out_features, bias=False, dtype=config.params_dtype)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return super().forward(x), None


def build(settings: ModelConfig) -> GPTModel:
    """The stock model, with the weights that megapack's model has."""
    config = transformer_config(settings, Layout())
    # `Routers.auxiliary` computes these losses; Megatron's own would be added to them.
    config.moe_aux_loss_coeff = 0.0
    config.moe_z_loss_coeff = None
    config.moe_enable_routing_replay = True
    # Plain formulas, also on a GPU.
    config.apply_rope_fusion = False
    config.bias_activation_fusion = False
    config.gradient_accumulation_fusion = False
    if isinstance(settings, ModelWithStreams):
        set_streams(config)
    # Megatron's layers of experts have projections of Transformer Engine.
    with mock.patch.multiple(moe_layer, HAVE_TE=True, TELinear=PlainProjection, create=True):
        if settings.layer_pattern is None:
            model = _gpt(settings, config)
        else:
            # Not at the top: Megatron-Core before 0.18 has no hybrid models.
            from tests.dist.exactness.recurrent_reference import build_hybrid

            attention = MaskedAttention if config.dsa_indexer_topk else TwoWidths
            model = build_hybrid(settings, config, attention)
    if config.dsa_indexer_topk:
        prepare(model)
    draw_weights(model, settings, parallel_state.get_tensor_model_parallel_group())
    return model.cuda()


def draw_weights(model: GPTModel, settings: ModelConfig, group: Any) -> None:
    """The weights that megapack's model has, in place."""
    initialize_by_name(
        [model],
        seed=problem.SEED,
        std=settings.init_std,
        num_layers=settings.num_layers / (2 if settings.layer_pattern else 1),
        zero_centered_norms=settings.layernorm_zero_centered_gamma,
        tp_group=group,
    )
    problem.slow_decays(model)


def _gpt(settings: ModelConfig, config: Any) -> GPTModel:
    specs = [
        get_gpt_layer_local_spec(
            num_experts=settings.num_experts if letter == "E" else None,
            qk_layernorm=settings.qk_layernorm,
            multi_latent_attention=config.multi_latent_attention,
            normalization=config.normalization,
        )
        for letter in settings.mlp_letters
    ]
    if config.multi_latent_attention:
        for spec in specs:
            parts = spec.submodules.self_attention.submodules
            parts.core_attention = MaskedAttention if config.dsa_indexer_topk else TwoWidths
    if isinstance(settings, ModelWithStreams):
        for spec in specs:
            add_streams(spec)
    block = TransformerBlockSubmodules(specs, layer_norm=WrappedTorchNorm)
    model = GPTModel(
        config=config,
        # The spec of the block, not of a layer: with the latter, the norm after the last layer
        # would be Transformer Engine's if it is installed.
        transformer_layer_spec=block,
        mtp_block_spec=get_gpt_mtp_block_spec(config, block, use_transformer_engine=False),
        vocab_size=128,
        max_sequence_length=settings.max_position_embeddings,
        share_embeddings_and_output_weights=not settings.untie_embeddings,
        position_embedding_type="rope",
        rotary_base=settings.rotary_base,
        rotary_percent=settings.rotary_percent,
        rope_scaling=settings.rope_scaling.kind == "llama3",
        rope_scaling_factor=settings.rope_scaling.factor,
    )
    if settings.linear_bias:
        repair_biases([model])
    return model


def logprobs_and_entropy(
    model: GPTModel, tokens_L: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-prob of each token except the first, and the entropy of its distribution."""
    log_p = log_distributions(model, tokens_L, temperature)[0][:-1]
    entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(1, tokens_L[1:, None])[:, 0], entropy


def log_distributions(model: GPTModel, tokens_L: Tensor, temperature: float) -> list[Tensor]:
    """Log-probs over the vocabulary at each position: of the next token, then of each MTP depth."""
    length = tokens_L.numel()
    hidden: list[Tensor] = []
    positions_L = torch.arange(length, device=tokens_L.device)
    mask = (positions_L[:, None] < positions_L)[None, None]
    last = model.mtp if model.config.mtp_num_layers else model.decoder
    hook = last.register_forward_hook(lambda module, inputs, output: hidden.append(output))
    # The labels are for Megatron's own losses, which are not used.
    model(tokens_L[None], positions_L[None], mask, labels=tokens_L[None])
    hook.remove()
    tied = model.share_embeddings_and_output_weights
    head = model.embedding.word_embeddings.weight if tied else model.output_layer.weight
    parts = hidden[0][:, 0].split(length)
    # The other rows are padding.
    head = head[: problem.VOCAB_SIZE]
    return [(part @ head.T / temperature).float().log_softmax(-1) for part in parts]


def mtp_losses(model: GPTModel, tokens: Tensor, mask: Tensor, temperature: float) -> list[Tensor]:
    """Per depth, the summed negative log-likelihood of the response tokens that it predicts."""
    losses = []
    for depth, log_p in enumerate(log_distributions(model, tokens, temperature)[1:], start=1):
        first = depth + 1
        at = [t for t in range(first, tokens.numel()) if mask[t]]
        losses.append(
            sum((-log_p[t - first, tokens[t]] for t in at), torch.zeros((), device=log_p.device))
        )
    return losses


def token_losses(logp: Tensor, entropy: Tensor, fields: dict[str, Tensor]) -> Tensor:
    """GRPO with dual clip, entropy bonus and k3, written independently of megapack.loss."""
    objective = problem.OBJECTIVE
    advantage = fields["advantages"]
    ratio = torch.exp(logp - fields["old_logprobs"])
    clipped = torch.clip(ratio, 1 - objective.clip_low, 1 + objective.clip_high)
    policy = -torch.min(ratio * advantage, clipped * advantage)
    if advantage < 0:
        policy = torch.min(policy, -objective.dual_clip * advantage)
    diff = fields["ref_logprobs"] - logp
    k3 = torch.exp(diff) - diff - 1
    return policy + objective.kl_coef * k3 - objective.entropy_coef * entropy


def replay(model: GPTModel, choices: Tensor) -> None:
    """Make Megatron's own replay use these experts [tokens, layers, top k] of one sample."""
    for number, layer in enumerate(model.decoder.layers):
        layer.mlp.router.router_replay.set_target_indices(choices[:, number])
        layer.mlp.router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)


class Routers:
    """Logits and choices of each layer's router in the last forward."""

    def __init__(self, model: GPTModel) -> None:
        self.logits: list[Tensor] = []
        self.chosen: list[Tensor] = []
        self._hooks = [
            module.register_forward_hook(self._keep)
            for name, module in model.named_modules()
            if name.endswith("mlp.router")
        ]

    def remove(self) -> None:
        """Stop recording."""
        for hook in self._hooks:
            hook.remove()

    def _keep(self, router: Any, inputs: tuple[Tensor, ...], output: Any) -> None:
        self.logits.append(inputs[0].flatten(0, 1).float() @ router.weight.float().T)
        self.chosen.append(output[1])

    def auxiliary(self, settings: ModelConfig) -> tuple[Tensor, Tensor]:
        """One sample's load-balancing loss and z-loss, times its tokens, over all layers."""
        balance = torch.zeros(())
        z = torch.zeros(())
        for logits in self.logits:
            scores = logits.softmax(-1)
            if settings.moe_score_function == "sigmoid":
                scores = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
            chosen = torch.zeros_like(scores)
            for token, best in enumerate(scores.topk(settings.moe_top_k).indices):
                chosen[token, best] = 1.0 / settings.moe_top_k
            product = chosen.mean(0) * scores.mean(0)
            balance = balance + settings.num_experts * product.sum() * len(logits)
            z = z + logits.exp().sum(-1).log().pow(2).sum()
        return balance, z


def run_auxiliary(model: GPTModel, tokens: Tensor, settings: ModelConfig) -> dict[str, Any]:
    """The auxiliary losses of one sample alone, weighted by its tokens, and their gradient."""
    model.zero_grad()
    routers = Routers(model)
    logprobs_and_entropy(model, tokens, 1.0)
    balance, z = routers.auxiliary(settings)
    loss = settings.moe_balance_loss_coef * balance + settings.moe_z_loss_coef * z
    found: dict[str, Any] = {"num_tokens": tokens.numel()}
    if has_loss(settings):
        own = indexer_loss(model)
        attentions = (settings.layer_pattern or "*" * settings.num_layers).count("*")
        found["indexer_loss"] = float(own.detach()) / attentions
        loss = loss + settings.indexer_loss_coef * own
    loss.backward()
    routers.remove()
    if settings.num_experts:
        num_layers = len(moe_layers(model.config))
        found["moe_balance_loss"] = float(balance.detach()) / num_layers
        found["moe_z_loss"] = float(z.detach()) / num_layers
        # Without the layers of multi-token prediction, which follow.
        found["chosen"] = torch.stack(routers.chosen[:num_layers], 1)
    return {**found, "grads": gradients(model)}


def gradients(model: GPTModel) -> dict[str, Tensor]:
    """The gradient of every parameter that has one."""
    return {
        name: param.grad.double().clone()
        for name, param in global_parameters(model)
        if param.grad is not None
    }


def run_sample(
    model: GPTModel, batch: SampleBatch, index: int, temperature: float
) -> dict[str, Any]:
    """One sample alone: its summed loss, the gradient of that, and its log-probs."""
    model.zero_grad()
    device = next(model.parameters()).device
    tokens = batch.tokens(index).to(device)
    mask = batch.response_mask(index)[1:].to(device)
    names = ("advantages", "old_logprobs", "ref_logprobs")
    fields = {name: batch.field(name, index).to(device) for name in names}
    predicted = {name: v if v.dim() == 0 else v[1:] for name, v in fields.items()}
    if tokens.numel() == 1:
        empty = torch.zeros(0)
        return {"loss": 0.0, "num_tokens": 0, "grads": {}, "logprobs": empty, "entropy": empty}
    logp, entropy = logprobs_and_entropy(model, tokens, temperature)
    loss = (token_losses(logp, entropy, predicted) * mask).sum()
    ahead = mtp_losses(model, tokens, batch.response_mask(index), temperature)
    coef = model.config.mtp_loss_scaling_factor / max(1, len(ahead))
    (loss + coef * sum(ahead)).backward()
    return {
        "loss": float(loss.detach()),
        "mtp_losses": [float(value.detach()) for value in ahead],
        "num_tokens": int(mask.sum()),
        "grads": gradients(model),
        "logprobs": logp.detach(),
        "entropy": entropy.detach(),
    }


def run_variant(name: str, batch: SampleBatch) -> list[dict[str, Any]]:
    """Run every sample alone, on one of the problem's models with a number of layers: `moe-4`."""
    variant, num_layers = name.rsplit("-", 1)
    settings, temperature = problem.MODELS[variant]
    few = problem.shallow(settings)
    settings = few if few.num_layers == int(num_layers) else settings
    model = build(settings)
    # Megatron's, whose size is that of the first model of a process.
    MTPLossLoggingHelper.tracker = {}
    results = []
    for i in range(len(batch)):
        if variant == "moe_replay":
            replay(model, problem.choices(settings.num_layers)[i])
        sample = run_sample(model, batch, i, temperature)
        if settings.num_experts or has_loss(settings):
            sample["auxiliary"] = run_auxiliary(model, batch.tokens(i), settings)
        results.append(sample)
    return results


def main(folder: str, *models: str) -> None:
    """Write the reference: one file for each of these models."""
    launch.start("cpu")
    initialize_parallel(Layout(), problem.SEED)
    batch = problem.make_batch()
    for name in models:
        torch.save(run_variant(name, batch), Path(folder) / f"{name}.pt")
    launch.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
