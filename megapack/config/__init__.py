"""Strict YAML configs as frozen dataclasses, and the sections of the main job's config.

Modules:
    yaml, typed, load: text -> plain values -> typed dataclasses, and back
    plan, model, data, objective, critic, loop: the dataclasses of the sections (the options of a
        model are those of `megapack.cost.options`)
    sections: TrainConfig, which has all of them, and what their keys must fulfil together
    bounds, architecture, model_checks: least values of keys; what they must fulfil together, and a
        model's sizes on a layout
    hf_reader, hf_config, hf_families: the model's keys from a Hugging Face folder, family by family
    hf_parts, hf_hybrid: keys that families share; the families of hybrid models
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
