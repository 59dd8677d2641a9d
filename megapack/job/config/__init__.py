"""The keys of the main job's config, as frozen dataclasses; `megapack.config` reads the YAML.

Modules:
    sections: TrainConfig, which has all sections, and what their keys must fulfil together
    plan, model, data, objective, critic, loop: the dataclasses of the sections
    architecture, model_checks: what a model's options must fulfil together, and on a layout
    hf_reader, hf_config, hf_families: the model's keys from a Hugging Face folder, family by family
    hf_parts, hf_experts, hf_hybrid: keys that families share
    hf_tensors: what folders name the tensors of a model
"""
