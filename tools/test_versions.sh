#!/usr/bin/env bash
# The tests on both supported pairs of Python and Megatron-Core: 3.11 with 0.16.1, 3.12 with 0.19.2.
#
#   tools/test_versions.sh [pytest arguments]    all of tools/test.sh on each pair
#   tools/test_versions.sh --sample              on 3.12 alone: some of what Megatron-Core runs
#
#   PYTHON311, PYTHON312    the interpreters; unset: python3.11 and python3.12, or pyenv's
#
# Run from any folder; paths are from the repository. The environments are .venv-3.11 and .venv-3.12
# in the repository, made by tools/venv.sh. The exit code is 3 if an interpreter is missing.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# Each kind of parallelism is in at least one of these cases.
readonly SAMPLE='tp2_sp_pp2_recompute or cp2_pp2_vpp2_pad or mtp_moe_dp2_pp2'

find_python() {
    local version=$1 name=PYTHON${1/./} candidate
    local test="import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$version')"
    for candidate in "${!name:-python$version}" \
        "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python; do
        if "$candidate" -c "$test" 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    printf 'tools/test_versions.sh: no Python %s; set %s to its path\n' "$version" "$name" >&2
    return 3
}

on() {
    local version=$1 python venv=$root/.venv-$1
    shift
    python=$(find_python "$version") || return
    printf '\n== Python %s: pytest %s\n' "$version" "$*"
    PYTHON=$python "$root/tools/venv.sh" "$venv" hf
    OMP_NUM_THREADS=1 "$venv/bin/python" -m pytest "$@"
}

if [[ ${1:-} == --sample ]]; then
    shift
    on 3.12 tests/unit/{checkpoint,schedule} tests/dist/checkpoint/test_checkpoint_state.py "$@"
    on 3.12 tests/dist/exactness/test_exactness.py -k "$SAMPLE" "$@"
    exit
fi
status=0
for version in 3.11 3.12; do
    on "$version" "$@" || status=$?
done
exit "$status"
