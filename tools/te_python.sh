#!/usr/bin/env bash
# The Python of Transformer Engine without its compiled part, for tests that rehearse it on a CPU.
#
#   tools/te_python.sh [VERSION ...]    unset: 2.11.0, which CI runs
#
# Each lies in .te/VERSION of the repository, outside of .venv: a test that wants it puts the folder on
# PYTHONPATH, and all others run as on a machine without Transformer Engine. PYTHON has pip; unset:
# .venv's.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}

if (($# == 0)); then
    set -- 2.11.0
fi
for version in "$@"; do
    folder=$root/.te/$version
    if [[ -d $folder/transformer_engine && -d $folder/einops ]]; then
        continue
    fi
    # --no-deps: the package's own requirements are those of CUDA builds.
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$folder" \
        "transformer-engine==$version" einops==0.8.1
done
