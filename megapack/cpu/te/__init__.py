"""Transformer Engine without CUDA: its own Python, on stand-ins of its compiled part.

What runs is Transformer Engine's code: modules, autograd functions, the choice of the attention
kernel, the context-parallel ring, delayed weight gradients, grouped layers, permutation of
experts, FusedAdam. What is replaced is the compiled module `transformer_engine_torch` and the
Triton kernels; each stand-in is one function in plain torch, which computes in fp32 (fp64 in fp64).
Nothing is rounded to FP8, which needs a GPU.

Stand-ins check what kernels take for granted, such as int32 tables, contiguous rows and a
`max_seqlen` that is an upper bound, and raise `KernelFault` where a GPU would read past the end or
compute something else in silence.

`megapack.te_finder` imports `loader` when Transformer Engine is imported on such a machine.
"""

from megapack.cpu.te.calls import KernelFault as KernelFault
