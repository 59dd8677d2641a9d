"""The indexer of DeepSeek-V3.2, and multi-latent attention that has one.

As transformers computes it (`DeepseekV32Indexer`): queries of the indexer's heads are made of the
layer's normalised latent of queries, one key per token and a weight per head of its hidden state. A
key has a LayerNorm. The first channels of queries and keys are rotated, channel i of n with channel
i + n / 2, and in GLM-5 with its neighbour. The published code also multiplies both by a Hadamard
matrix, for FP8; it is orthogonal, so that their products stay.

Every tensor-parallel rank has the whole indexer. With sequence parallelism it makes the index of
its own tokens, gathers that of the others, and finds the same scores as they.

Shape suffixes: T tokens of this rank's row, t those of them that this tensor-parallel rank holds.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megapack.errors import ScheduleError
from megapack.model.attention.latent import LatentAttention, WholeLinear
from megapack.model.attention.row import row_view, whole_row
from megapack.model.attention.sparse import Index, joined

# Of transformers and of the published code, whatever the layers' norms have.
_NORM_EPSILON = 1e-6


class Indexer(MegatronModule):  # type: ignore[misc]
    """The weights of a layer's indexer.

    Without a loss (`dsa_indexer_loss_coeff`) nothing trains them, so they are frozen.

    Attributes:
        turns_pairs: neighbouring channels are rotated together.
    """

    def __init__(self, config: Any, tp_group: Any) -> None:
        super().__init__(config=config)
        self.heads = config.dsa_indexer_n_heads
        self.width = config.dsa_indexer_head_dim
        self.tp_group = tp_group
        self.turns_pairs = False
        self.linear_wq_b = WholeLinear(config, self.heads * self.width, config.q_lora_rank)
        self.linear_wk = WholeLinear(config, self.width)
        self.k_norm = torch.nn.LayerNorm(self.width, eps=_NORM_EPSILON, dtype=config.params_dtype)
        self.linear_weights_proj = WholeLinear(config, self.heads)
        for param in self.k_norm.parameters():
            param.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        if not config.dsa_indexer_loss_coeff:
            self.requires_grad_(False)

    def forward(
        self, hidden_tD: Tensor, latent_tD: Tensor, angles_Td: Tensor, turned_scale: float
    ) -> Index:
        """The index of the row's tokens.

        Args:
            hidden_tD: inputs of the layer's attention.
            latent_tD: normalised latents of queries.
            angles_Td: of the rotary embedding, as Megatron's tables have them.
            turned_scale: factor of the rotated channels (yarn).
        """
        # The main loss does not reach the indexer's inputs, and its loss does not leave it.
        hidden_tD, latent_tD = hidden_tD.detach(), latent_tD.detach()
        query, _ = self.linear_wq_b(latent_tD)
        key, _ = self.linear_wk(hidden_tD)
        weight, _ = self.linear_weights_proj(hidden_tD)
        query, key, weight = map(self._gathered, (query, self.k_norm(key), weight))
        scale = (self.width * self.heads) ** -0.5
        query_TIC = torch.unflatten(query, -1, (self.heads, self.width))
        turn = functools.partial(rotated, scale=turned_scale, pairs=self.turns_pairs)
        query_TIC = turn(query_TIC, angles_Td[:, None])
        return Index(query_TIC, weight * scale, turn(key, angles_Td))

    def _gathered(self, part_tD: Tensor) -> Tensor:
        if not self.config.sequence_parallel or self.tp_group.size() == 1:
            return part_tD
        # Every rank has the gradient of the whole row, so none is added up.
        return gather_from_sequence_parallel_region(  # type: ignore[no-any-return]
            part_tD, tensor_parallel_output_grad=False, group=self.tp_group
        )


def rotated(x: Tensor, angles: Tensor, *, scale: float = 1.0, pairs: bool = False) -> Tensor:
    """The first channels of x, as many as there are angles, rotated.

    Args:
        scale: factor of the rotated channels.
        pairs: neighbours are rotated together; the first ones then come before the second ones,
            which products of queries and keys do not see. Else each with that of the other half.

    >>> import math
    >>> angles = torch.tensor([[math.pi / 2, math.pi / 2]])
    >>> rotated(torch.tensor([[1.0, 2.0, 3.0]]), angles).round().abs()
    tensor([[2., 1., 3.]])
    """
    count = angles.shape[-1]
    turned, rest = x[..., :count], x[..., count:]
    first, second = (turned[..., ::2], turned[..., 1::2]) if pairs else turned.chunk(2, dim=-1)
    # The angles are there twice, for each half.
    cos, sin = (
        (scale * part).to(x.dtype).chunk(2, dim=-1)[0] for part in (angles.cos(), angles.sin())
    )
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


class SparseLatentAttention(LatentAttention):
    """Multi-latent attention whose core is `SparseAttention`.

    The indexer belongs to the core attention, as in Megatron's DSAttention, so that checkpoints
    have Megatron's names.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.core_attention.indexer = Indexer(config, self.pg_collection.tp)

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Any = None,
        position_ids: Any = None,
        packed_seq_params: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """Megatron's, with the index joined to queries and keys; see `sparse.joined`."""
        query, key, value, latent, *others = super().get_query_key_value_tensors(
            hidden_states, key_value_states, position_ids, packed_seq_params, *args, **kwargs
        )
        turns = self._turns(packed_seq_params)
        index = self.core_attention.indexer(hidden_states.squeeze(1), latent, *turns)
        query = joined(query, index.query_QIC, index.weight_QI)
        return query, joined(key, index.key_KC), joined(value), latent, *others

    def _turns(self, params: Any) -> tuple[Tensor, float]:
        """The rotary table's lines of this rank's tokens, and the scale of rotated channels."""
        whole = whole_row(params)
        positions_T = None if whole is None else row_view(whole).positions_T
        if positions_T is None:
            raise ScheduleError(
                "sparse attention got a row without positions; pass rows of ScheduleAdapter"
            )
        rotary = self.rotary_pos_emb
        # Not by calling the module, whose hook gathers a table of all context-parallel ranks.
        table = type(rotary).forward(rotary, params.max_seqlen_q, packed_seq=True)
        table, scale = table if isinstance(table, tuple) else (table, 1.0)
        return table.flatten(1).index_select(0, positions_T), scale
