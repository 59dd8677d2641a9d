"""Megatron on a machine without CUDA: Megatron-Core, and recipes of Megatron-LM as they are.

    torchrun --nproc-per-node 2 -m megapack run --cpu pretrain_gpt.py ARGS

Megatron-Core names the CUDA device in its schedules, buffers, random states and optimizers.
`enable` sends each of those calls to the CPU, so that the real package runs over gloo, including
tensor, sequence, pipeline and data parallelism, the distributed optimizer and gradient clipping.
Megatron-LM's `megatron.training` also asks for a device's memory and properties, starts NCCL and
compiles kernels; it is served too. Names in modules of Megatron are replaced right after the
module's import, so the order of imports does not matter, and nothing is imported early.

`megapack run --cpu`, `device: cpu` in a configuration, or a call of `enable` switches it on. With
Transformer Engine's Python installed (the extra te-cpu), its layers run too, see `cpu.te`.
"""

from megapack.cpu.device import enable as enable
from megapack.cpu.device import enabled as enabled
from megapack.cpu.device import uses_cuda as uses_cuda
from megapack.cpu.megatron import runs_te as runs_te
