"""Every command of docs/first_model.md and docs/rollouts.md, with a tiny model as the download."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hf_models import make_folder

pytestmark = pytest.mark.weekly

_BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Installs, and the command that docs/rollouts.md begins with, before its files are made.
_SKIPPED = re.compile(
    r"^(?:pip install|hf download|megapack train grpo.yaml data.path=) ?.*\n", re.MULTILINE
)
_PAGES = ("first_model.md", "rollouts.md")
# What a CPU needs. Everything else runs as it is printed.
_ON_A_CPU = {"device: cuda": "device: cpu", "dtype: bf16": "dtype: fp32"}
_TIMEOUT_S = 1200


def script(pages: str) -> str:
    """The pages' commands as one script that ends at the first that fails."""
    text = _SKIPPED.sub("", "".join(_BLOCK.findall(pages)))
    for on_gpu, on_cpu in _ON_A_CPU.items():
        assert on_gpu in text
        text = text.replace(on_gpu, on_cpu)
    return f"set -euxo pipefail\n{text}"


def test_every_command_of_the_pages_runs(tmp_path: Path, repo_root: Path) -> None:
    pytest.importorskip("transformers")
    make_folder(tmp_path / "models" / "Qwen3-0.6B", "qwen3_tied", max_position_embeddings=4096)
    (tmp_path / "tools").symlink_to(repo_root / "tools")
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "PYTHONPATH": str(repo_root),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    pages = "".join((repo_root / "docs" / name).read_text("utf-8") for name in _PAGES)
    done = subprocess.run(
        ["bash", "-c", script(pages)],
        cwd=tmp_path,
        env=environment,
        timeout=_TIMEOUT_S,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-4000:]
    for folder in ("toy_trained", "models/sft", "runs/grpo/hf/step-00000002"):
        assert (tmp_path / folder / "config.json").is_file()
        assert list((tmp_path / folder).glob("*.safetensors"))
    assert re.search(r"step 2/\d+: loss", done.stdout)
