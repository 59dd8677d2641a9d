#!/usr/bin/env bash
# Whole steps of hosts' own code on a CPU, with megapack's patches and without.
#
#   tools/host_steps.sh                  every host whose code is here
#   tools/host_steps.sh slime verl       these hosts
#   tools/host_steps.sh verl -- -x       pytest's arguments
#   tools/host_steps.sh --sample         a test of each of two hosts that have releases; .ci/run runs it
#
#   MEGAPACK_HOST_SOURCES    a folder with source trees: slime/, miles/, nemo-rl/, skyrl/, ...
#   MEGAPACK_HOST_RELEASES   releases in place of the newest tested ones: skyrl==0.3.0,...
#   PYTHON                   the interpreter; unset: .venv of the repository, then python3
#
# Hosts with a release on the package index need no tree. A test without its host's code is skipped,
# with the reason. Takes minutes per host. The exit code is pytest's; 5: no such test.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

if [[ -z ${PYTHON:-} ]]; then
    PYTHON=python3
    [[ ! -x .venv/bin/python ]] || PYTHON=.venv/bin/python
fi

shopt -s nullglob
files=()
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' tools/host_steps.sh
    exit 0
elif [[ ${1:-} == --sample ]]; then
    if [[ ${2:---} != -- ]]; then
        printf 'tools/host_steps.sh: --sample has its own hosts; leave out %s\n' "$2" >&2
        exit 2
    fi
    files=(
        'tests/hosts/test_step_verl.py::test_a_patched_step_is_the_unpatched_one[pp=2-local]'
        'tests/hosts/test_step_ms_swift.py::test_rows_are_the_planners_packs_and_their_shapes_are_not_exchanged[pp=2]'
    )
    shift
fi
while (($#)) && [[ $1 != -- ]]; do
    if [[ $1 == --sample ]]; then
        printf 'tools/host_steps.sh: --sample has its own hosts; give it alone\n' >&2
        exit 2
    fi
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
