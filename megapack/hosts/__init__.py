"""Functions with the signatures of other training frameworks, planned by megapack.

One module per framework, with its name; `shared` has what several of them use. No module imports
its framework; those for Megatron-LM import Megatron-Core.
"""
