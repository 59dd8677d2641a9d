"""The judge: a single process that runs one unpadded sample at a time.

Nothing of megapack's execution is in it: Megatron's own local spec with its own attention, whole
logits, and the objective written out again. It leaves per-sample gradients, losses and log-probs,
from which each test adds up what a step must give.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from torch import Tensor

from megapack import launch
from megapack.init import global_parameters, initialize_by_name
from megapack.layout import Layout
from megapack.model import initialize_parallel, transformer_config
from megapack.samples import SampleBatch
from megapack.train_config import ModelConfig
from tests.dist import problem


def build(settings: ModelConfig) -> GPTModel:
    """The stock model with the same weights."""
    config = transformer_config(settings, Layout())
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization=config.normalization),
        vocab_size=128,
        max_sequence_length=settings.max_position_embeddings,
        share_embeddings_and_output_weights=not settings.untie_embeddings,
        position_embedding_type="rope",
        rotary_base=settings.rotary_base,
    )
    initialize_by_name(
        [model],
        seed=problem.SEED,
        std=settings.init_std,
        num_layers=problem.NUM_LAYERS,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
    )
    return model


def logprobs_and_entropy(
    model: GPTModel, tokens_L: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-prob of each token but the first given those before it, and the entropy there."""
    length = tokens_L.numel()
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    logits = model(tokens_L[None], torch.arange(length)[None], mask)[0, :-1].float()
    log_p = (logits / temperature).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(1, tokens_L[1:, None])[:, 0], entropy


def token_losses(logp: Tensor, entropy: Tensor, fields: dict[str, Tensor]) -> Tensor:
    """GRPO with dual clip, entropy bonus and k3, written out independently of megapack.loss."""
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


def run_sample(
    model: GPTModel, batch: SampleBatch, index: int, temperature: float
) -> dict[str, Any]:
    """One sample alone: its summed loss, the gradient of that, and its log-probs."""
    model.zero_grad()
    tokens, mask = batch.tokens(index), batch.response_mask(index)[1:]
    names = ("advantages", "old_logprobs", "ref_logprobs")
    fields = {name: batch.field(name, index) for name in names}
    at = {name: v if v.dim() == 0 else v[1:] for name, v in fields.items()}
    if tokens.numel() == 1:
        none = torch.zeros(0)
        return {"loss": 0.0, "num_tokens": 0, "grads": {}, "logprobs": none, "entropy": none}
    logp, entropy = logprobs_and_entropy(model, tokens, temperature)
    loss = (token_losses(logp, entropy, at) * mask).sum()
    loss.backward()
    return {
        "loss": float(loss.detach()),
        "num_tokens": int(mask.sum()),
        "grads": {n: p.grad.double().clone() for n, p in global_parameters(model)},
        "logprobs": logp.detach(),
        "entropy": entropy.detach(),
    }


def main(path: str) -> None:
    """Write the reference to `path`."""
    launch.start("cpu")
    initialize_parallel(Layout(), problem.SEED)
    batch, found = problem.make_batch(), {}
    for variant, (settings, temperature) in problem.MODELS.items():
        model = build(settings)
        found[variant] = [run_sample(model, batch, i, temperature) for i in range(len(batch))]
    torch.save(found, path)
    launch.stop()


if __name__ == "__main__":
    main(sys.argv[1])
