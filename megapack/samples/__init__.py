"""A batch of samples as ragged fields: the input of packed rows.

Modules:
    batch: SampleBatch
    tensor_fields: TensorField: tensors that have not one value per token
    padded: ragged values from tensors padded to [B, S], and back
"""

from megapack.samples.batch import RESPONSE_MASK, SampleBatch
from megapack.samples.padded import padded_spans, to_padded
from megapack.samples.tensor_fields import RowTensor, TensorField

__all__ = [
    "RESPONSE_MASK",
    "RowTensor",
    "SampleBatch",
    "TensorField",
    "padded_spans",
    "to_padded",
]
