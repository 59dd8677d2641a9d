"""config.json of every family, as published and as transformers 5 writes it, and all refusals."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from megapack import ConfigError
from megapack.config import dump_yaml, parse_config
from megapack.config.shipped import absent_weights
from megapack.job.config.hf_config import read_hf_config
from megapack.job.config.hf_families import FAMILIES
from megapack.job.config.sections import ModelConfig, TrainConfig
from tests.unit.job.config.hybrid_configs import HYBRID
from tests.unit.job.config.published_configs import CONFIGS, FAMILY_MODELS
from tools.benching.hf_configs import HF_CONFIGS
from tools.fuzzing.targets import refused

pytestmark = pytest.mark.unit

_LLAMA3 = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
_YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}


PUBLISHED = {family: CONFIGS[name] for family, name in FAMILY_MODELS.items()}
GPT_FAMILIES = [name for name in FAMILIES if name not in HYBRID]


def folder(path: Path, keys: dict[str, Any]) -> str:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(keys))
    return str(path)


@pytest.mark.parametrize("name", GPT_FAMILIES)
def test_the_published_config_of_a_family(name: str, tmp_path: Path) -> None:
    path = folder(tmp_path, PUBLISHED[name])
    found = read_hf_config(path)
    assert (found.model_type, [found.architecture]) == (name, PUBLISHED[name]["architectures"])
    model = ModelConfig.from_hf(path, dtype="bf16")
    assert {key: getattr(model, key) for key in found.values} == dict(found.values)
    assert model.dtype == "bf16"
    assert found.num_mtp_layers == PUBLISHED[name].get("num_nextn_predict_layers", 0)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_config_of_a_published_model(name: str, tmp_path: Path) -> None:
    ModelConfig.from_hf(folder(tmp_path, CONFIGS[name]))


# Families with local layers, and the base of these if config.json has none.
LAYERED = {"olmo3": None, "gemma3_text": 10000}


def as_transformers_5(keys: dict[str, Any]) -> dict[str, Any]:
    """The same config as transformers 5 writes it: all of the rotary embedding in one object."""
    new = dict(keys)
    if "text_config" in keys:
        text = as_transformers_5({"rope_theta": 1000000, **keys["text_config"]})
        return {**new, "text_config": text}
    if "global_head_dim" in keys:
        own = {
            "head_dim": new.pop("global_head_dim"),
            "num_key_value_heads": new.pop("num_global_key_value_heads"),
        }
        new.pop("rope_theta", None)
        kinds = enumerate(keys["layer_types"])
        by_layer = {str(layer): own for layer, kind in kinds if kind == "full_attention"}
        return {**new, "per_layer_config": by_layer}
    rope = {"rope_type": "default", **(new.pop("rope_scaling", None) or {})}
    if "type" in rope:
        rope["rope_type"] = rope["type"]
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in new:
            rope[key] = new.pop(key)
    if keys["model_type"] in LAYERED:
        base = LAYERED[keys["model_type"]] or rope["rope_theta"]
        base = new.pop("rope_local_base_freq", base)
        local = {"rope_type": "default", "rope_theta": base}
        rope = {"full_attention": rope, "sliding_attention": local}
    if "torch_dtype" in new:
        new["dtype"] = new.pop("torch_dtype")
    if "num_experts" in new:
        new["num_local_experts"] = new.pop("num_experts")
    return {**new, "rope_parameters": rope, "_name_or_path": ""}


@pytest.mark.parametrize("name", GPT_FAMILIES)
def test_transformers_5_writes_the_same_model(name: str, tmp_path: Path) -> None:
    old = read_hf_config(folder(tmp_path / "old", PUBLISHED[name]))
    new = read_hf_config(folder(tmp_path / "new", as_transformers_5(PUBLISHED[name])))
    assert new.values == old.values


def test_a_family_gives_every_key_that_describes_the_architecture(tmp_path: Path) -> None:
    """Otherwise a key in YAML could change the model without a contradiction."""
    first, *others = (
        set(read_hf_config(folder(tmp_path / name, keys)).values)
        for name, keys in {**PUBLISHED, **HYBRID}.items()
    )
    assert all(keys == first for keys in others)
    choices = {"hf_path", "attention", "dtype", "fp8", "init_std", "freeze", "vision"}
    choices |= {"bias_activation_fusion", "gradient_accumulation_fusion", "moe_grouped_gemm"}
    choices |= {"moe_permute_fusion", "moe_balance_loss_coef", "moe_z_loss_coef"}
    choices |= {"moe_bias_update_rate", "mtp_num_layers", "mtp_loss_coef"}
    choices |= {"recompute", "recompute_modules", "megatron_class", "indexer_loss_coef"}
    assert first == set(vars(ModelConfig())) - choices


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "qwen3",
            {"model_type": "kimi_linear"},
            'model_type="kimi_linear", and no release of Megatron-Core has Kimi delta attention',
        ),
        ("qwen3", {"model_type": "gpt_neox"}, 'model_type="gpt_neox"; megapack trains llama,'),
        ("qwen3", {"architectures": ["Qwen3Model"]}, "Qwen3ForSequenceClassification only"),
        ("qwen3", {"architectures": ["Qwen3ForSequenceClassification"]}, "id2label=null"),
        ("qwen3", {"head_dim": None}, "head_dim=null; expected a whole number of at least 1"),
        ("qwen3", {"partial_rotary_factor": 0.5}, "rotates whole heads of this family"),
        ("qwen3", {"head_gate": True}, "head_gate=true; megapack does not know this key"),
        ("qwen3", {"hidden_size": 2560.0}, "hidden_size=2560.0; expected a whole number"),
        ("qwen3", {"tie_word_embeddings": "yes"}, "expected true or false"),
        ("qwen3", {"rms_norm_eps": 0}, "rms_norm_eps=0; expected a number above 0"),
        ("qwen3", {"rope_theta": 10000.5}, "rope_theta=10000.5; expected a whole number"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 36}, "use_sliding_window is false"),
        ("qwen3", {"layer_types": ["full_attention"]}, "expected 36 of sliding_"),
        (
            "qwen3",
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "megapack trains default and linear, llama3, yarn, longrope for",
        ),
        ("qwen3", {"rope_scaling": "llama3"}, "expected an object or null"),
        ("qwen3", {"rope_parameters": {"rope_theta": 5}}, "rope_parameters says otherwise"),
        ("qwen3", {"quantization_config": {"bits": 4}}, "convert the folder to bf16 first"),
        (
            "llama",
            {"rope_scaling": {**_LLAMA3, "low_freq_factor": 4.0}},
            "high_freq_factor is 4.0; set more than low_freq_factor=4.0",
        ),
        ("mixtral", {"num_experts_per_tok": 1}, "a normalised score of one expert is 1"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, "only the first layers can be dense"),
        ("qwen3_moe", {"num_local_experts": 64}, "num_local_experts differs"),
        ("deepseek_v3", {"norm_topk_prob": False}, "Megatron-Core normalises sigmoid scores"),
        ("deepseek_v3", {"num_key_value_heads": 8}, "num_key_value_heads=8"),
        ("deepseek_v3", {"rope_scaling": _LLAMA3}, "megapack trains default and yarn for"),
        ("deepseek_v3", {"rope_scaling": {**_YARN, "mscale": None}}, "rope_scaling.mscale=null"),
        ("gpt_oss", {"rope_scaling": None}, "transformers would assume yarn"),
        ("hunyuan_v1_dense", {"rope_scaling": {"type": "dynamic"}}, "rope_scaling.alpha=null"),
        ("qwen3", {"rope_scaling": {"type": "ntk", "alpha": 2.0}}, "for this family"),
        ("hunyuan_v1_moe", {"moe_topk": [8, 4]}, "the same in layers"),
        ("hunyuan_v1_moe", {"moe_intermediate_size": 64}, "transformers has 3072 whatever"),
        ("ernie4_5_moe", {"moe_layer_end_index": 3}, "moe_layer_end_index=3"),
        ("gemma4_text", {"hidden_size_per_layer_input": 256}, "embeddings of each layer"),
        ("gemma4_text", {"num_kv_shared_layers": 20}, "keys and values of others"),
        ("gemma4_text", {"layer_types": 30 * ["full_attention"]}, "layers of both kinds"),
        ("gemma4_text", {"per_layer_config": {"5": {"head_dim": 512}}}, "layers, all alike"),
        ("glm4_moe_lite", {"mlp_layer_types": ["sparse"] * 47}, "first_k_dense_replace=1 of them"),
        ("minimax_m2", {"attn_type_list": [0, 1]}, "megapack trains 1 only, softmax attention"),
        ("minimax_m2", {"partial_rotary_factor": 1.0}, "partial_rotary_factor says otherwise"),
        ("deepseek_v32", {"layer_types": ["full_attention"] * 61}, "indexed_attention only"),
        ("deepseek_v32", {"mlp_layer_types": ["sparse"] * 61}, "in the first 3 layers"),
        ("glm_moe_dsa", {"indexer_types": ["full", "shared"] * 39}, "another layer's choice"),
    ],
)
def test_what_is_not_exact_is_refused(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = folder(tmp_path, {**PUBLISHED[name], **changes})
    with pytest.raises(ConfigError) as caught:
        read_hf_config(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: config.json")
    assert message in text
    assert "\n" not in text


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3", "gemma4_text"])
def test_a_missing_size_is_not_guessed(name: str, tmp_path: Path) -> None:
    for key in ("num_hidden_layers", "vocab_size", "max_position_embeddings", "rms_norm_eps"):
        keys = {name: value for name, value in PUBLISHED[name].items() if name != key}
        with pytest.raises(ConfigError, match=f"has no {key}; transformers would assume a value"):
            read_hf_config(folder(tmp_path, keys))


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read"), ("{", "not JSON"), ("[1]", "expected an object"), ("", "not JSON")],
)
def test_other_folders_are_one_line(content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=message) as caught:
        read_hf_config(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["deepseek_v3", "gemma4_text", "nemotron_h"])
def test_numbers_beyond_any_model_are_refused_at_once(name: str, tmp_path: Path) -> None:
    keys = PUBLISHED.get(name) or HYBRID[name]
    numbers = [key for key, value in keys.items() if type(value) in (int, float)]
    for key, value in itertools.product(numbers, (2**70, 10**400)):
        path = folder(tmp_path, {**keys, key: value})
        refused(lambda path=path: ModelConfig.from_hf(path), ConfigError)  # type: ignore[misc]
    for layers in (10**4 + 1, 2**31, 2**63, 2**70):
        with pytest.raises(ConfigError, match=r"num_hidden_layers|layer_types|hybrid_override"):
            read_hf_config(folder(tmp_path, {**keys, "num_hidden_layers": layers}))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen3", {"num_hidden_layers": 2**63}, "=9223372036854775808; expected at most 10000"),
        ("llama", {"hidden_size": 2**31}, "hidden_size=2147483648; expected at most 2147483647"),
        ("llama", {"rope_theta": 10**400}, r"expected a whole number of 1 to 2\^53"),
        ("deepseek_v3", {"first_k_dense_replace": 2**31 - 1}, "expected at most 10000"),
        ("qwen3_next", {"layer_types": [["a"]]}, r"layer_types=.* of linear_attention"),
        ("minimax_m2", {"attn_type_list": [[1]]}, "megapack trains 1 only"),
        ("qwen3_moe", {"mlp_only_layers": [[0]]}, "expected a list of layers"),
        (
            "nemotron_h",
            {"hybrid_override_pattern": "M" * 10**5, "num_hidden_layers": 10**5},
            "expected at most 10000",
        ),
        ("olmo3", {"rope_parameters": {"full_attention": [1]}}, "an object for each kind"),
        ("llama", {"rope_scaling": {"rope_type": {}, "factor": 2.0}}, "megapack trains default"),
        (
            "phi3",
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}
            | {"original_max_position_embeddings": 0},
            "original_max_position_embeddings=0; expected a whole number of at least 1",
        ),
    ],
)
def test_values_of_no_model_are_one_line(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    keys = {**(PUBLISHED.get(name) or HYBRID[name]), **changes}
    with pytest.raises(ConfigError, match=message) as caught:
        ModelConfig.from_hf(str(folder(tmp_path, keys)))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_keys_without_effect_are_read(tmp_path: Path) -> None:
    assert read_hf_config(folder(tmp_path, {**PUBLISHED["qwen2"], "use_mrope": False}))
    latent = {**PUBLISHED["deepseek_v3"], "num_key_value_heads": None}
    assert read_hf_config(folder(tmp_path, latent)).values["kv_lora_rank"] == 512
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    names = {"architectures": ["Qwen3ForSequenceClassification"]}
    assert read_hf_config(folder(tmp_path, {**PUBLISHED["qwen3"], **names, **labels}))


KINDS = {"L": "sliding_attention", "G": "full_attention"}
SWITCHED = {"use_sliding_window": True, "sliding_window": 4096}


@pytest.mark.parametrize(
    ("name", "changes", "window", "pattern"),
    [
        ("mistral", {"sliding_window": 4096}, 4096, None),
        # No sample reaches it.
        ("mistral", {"sliding_window": 32768}, None, None),
        ("mixtral", {"sliding_window": 4096}, 4096, None),
        ("qwen2", {**SWITCHED, "max_window_layers": 21}, 4096, 21 * "G" + 3 * "L"),
        ("qwen2", {**SWITCHED, "max_window_layers": 0}, 4096, None),
        ("qwen2", {**SWITCHED, "max_window_layers": 24}, None, None),
        ("qwen3", {**SWITCHED, "layer_types": 18 * [KINDS["L"], KINDS["G"]]}, 4096, "LG"),
        ("qwen3", {"layer_types": 36 * [KINDS["G"]]}, None, None),
    ],
)
def test_sliding_windows(
    name: str, changes: dict[str, Any], window: int | None, pattern: str | None, tmp_path: Path
) -> None:
    values = read_hf_config(folder(tmp_path, {**PUBLISHED[name], **changes})).values
    assert values["attention_window"] == window
    assert values["attention_window_pattern"] == pattern


def test_the_name_of_a_model_of_the_hub_is_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hint = "hf download Qwen/Qwen3-4B --local-dir models/Qwen3-4B, and set models/Qwen3-4B"
    with pytest.raises(ConfigError, match=hint):
        read_hf_config("Qwen/Qwen3-4B")


def test_models_of_shipped_configs_need_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hint = "; hf download Qwen/Qwen3-4B --local-dir models/Qwen3-4B"
    assert read_hf_config("models/Qwen3-4B").values["num_layers"] == 36
    assert absent_weights("models/Qwen3-4B").endswith(hint)
    assert absent_weights("models/DeepSeek-V3-bf16").endswith(
        "; hf download deepseek-ai/DeepSeek-V3, and write its weights as bf16 to "
        "models/DeepSeek-V3-bf16"
    )
    # A folder of the user's own is never replaced by the shipped copy.
    Path("models/Qwen3-4B").mkdir(parents=True)
    assert absent_weights("models/Qwen3-4B") == ""
    with pytest.raises(ConfigError, match="cannot be read"):
        read_hf_config("models/Qwen3-4B")


@pytest.mark.parametrize("name", HF_CONFIGS)
def test_shipped_models_name_their_repository(name: str) -> None:
    assert re.fullmatch(r"[\w.-]+/[\w.-]+", HF_CONFIGS[name]["_name_or_path"])


def test_sizes_of_a_folder_that_do_not_fit_name_it(tmp_path: Path) -> None:
    path = folder(tmp_path, {**PUBLISHED["qwen3"], "num_key_value_heads": 3})
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_hf(str(path))
    assert str(caught.value).startswith(f"with the sizes of {path}: model.num_attention_heads=32")


def job(text: str, *overrides: str) -> TrainConfig:
    return parse_config(
        f"name: x\nplan: {{max_tokens_per_gpu: 99}}\n{text}", overrides, TrainConfig, "a.yaml"
    )


def test_a_resolved_config_loads_again(tmp_path: Path) -> None:
    path = folder(tmp_path, PUBLISHED["deepseek_v3"])
    config = job(f"model: {{hf_path: {path}, dtype: bf16}}")
    assert config.model.kv_lora_rank == 512
    assert parse_config(dump_yaml(config), [], TrainConfig) == config


def test_keys_that_contradict_the_folder_are_refused(tmp_path: Path) -> None:
    path = folder(tmp_path, PUBLISHED["qwen3"])
    model = f"model:\n  hf_path: {path}\n"
    with pytest.raises(ConfigError) as caught:
        job(f"{model}  hidden_size: 64")
    assert str(caught.value) == (
        f"a.yaml:5: model.hidden_size is 64, but {path}/config.json gives 2560; leave the key out "
        "(in Python: ModelConfig.from_hf)"
    )
    with pytest.raises(ConfigError, match=r"model.moe_top_k is 4, but .* gives 2"):
        job(model, "model.moe_top_k=4")
    with pytest.raises(ConfigError, match=r"override .*model.rotary_base is 1, but"):
        job(model, "model.rotary_base=1")
    with pytest.raises(ConfigError, match="has 0 layers of multi-token prediction that megapack"):
        ModelConfig.from_hf(path, mtp_num_layers=1)
    mimo = folder(tmp_path / "mimo", PUBLISHED["mimo"])
    assert ModelConfig.from_hf(mimo, mtp_num_layers=1).mtp_num_layers == 1
    with pytest.raises(ConfigError, match=r"model.num_layers is 2, but"):
        ModelConfig.from_hf(path, num_layers=2)
    with pytest.raises(ConfigError, match=r"ModelConfig\.from_hf"):
        ModelConfig(hf_path=path)
    same = job(f"{model}  hidden_size: 2560")
    assert same.model == job(model).model


def test_a_bad_folder_names_the_line_of_hf_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^a.yaml:3: {tmp_path}: config.json cannot be read"):
        job(f"model: {{hf_path: {tmp_path}}}")
