#!/usr/bin/env bash
# Liger's Python without what it requires, for tests that compare its fused head with torch's.
#
# It lies in .liger/VERSION of the repository, outside of .venv; see tests/liger_python.py. PYTHON has
# pip; unset: .venv's.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
version=0.8.5
folder=$root/.liger/$version
if [[ ! -d $folder/liger_kernel ]]; then
    "${PYTHON:-$root/.venv/bin/python}" -m pip install --quiet --disable-pip-version-check --no-deps \
        --target "$folder" "liger-kernel==$version"
fi
