"""What packed rows need of any Megatron-Core GPT: attention, experts, heads, gradients.

Modules:
    adapters: which adapter each token of a row belongs to
    attention, experts: packed attention; mixtures of experts
    biases: biases that recomputed layers and local experts return
    head, logprobs, mtp: vocabulary or value head, log-probs in chunks, multi-token prediction
    products: matrix products with fp32 results
    parameters: names of parameters in the whole model, and marks that Megatron reads
    sharded: a chunk's tensors with their names in the whole model
    replicas: weights that several ranks hold, compared bit by bit
    overlap: DDP's communication inside forwards and backwards
    weight_gradients: weight gradients that are computed later than the rest of a backward
"""

from megapack.model.replicas import check_replicas as check_replicas
