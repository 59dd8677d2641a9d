# shellcheck shell=bash
# For the scripts beside it, which source it: sets and exports PYTHON, or ends them in one line.
#
# PYTHON stays where it is set. Else it is the repository's .venv, where that is there, or python3.
if [[ -z ${PYTHON:-} ]]; then
    PYTHON=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)/.venv/bin/python
    [[ -x $PYTHON ]] || PYTHON=python3
fi
export PYTHON
if ! command -v "$PYTHON" >/dev/null; then
    printf '%s: no interpreter %s; set PYTHON to one that has megapack\n' \
        "$(basename "$0")" "$PYTHON" >&2
    exit 2
fi
missing=$("$PYTHON" -c '
from importlib.util import find_spec
print(*(name for name in ("megapack", "torch", "megatron", "numba") if find_spec(name) is None))')
if [[ -n $missing ]]; then
    printf '%s: %s lacks %s; set PYTHON to an interpreter that has megapack, or run tools/venv.sh\n' \
        "$(basename "$0")" "$(command -v "$PYTHON")" "${missing// /, }" >&2
    exit 2
fi
