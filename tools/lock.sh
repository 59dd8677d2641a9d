#!/usr/bin/env bash
# Writes uv.lock anew: the newest releases that setup.py allows, but those of tools/constraints.txt
# where they are there. Needs a network and uv (`pip install uv`).
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
pins=()
# megatron-core, with a version per Python, follows from its own limits.
while IFS= read -r pin; do
    pins+=(--upgrade-package "$pin")
done < <(grep '==' tools/constraints.txt | grep -v ';')
# The lock names the public index, whatever this machine has set.
uv lock --default-index https://pypi.org/simple "${pins[@]}"
