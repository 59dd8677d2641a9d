"""Strict YAML configs as frozen dataclasses. The keys of the main job are in `megapack.job.config`.

Modules:
    yaml, typed, load: text -> plain values -> typed dataclasses, and back
    bounds: least values of keys
    cost_file: reads a cost model from its file
    shipped: the configs that megapack ships, and config.json of their models
"""

from megapack.config.load import dump_yaml, load_config, parse_config, to_dict
from megapack.config.shipped import find_config

__all__ = [
    "load_config",
    "parse_config",
    "dump_yaml",
    "find_config",
    "to_dict",
]
