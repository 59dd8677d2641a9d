"""Count the recipe files of other frameworks by the `model_type` of the model in their path.

    python tools/count_recipes.py REPOSITORY ...

REPOSITORY is a git directory or a checkout; its HEAD is read. A recipe is a script, a YAML or a
Python file in a folder named scripts, examples or recipes, whose path names a model of `KINDS`; the
first pattern that matches decides. Whether megapack loads such a model is what it says of its
`model_type`, so a member of a family that has a key of its own may still be refused.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megapack.job.config.hf_families import FAMILIES  # noqa: E402

_MOE = r".*?(a\d+(\.\d+)?b|moe)"
# Pattern in a path of small letters, with - for . and _ -> model_type, or what it is in brackets.
KINDS = {
    r"qwen-?3(-|p)next|qwen3-next": "qwen3_next",
    rf"qwen-?3[-p]?[5-9](?!\d|b){_MOE}": "qwen3_5_moe",
    r"qwen-?3[-p]?[5-9](?!\d|b)": "qwen3_5",
    rf"qwen-?3{_MOE}|qwen-?3-?\d*(30|235|480)b": "qwen3_moe",
    r"qwen-?3": "qwen3",
    rf"qwen-?(1[-p]5|2){_MOE}": "qwen2_moe",
    r"qwen": "qwen2",
    r"nemotron.*?(super|ultra)": "(Nemotron Super, Ultra)",
    r"nemotron-?(h|3|nano)|nanov[23]|nano-v[23]|nano-?3": "nemotron_h",
    r"nemotron": "(other Nemotron)",
    r"llama-?4": "(Llama 4)",
    r"llama": "llama",
    r"deepseek-?v?4|dsv4": "(DeepSeek-V4)",
    r"deepseek-?v?3[-p]?2": "deepseek_v32",
    r"deepseek-?v2": "deepseek_v2",
    r"deepseek.*?distill-?qwen": "qwen2",
    r"deepseek-?(v3|r1)|dsv3|moonlight": "deepseek_v3",
    r"kimi-?(k2-?5|linear|k3)": "(Kimi K2.5, K3, Linear)",
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
_SEES = re.compile(r"(?<![a-z])vlm?(?![a-z])|omni|geo3k|video|llava|glm-?4[-p]?\d?v")
_RECIPE = re.compile(r"(^|/)(scripts|examples|recipes)/.*\.(sh|ya?ml|py)$")
_NO_RECIPE = re.compile(
    r"(^|/)(tests?|docs?|docker)/|__init__|conver[st]|export|(^|/)models?/|/common"
)


def kind_of(path: str) -> str | None:
    """The model_type of a recipe; None if the path names no model."""
    if not _RECIPE.search(path) or _NO_RECIPE.search(path):
        return None
    plain = re.sub("[._]", "-", path.lower())
    # The file's name before those of its folders.
    parts = [*reversed(plain.split("/"))]
    found = (kind for part in parts for pattern, kind in KINDS.items() if re.search(pattern, part))
    kind = next(found, None)
    return "(with images or audio)" if kind and _SEES.search(plain) else kind


def main() -> int:
    counts: Counter[str] = Counter()
    for repository in sys.argv[1:]:
        bare = (
            ["--git-dir", repository] if Path(repository, "HEAD").exists() else ["-C", repository]
        )
        listed = subprocess.run(
            ["git", *bare, "ls-tree", "-r", "--name-only", "HEAD"],
            check=True,
            capture_output=True,
            text=True,
        )
        counts.update(kind for path in listed.stdout.splitlines() if (kind := kind_of(path)))
    loaded = sum(count for kind, count in counts.items() if kind in FAMILIES)
    print("| model | files | loads |")
    print("|---|---|---|")
    for kind, count in counts.most_common():
        name = kind.strip("()") if kind.startswith("(") else f"`{kind}`"
        print(f"| {name} | {count} | {'yes' if kind in FAMILIES else 'no'} |")
    print(
        f"\n{counts.total()} files, {loaded} of families that load ({loaded / counts.total():.0%})"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
