#!/usr/bin/env bash
# Whole steps of hosts' own code on a CPU, with megapack's patches and without.
#
#   tools/host_steps.sh                  every host whose code is here
#   tools/host_steps.sh slime verl       these hosts
#   tools/host_steps.sh verl -- -x       pytest's arguments
#
#   MEGAPACK_HOST_SOURCES    a folder with source trees: slime/, miles/, nemo-rl/, skyrl/, ...
#   PYTHON                   the interpreter; unset: .venv of the repository, then python3
#
# Hosts with a release on the package index need no tree. A test without its host's code is skipped,
# with the reason. Takes minutes per host. The exit code is pytest's; 5: no such test.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

if [[ -z ${PYTHON:-} ]]; then
    PYTHON=python3
    [[ -x .venv/bin/python ]] && PYTHON=.venv/bin/python
fi

shopt -s nullglob
files=()
while (($#)) && [[ $1 != -- ]]; do
    file=tests/hosts/test_step_$1.py
    if [[ ! -f $file ]]; then
        printf 'tools/host_steps.sh: no steps of %s; there are:\n' "$1" >&2
        printf '  %s\n' tests/hosts/test_step_*.py >&2
        exit 2
    fi
    files+=("$file")
    shift
done
(($#)) && shift

export OMP_NUM_THREADS=1
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
exec "$PYTHON" -m pytest -m host_steps "${files[@]:-tests/hosts}" "$@"
