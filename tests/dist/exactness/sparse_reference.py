"""Sparse attention of one unpadded sample, with all scores and a mask: for the reference.

Written from transformers' `DeepseekV32Indexer` and the loss of DeepSeek-V3.2's paper, with
autograd for all gradients.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megapack.job.config.sections import ModelConfig
from tests.dist.exactness.two_widths import TwoWidths


class Indexer(torch.nn.Module):
    """Weights with the names of megapack's model."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        heads, width = config.dsa_indexer_n_heads, config.dsa_indexer_head_dim
        self.linear_wq_b = torch.nn.Linear(config.q_lora_rank, heads * width, bias=False)
        self.linear_wk = torch.nn.Linear(config.hidden_size, width, bias=False)
        self.k_norm = torch.nn.LayerNorm(width, eps=1e-6)
        self.linear_weights_proj = torch.nn.Linear(config.hidden_size, heads, bias=False)


class MaskedAttention(TwoWidths):
    """Attention of each token to the top-k before it.

    Attributes:
        rotary: the layer's rotary embedding, see `prepare`.
        loss: of the last forward, summed over tokens.
    """

    requires_dsa_inputs = True

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.scale = kwargs["softmax_scale"]
        self.indexer = Indexer(config)
        self.rotary: Any = None
        self.loss: Tensor = torch.zeros(())

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: Any, x: Tensor, qr: Tensor, **__: Any
    ) -> Tensor:
        """[tokens, 1, heads, channels] each -> [tokens, 1, heads * channels of a value]."""
        scores = self.scores(x[:, 0].detach(), qr[:, 0].detach())
        count = len(scores)
        before = torch.ones(count, count, dtype=torch.bool).tril()
        scores = scores.masked_fill(~before, -torch.inf)
        best = scores.topk(min(count, self.config.dsa_indexer_topk)).indices
        kept = torch.zeros_like(before).scatter(1, best, True) & before
        logits = torch.einsum("qbhd,kbhd->hqk", query, key) * self.scale
        probs = logits.masked_fill(~kept, -torch.inf).softmax(-1)
        target = probs.detach().mean(0)
        own = scores.masked_fill(~kept, -torch.inf).log_softmax(-1).masked_fill(~kept, 0.0)
        self.loss = F.kl_div(own, target, reduction="sum")
        return torch.einsum("hqk,kbhv->qbhv", probs, value).flatten(2)

    def scores(self, x: Tensor, qr: Tensor) -> Tensor:
        """Of each token for each other one."""
        parts = self.indexer
        heads, width = self.config.dsa_indexer_n_heads, self.config.dsa_indexer_head_dim
        table = self.rotary(len(x))
        angles = (table[0] if isinstance(table, tuple) else table)[:, 0, 0].chunk(2, dim=-1)[0]
        q = turned(parts.linear_wq_b(qr).view(-1, heads, width), angles[:, None])
        k = turned(parts.k_norm(parts.linear_wk(x)), angles)
        weights = parts.linear_weights_proj(x) * heads**-0.5
        return torch.einsum("qh,qhk->qk", weights, F.relu(q @ k.T * width**-0.5))


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """Pairs of channels i and i + n, of the first 2n, turned as complex numbers."""
    count = angles.shape[-1]
    pairs = torch.complex(x[..., :count], x[..., count : 2 * count])
    pairs = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([pairs.real, pairs.imag, x[..., 2 * count :]], dim=-1)


def prepare(model: GPTModel) -> None:
    """Let Megatron hand the inputs of the indexer to core attention."""
    model.config.experimental_attention_variant = "dsa"
    for core, attention in _sparse(model):
        core.rotary = attention.rotary_pos_emb


def indexer_loss(model: GPTModel) -> Tensor:
    """The last forward's loss, summed over tokens and layers."""
    return torch.stack([core.loss for core, _ in _sparse(model)]).sum()


def _sparse(model: GPTModel) -> list[tuple[Any, Any]]:
    """Each core attention, and what it is part of; MLPs of a HybridModel have none."""
    attentions = (getattr(layer, "self_attention", None) for layer in model.decoder.layers)
    return [(one.core_attention, one) for one in attentions if hasattr(one, "core_attention")]


def has_loss(settings: ModelConfig) -> bool:
    """Whether an indexer is trained."""
    return settings.indexer_loss_coef > 0
