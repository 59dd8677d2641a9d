"""Strict YAML configs as frozen dataclasses. The keys of the main job are in `megapack.job.config`.

Modules:
    yaml, typed, load: text -> plain values -> typed dataclasses, and back
    bounds: least values of keys
    cost_file: reads a cost model from its file
    shipped: the configs that megapack ships, and config.json of their models
"""

from megapack.config.load import dump_yaml as dump_yaml
from megapack.config.load import load_config as load_config
from megapack.config.load import parse_config as parse_config
from megapack.config.load import to_dict as to_dict
from megapack.config.shipped import find_config as find_config
