"""config.json of public models, to plan and price them without a download: those of configs/models.

python tools/benching/hf_configs.py FOLDER    writes FOLDER/models/NAME/config.json of each
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

_MODELS = Path(__file__).resolve().parents[2] / "configs" / "models"

HF_CONFIGS: dict[str, dict[str, Any]] = {
    path.parent.name: json.loads(path.read_text(encoding="utf-8"))
    for path in sorted(_MODELS.glob("*/config.json"))
}
"""config.json by the name of its model."""


def write_hf_configs(folder: Path, **changes: Any) -> Path:
    """Write models/NAME/config.json of each model under `folder`; returns `folder`.

    Args:
        changes: keys of config.json with other values, in every model.
    """
    for name, config in HF_CONFIGS.items():
        path = folder / "models" / name / "config.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**config, **changes}, indent=2) + "\n", encoding="utf-8")
    return folder


if __name__ == "__main__":
    write_hf_configs(Path(sys.argv[1]))
