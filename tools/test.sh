#!/usr/bin/env bash
# Every test that needs no GPU, except the slow ones; `tools/test.sh -m slow` runs those.
#
#   tools/test.sh [pytest arguments]    paths from the repository
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/tools/venv.sh" "$root/.venv" hf
"$root/tools/te_python.sh" || printf '%s\n' 'tests that rehearse Transformer Engine skip' >&2
cd "$root"

export OMP_NUM_THREADS=1
exec .venv/bin/python -m pytest "$@"
