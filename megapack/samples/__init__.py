"""A batch of samples as ragged fields: the input of packed rows.

Modules:
    batch: SampleBatch
    tensor_fields: TensorField: tensors that have not one value per token
    queue: RolloutQueue: steps of rollouts that finish in any order
    padded: ragged values from tensors padded to [B, S], and back
"""

from megapack.samples.batch import RESPONSE_MASK as RESPONSE_MASK
from megapack.samples.batch import SampleBatch as SampleBatch
from megapack.samples.padded import padded_spans as padded_spans
from megapack.samples.padded import to_padded as to_padded
from megapack.samples.queue import RolloutQueue as RolloutQueue
from megapack.samples.tensor_fields import RowTensor as RowTensor
from megapack.samples.tensor_fields import TensorField as TensorField
