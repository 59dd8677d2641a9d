"""Labels further ahead stay inside their samples."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megapack import Layout, MicroBatch
from megapack.errors import ConfigError
from megapack.model.mtp import check_mtp, loss_coefs, loss_names
from megapack.rows.packed import PackedRow
from megapack.rows.packing import pack_row
from megapack.samples import SampleBatch

pytestmark = pytest.mark.unit


def packed() -> PackedRow:
    """Prompts of 1, 2 and 1 tokens, responses of 3, 1 and 0, and two tokens of padding."""
    batch = SampleBatch.from_prompt_response(
        [torch.tensor([1]), torch.tensor([5, 6]), torch.tensor([8])],
        [torch.tensor([2, 3, 4]), torch.tensor([7]), torch.tensor([], dtype=torch.int64)],
    )
    micro_batch = MicroBatch((0, 1, 2), row_tokens=10, tokens=8, tokens_sq=26, padded_tokens=8)
    return pack_row(batch, micro_batch, Layout(), [0.5, 0.25, 1.0], num_ahead=4)


def test_labels_and_weights_shift_inside_a_sample() -> None:
    row = packed()
    assert row.labels_T.tolist() == [2, 3, 4, 0, 6, 7, 0, 0, 0, 0]
    one, two, *_ = row.ahead
    assert one.labels_T.tolist() == [3, 4, 0, 0, 7, 0, 0, 0, 0, 0]
    assert one.losses.weights_R.tolist() == [0.5, 0.5, 0.25]
    assert one.losses.sample_of_R.tolist() == [0, 0, 1]
    assert one.losses.label_index_R.tolist() == [2, 3, 6]
    assert one.losses.positions_R.tolist() == [0, 1, 4]
    assert two.labels_T.tolist() == [4, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    assert two.losses.positions_R.tolist() == [0]
    assert row.tokens_T.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 0, 0]
    assert one.tokens_T.tolist() == [2, 3, 4, 0, 6, 7, 0, 0, 0, 0]
    assert two.tokens_T.tolist() == [3, 4, 0, 0, 7, 0, 0, 0, 0, 0]
    assert one.position_ids_T.tolist() == [1, 2, 3, 0, 1, 2, 0, 0, 0, 0]


def test_loss_coefs_divide_the_scaling_factor() -> None:
    config = SimpleNamespace(mtp_num_layers=2, mtp_loss_scaling_factor=0.3)
    assert loss_coefs(config) == [0.15, 0.15]
    assert loss_names(config) == ["mtp_1_loss", "mtp_2_loss"]
    assert loss_coefs(SimpleNamespace(mtp_num_layers=None)) == []


def test_full_recompute_is_refused() -> None:
    config = SimpleNamespace(mtp_num_layers=1, recompute_granularity="full")
    with pytest.raises(ConfigError, match="set recompute_granularity='selective' or None"):
        check_mtp(config)
    config.recompute_granularity = None
    check_mtp(config)
    check_mtp(SimpleNamespace(mtp_num_layers=None, recompute_granularity="full"))
