#!/usr/bin/env bash
# The tests on each version of Megatron-Core that megapack is tested with, or on a source tree.
#
#   tools/test_versions.sh [pytest arguments]             all of tools/test.sh on each release
#   tools/test_versions.sh --megatron WHAT [arguments]    on one: a release (0.17.1), or a FOLDER with
#                                                         the sources of Megatron-LM or of a fork
#   tools/test_versions.sh --sample [...]                 some of what Megatron-Core runs; without
#                                                         --megatron on the newest release alone
#   tools/test_versions.sh --newest [arguments]           a sample with the newest release of every
#                                                         package, tested or not
#
#   PYTHON311, PYTHON312    the interpreters; unset: python3.11 and python3.12, or pyenv's
#
# Run from any folder; paths to tests are from the repository. The releases, with the Python of each,
# are in megapack/base/megatron.py. The environments are .venv-3.11 and .venv-3.12 in the repository,
# made by tools/venv.sh; a release other than the one that is installed there lies in
# .megatron/VERSION, without its dependencies; that of --newest is .venv-newest. It, or the source tree, is first on PYTHONPATH, also of
# the processes that the tests start. The exit code is 2 for wrong arguments, and 3 if an interpreter
# is missing.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# Each kind of parallelism is in at least one of these cases.
readonly SAMPLE='tp2_sp_pp2_recompute or cp2_pp2_vpp2_pad or mtp_moe_dp2_pp2'

die() {
    printf 'tools/test_versions.sh: %s\n' "$*" >&2
    exit 2
}

# Lines such as "0.17.1 3.12", the oldest first.
releases() {
    sed -nE 's/^    "([0-9.]+)": "(3\.[0-9]+)",.*/\1 \2/p' "$root/megapack/base/megatron.py"
}

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

# The Python that a source tree asks for, of the two that are tested.
python_of() {
    if grep -qsE '^ *requires-python *= *.*3\.1[2-9]' "$1/pyproject.toml"; then
        printf '3.12\n'
    else
        printf '3.11\n'
    fi
}

# The folder of a release; nothing if the environment has it installed.
unpacked() {
    local venv=$1 release=$2 folder=$root/.megatron/$2
    if "$venv/bin/python" -c "
import sys
from importlib.metadata import version
sys.exit(version('megatron-core') != '$release')"; then
        return
    fi
    if [[ ! -d $folder/megatron/core ]]; then
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps \
            --target "$folder" "megatron-core==$release" >&2 || return
    fi
    printf '%s\n' "$folder"
}

# pytest with what WHAT names: a release, or the absolute path of a source tree.
on() {
    local what=$1 version=$2 python venv=$root/.venv-$2 folder
    shift 2
    python=$(find_python "$version") || return
    printf '\n== megatron-core %s, Python %s: pytest %s\n' "$what" "$version" "$*"
    PYTHON=$python "$root/tools/venv.sh" "$venv" hf || return
    if [[ $what == /* ]]; then
        # Of the tree only `megatron`: its `tools` is a package and would hide the repository's.
        folder=$root/.megatron/tree-$(cksum <<<"$what" | cut -d ' ' -f 1)
        mkdir -p "$folder" && ln -sfn "$what/megatron" "$folder/megatron" || return
    else
        folder=$(unpacked "$venv" "$what") || return
    fi
    (
        cd "$root"
        if [[ -n $folder ]]; then
            export PYTHONPATH=$folder${PYTHONPATH:+:$PYTHONPATH}
        fi
        OMP_NUM_THREADS=1 "$venv/bin/python" -m pytest -p tests.progress "$@"
    )
}

# What reads other packages' names most: transformers, tokenizers, torch, Transformer Engine's Python.
newest() {
    local version=$1 python venv=$root/.venv-newest te
    shift
    python=$(find_python "$version") || return
    NEWEST=1 PYTHON=$python "$root/tools/venv.sh" "$venv" hf || return
    te=$("$venv/bin/python" -m pip index versions transformer-engine 2>/dev/null |
        sed -nE '1s/.*\(([0-9.]+)\).*/\1/p')
    PYTHON=$venv/bin/python "$root/tools/te_python.sh" "${te:-2.11.0}" || true
    "$venv/bin/python" -m pip list --disable-pip-version-check |
        grep -E '^(torch|megatron-core|transformers|tokenizers|numpy|numba|scipy|pyarrow) ' || true
    cd "$root"
    OMP_NUM_THREADS=1 "$venv/bin/python" -m pytest -p tests.progress \
        tests/unit/{job/hf,job/data,job/gpt,model,schedule,base,cpu} tests/golden "$@" || return
    OMP_NUM_THREADS=1 "$venv/bin/python" -m pytest -p tests.progress \
        tests/dist/exactness/test_exactness.py -k "$SAMPLE" "$@"
}

run() {
    local what=$1 version=$2 status=0
    shift 2
    if [[ -z $sample ]]; then
        on "$what" "$version" "$@"
        return
    fi
    # The plans are small: without compiling the planner for one more Python this is minutes shorter.
    local -x NUMBA_DISABLE_JIT=${NUMBA_DISABLE_JIT-1}
    # HybridModel needs Megatron-Core 0.18, so that tools/test.sh skips it. Hyper-connections are in
    # main alone.
    on "$what" "$version" tests/unit/model/test_{stock_mixers,hyper_connections}.py \
        tests/dist/{exactness/test_{hybrid_exactness,streams},rows/test_{hybrid,streams}_rows}.py \
        tests/dist/model/test_two_classes.py "$@" || status=$?
    # Without a Python the second part would only say so again.
    ((status == 3)) ||
        # Hybrid models above have the other kinds of parallelism.
        on "$what" "$version" tests/dist/exactness/test_exactness.py -k mtp_moe_dp2_pp2 "$@" || status=$?
    return "$status"
}

known=$(releases)
sample=
what=
while (($#)); do
    case $1 in
        --help)
            sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
            exit
            ;;
        --sample) sample=1 ;;
        --newest)
            [[ -z $sample$what ]] || die '--newest has its own tests; give it alone'
            shift
            newest "$(tail -n 1 <<<"$known" | cut -d ' ' -f 2)" "$@"
            exit
            ;;
        --megatron)
            [[ -n ${2:-} ]] || die '--megatron needs a release or a folder'
            [[ -z $what ]] || die '--megatron is given twice'
            what=$2
            shift
            ;;
        *) break ;;
    esac
    shift
done
# Further on it would be an argument of pytest's, which does not know it.
for argument in "$@"; do
    [[ $argument != --sample && $argument != --megatron ]] ||
        die "$argument comes before the arguments of pytest"
done

if [[ -n $what ]]; then
    version=$(awk -v what="$what" '$1 == what { print $2 }' <<<"$known")
    if [[ -z $version ]]; then
        [[ -f $what/megatron/core/package_info.py ]] ||
            die "$what is neither a tested release ($(awk '{ printf "%s%s", sep, $1; sep = ", " }' \
                <<<"$known")) nor a folder with megatron/core"
        what=$(cd "$what" && pwd)
        version=$(python_of "$what")
    fi
    run "$what" "$version" "$@"
    exit
fi
if [[ -n $sample ]]; then
    known=$(tail -n 1 <<<"$known")
fi
status=0
while read -r release version; do
    run "$release" "$version" "$@" || status=$?
done <<<"$known"
exit "$status"
