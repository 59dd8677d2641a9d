"""Strict YAML configs as frozen dataclasses, and the sections of the main job's config.

Modules:
    yaml, typed, load: text -> plain values -> typed dataclasses, and back
    model, rope, data, objective, critic, sections: the dataclasses, up to TrainConfig
    model_checks, run_checks: what keys must fulfil, of the model alone and of all sections
    hf_reader, hf_config: the model's keys from a Hugging Face folder, family by family
    cost_file: reads a cost model from its file
"""

from megapack.config.load import dump_yaml, find_config, load_config, parse_config, to_dict

__all__ = [
    "load_config",
    "parse_config",
    "dump_yaml",
    "find_config",
    "to_dict",
]
