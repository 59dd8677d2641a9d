"""Write docs/measured/model_recipes.md: recipe files of other frameworks by the model they train.

    python tools/count_recipes.py FOLDER ...

FOLDER is a framework's source tree. A recipe is a script, a YAML or a Python file in a folder named
scripts, examples or recipes. Its model is that of its path, else the one that most of its lines
that set a model name; the first pattern of `KINDS` that matches decides. Whether it trains on
images, audio or video is read from its path and its lines without comments. Whether megapack loads
a model is what it says of its `model_type`, so a member of a family that has a key of its own may
be refused.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megapack.job.config.hf_families import FAMILIES  # noqa: E402
from tools.pages.marks import table  # noqa: E402
from tools.pages.measured import write  # noqa: E402

_MOE = r".*?(a\d+(\.\d+)?b|moe)"
# Pattern in small letters, with - for . and _ -> model_type, or what it is in brackets.
KINDS = {
    r"qwen-?3(-|p)?next": "qwen3_next",
    rf"qwen-?3[-p]?[5-9](?!\d|b){_MOE}": "qwen3_5_moe",
    r"qwen-?3[-p]?[5-9](?!\d|b)": "qwen3_5",
    rf"qwen-?3{_MOE}|qwen-?3-?\d*(30|235|480)b": "qwen3_moe",
    r"qwen-?3": "qwen3",
    rf"qwen-?(1[-p]5|2){_MOE}": "qwen2_moe",
    r"qwen": "qwen2",
    r"nemotron.*?(super|ultra)": "nemotron_h, Super and Ultra",
    r"nemotron-?(h|3|nano)|nanov[23]|nano-v[23]|nano-?3": "nemotron_h",
    r"nemotron": "(other Nemotron)",
    r"llama-?4": "(Llama 4)",
    r"llama": "llama",
    r"deepseek-?v?4|dsv4": "(DeepSeek-V4)",
    r"deepseek-?v?3[-p]?2": "deepseek_v32",
    r"deepseek-?v2": "deepseek_v2",
    r"deepseek.*?distill-?qwen": "qwen2",
    r"deepseek-?(v3|r1)|dsv3|moonlight": "deepseek_v3",
    r"kimi-?(linear|k3)": "(Kimi K3, Linear)",
    r"kimi-?k2-?5": "(Kimi K2.5)",
    r"kimi(?!na)": "kimi_k2",
    r"glm-?5": "glm_moe_dsa",
    r"glm-?4[-p]?7-?(flash|30b)": "glm4_moe_lite",
    r"glm-?4[-p]?[5-7]|glm4moe": "glm4_moe",
    r"glm-?4|glm-?z1": "glm4",
    r"gemma-?(3n|4-?e\d)": "(Gemma 3n, 4 E2B, E4B)",
    r"gemma-?4": "gemma4",
    r"gemma-?3": "gemma3",
    r"gemma-?2(?!b)": "gemma2",
    r"gpt-?oss": "gpt_oss",
    r"minimax-?m2": "minimax_m2",
    r"mimo-?7b": "mimo",
    r"mixtral": "mixtral",
    r"ministral-?3|mistral-(medium|small)-?[34]": "(Ministral 3, Mistral Medium, Small)",
    r"mistral": "mistral",
    r"phi-?[34]": "phi3",
    r"olmo-?3": "olmo3",
    r"olmo-?2": "olmo2",
    r"hunyuan|hy-?v?3": "(Hunyuan of other kinds)",
    r"ernie": "(Ernie with vision)",
    r"(minimax|mimo-v|step-?3|bailing|granite|falcon|sarvam|gemma|olmoe)-?[a-z]*-?\d": "(others)",
}
_RECIPE = re.compile(r"(^|/)(scripts|examples|recipes)/.*\.(sh|ya?ml|py)$")
_NO_RECIPE = re.compile(
    r"(^|/)(tests?|docs?|docker)/|__init__|conver[st]|export|(^|/)models?/|/common"
)
_SETS_MODEL = re.compile(r"model|checkpoint|ckpt|hf-path|pretrained")
_HEARS = re.compile(r"(?<!ve)omni|audio|(?<![a-z])videos?(?![a-z])")
_SEES = re.compile(
    r"(?<![a-z])vlm?(?![a-z])|llava|internvl|minicpm-?v|pixtral|glm-?4[-p]?\d?v|geometry3k"
    r"|(?<!example-)geo3k"
    r"|(?<![a-z])(images?-?keys?|multimodal-?keys|vision-(model|tower|config))"
)
_QWEN_SEES = ("qwen2", "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe")


def kind_of(path: str, text: str) -> str | None:
    """What a recipe trains: a model_type, or a kind in brackets; None if no model is named."""
    plain = re.sub("[._]", "-", path.lower())
    body = [_plain(line) for line in text.splitlines() if not line.lstrip().startswith("#")]
    # The file's name before those of its folders.
    found = next((kind for part in reversed(plain.split("/")) if (kind := _named(part))), None)
    if found is None:
        lines = Counter(kind for line in body if _SETS_MODEL.search(line) if (kind := _named(line)))
        found = lines.most_common(1)[0][0] if lines else None
    # Text is trained on with towers that are frozen.
    everything = "\n".join([plain, *(line for line in body if "freeze" not in line)])
    if found is None:
        return None
    if _HEARS.search(everything):
        return "(with audio or video)"
    if _SEES.search(everything):
        return f"({'Qwen' if found in _QWEN_SEES else 'others'} with images)"
    return found


def _plain(text: str) -> str:
    return re.sub("[._]", "-", text.lower())


def _named(text: str) -> str | None:
    return next((kind for pattern, kind in KINDS.items() if re.search(pattern, text)), None)


def _loads(kind: str) -> bool:
    return kind.partition(",")[0] in FAMILIES or kind == "(Qwen with images)"


def main() -> int:
    counts: Counter[str] = Counter()
    for folder in map(Path, sys.argv[1:]):
        for file in folder.rglob("*"):
            path = str(file.relative_to(folder))
            if not file.is_file() or not _RECIPE.search(path) or _NO_RECIPE.search(path):
                continue
            kind = kind_of(path, file.read_text(encoding="utf-8", errors="replace"))
            counts.update([kind] if kind else [])
    loaded = sum(count for kind, count in counts.items() if _loads(kind))
    rows = [
        (
            kind.strip("()") if kind.startswith("(") else f"`{kind}`",
            str(count),
            "yes" if _loads(kind) else "no",
        )
        for kind, count in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    ]
    path = write(
        "model_recipes",
        "Recipe files of frameworks by model",
        "Recipe files by the model that their path names, else their lines; by their lines, too, "
        "those with images, audio or video. A file without either is not counted, and a member of "
        "a row can have a key that is refused. No recipe was run.",
        [
            f"{counts.total()} files, of which {loaded} are of models that load.",
            "",
            table(["model", "files", "loads"], rows),
        ],
        "counted, not run",
    )
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
