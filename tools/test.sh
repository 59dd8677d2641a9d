#!/usr/bin/env bash
# Every test that needs no GPU, except the slow ones; `tools/test.sh -m 'slow or weekly'` runs those.
#
#   tools/test.sh [pytest arguments]            paths from the repository
#   tools/test.sh --quick [pytest arguments]    the tests that tests/quick.txt names: two minutes
#
# A line every 20 seconds says how many tests have run, and about how long the others will take.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/tools/venv.sh" "$root/.venv" hf
"$root/tools/te_python.sh" || printf '%s\n' 'tests that rehearse Transformer Engine skip' >&2
cd "$root"

if [[ ${1:-} == --quick ]]; then
    shift
    set -- @tests/quick.txt "$@"
fi
export OMP_NUM_THREADS=1
exec .venv/bin/python -m pytest -p tests.progress "$@"
