"""Weights from Hugging Face folders, and back into them, on any layout.

Modules:
    names: of which rows of which Hugging Face tensors each of Megatron's tensors is made
    blocks: the blocks of tensors that a rank holds, and what all ranks hold
    folder: a folder of safetensors: its files, checked before any tensor is read
    load: from a folder into a model's chunks
    unused: tensors of a folder that a model does not have
    adapters: adapters of LoRA, out of a model's chunks and back
    export, checkpoint: out of a model's chunks, or of a checkpoint, into a folder
    export_plan, shards, output: which rank writes what; safetensors files; the folder
"""

from megapack.job.hf.adapters import export_adapters as export_adapters
from megapack.job.hf.adapters import load_adapters as load_adapters
from megapack.job.hf.checkpoint import export_checkpoint as export_checkpoint
from megapack.job.hf.export import export_hf as export_hf
from megapack.job.hf.load import LoadedWeights as LoadedWeights
from megapack.job.hf.load import load_hf_weights as load_hf_weights
