"""What megapack ships in `configs`: configs by name, and config.json of the models that they name.

A config names the folder of its model relative to the working directory, `models/Qwen3-4B`. Where
there is no such folder, predictions read the shipped copy of its config.json. Training needs the
weights.
"""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path

from megapack.errors import ConfigError

_NAMES_SHOWN = 3
# ORGANISATION/MODEL, as the hub names them.
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def shipped_configs() -> dict[str, Path]:
    """The configs that megapack ships, by their names without `.yaml`."""
    return {path.stem: path for path in sorted(_folder().glob("*.yaml"))}


def find_config(name: str | Path) -> Path:
    """The path of config `name`: an existing path, or a config that megapack ships.

    Args:
        name: a path, or `qwen3_4b_gpu1`, with or without `configs/` before and `.yaml` after it.

    Raises:
        ConfigError: no such file; the message names similar configs.
    """
    if Path(name).is_file():
        return Path(name)
    stem = str(name).removeprefix("configs/").removesuffix(".yaml")
    shipped = shipped_configs()
    if stem in shipped:
        return shipped[stem]
    close = difflib.get_close_matches(Path(name).stem, shipped, n=_NAMES_SHOWN, cutoff=0.5)
    meant = f"did you mean {' or '.join(close)}? " if close else ""
    raise ConfigError(
        f"{name}: no such file, and no config of this name is shipped; {meant}`megapack train "
        "--list` lists them"
    )


def shipped_models() -> dict[str, Path]:
    """The folders with a shipped config.json, by the names of their models."""
    return {
        path.parent.name: path.parent for path in sorted(_folder().glob("models/*/config.json"))
    }


def shipped_model(folder: str | Path) -> Path | None:
    """The folder with the shipped config.json of `models/NAME`; None if there is none, or if the
    user has something at `folder`."""
    path = Path(folder)
    if path.parent != Path("models") or path.exists():
        return None
    return shipped_models().get(path.name)


def download_hint(folder: str | Path) -> str:
    """How to download a model's folder that does not exist, after a semicolon; "" if it is not one
    of a model on the hub.

    >>> download_hint("Qwen/Qwen3-8B")
    '; hf download Qwen/Qwen3-8B --local-dir models/Qwen3-8B, and set models/Qwen3-8B'
    >>> download_hint("models/Qwen3-4B")
    '; hf download Qwen/Qwen3-4B --local-dir models/Qwen3-4B'
    """
    name = str(folder)
    if Path(name).exists():
        return ""
    if name == "toy":
        return "; megapack data toy toy"
    shipped = shipped_model(folder)
    if shipped is not None:
        config = json.loads((shipped / "config.json").read_text(encoding="utf-8"))
        hub = config["_name_or_path"]
        if shipped.name.lower().endswith("-bf16") and not hub.lower().endswith("-bf16"):
            return f"; hf download {hub}, and write its weights as bf16 to {name}"
        return f"; hf download {hub} --local-dir {name}"
    if not _HUB_NAME.fullmatch(name) or name.startswith("."):
        return ""
    model = Path(name).name
    if name == f"models/{model}":
        return f"; for one of the hub: hf download ORGANISATION/{model} --local-dir {name}"
    return f"; hf download {name} --local-dir models/{model}, and set models/{model}"


def absent_weights(folder: str | None) -> str:
    """A line about a folder of which only the shipped config.json is there; "" for others."""
    if folder is None or shipped_model(folder) is None:
        return ""
    return (
        f"{folder} does not exist: sizes are those of the config.json that megapack ships, and "
        f"training needs the weights{download_hint(folder)}"
    )


def _folder() -> Path:
    """`configs`: a wheel has it inside of the package, a checkout beside the package."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"
