#!/usr/bin/env bash
# Makes .venv in the repository (or FOLDER), with megapack (editable) and all that its tests need.
#
# Run again, it does nothing unless setup.py, the constraints or this script changed. An environment
# that `uv sync` made is left as it is.
# A torch that is already there, in PYTHON's own packages or in .venv, is never installed over:
# its exact version becomes a constraint for pip. Else the tested versions are installed.
#
#   tools/venv.sh [FOLDER] [EXTRA]
#
#   EXTRA     one more of setup.py's extras, for example hf, which the demo does not need
#   PYTHON    the interpreter to build on; unset: python3, if it is 3.11 or newer
#   NEWEST    1: the newest release of each package in place of the tested one, but for torch where it
#             is there already
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$(realpath -ms "${1:-$root/.venv}")
extras=dev${2:+,$2}
stamp=$venv/megapack${2:+.$2}.stamp

die() {
    printf 'tools/venv.sh: %s\n' "$*" >&2
    exit 2
}

recent_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
    local name
    if [[ -n ${PYTHON:-} ]]; then
        recent_enough "$PYTHON" || die "PYTHON=$PYTHON is not a Python of 3.11 or newer"
        command -v "$PYTHON"
        return
    fi
    for name in python3 python3.13 python3.12 python3.11; do
        if recent_enough "$name"; then
            command -v "$name"
            return
        fi
    done
    die 'no python3 of 3.11 or newer; install one, or set PYTHON to its path'
}

# Changes when something changes that the environment is made of, or the repository moved.
fingerprint() {
    "$venv/bin/python" - "$root" "$root"/{setup.py,pyproject.toml,tools/{constraints.txt,venv.sh}} <<'PY'
import hashlib
import pathlib
import sys

digest = hashlib.sha256(f"{sys.version} {sys.argv[1]}".encode())
for path in sys.argv[2:]:
    digest.update(pathlib.Path(path).read_bytes())
print(digest.hexdigest())
PY
}

# Where torch is among the interpreter's own packages, the folders of those packages, else nothing.
# A virtual environment's packages are invisible to one that is made from it; these lines show them.
sites_with_torch() {
    "$1" - <<'PY'
import importlib.util
import sys

if importlib.util.find_spec("torch"):
    print(*[path for path in sys.path if path.endswith(("site-packages", "dist-packages"))], sep="\n")
PY
}

make_venv() {
    local python=$1 sites own
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        die "$python has no venv module; install it (Debian and Ubuntu: python3-venv)"
    sites=$(sites_with_torch "$python")
    "$python" -m venv --clear "$venv"
    if [[ -n $sites ]]; then
        own=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        printf '%s\n' "$sites" >"$own/_packages_with_torch.pth"
    fi
}

# The tested versions, less those of packages that the interpreter brings along, and torch as found.
constraints() {
    "$venv/bin/python" - "$root/tools/constraints.txt" <<'PY'
import os
import pathlib
import sys
from importlib import metadata

own = pathlib.Path(sys.prefix).resolve()
for line in pathlib.Path(sys.argv[1]).read_text().splitlines():
    name, _, pinned = line.partition("==")
    try:
        found = metadata.distribution(name) if pinned else None
    except metadata.PackageNotFoundError:
        found = None
    if found is not None and name == "torch":
        print(f"torch=={found.version}")
        print(f"tools/venv.sh: torch {found.version} is there and left alone", file=sys.stderr)
    elif not os.environ.get("NEWEST") and (
        found is None or own in pathlib.Path(found.locate_file("")).resolve().parents
    ):
        print(line)
PY
}

main() {
    local python
    # Two scripts started together must not install into each other.
    if command -v flock >/dev/null; then
        exec 9>"$venv.lock"
        flock 9
    fi
    if ! "$venv/bin/python" -c '' 2>/dev/null; then
        python=$(find_python)
        printf 'making %s with %s\n' "$venv" "$("$python" --version)"
        make_venv "$python"
    fi
    # Made by `uv sync`, which keeps it; it has no pip.
    if grep -qs '^uv = ' "$venv/pyvenv.cfg"; then
        return
    fi
    recent_enough "$venv/bin/python" || die "$venv has a Python older than 3.11; remove it"
    if [[ $(cat "$stamp" 2>/dev/null) == "$(fingerprint)" ]]; then
        return
    fi
    constraints >"$venv/constraints.txt"
    printf 'installing megapack and its dependencies into %s\n' "$venv"
    # Python compiles what is imported, unless PYTHONDONTWRITEBYTECODE is set; pip would compile all,
    # 10,000 files of torch and transformers.
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile \
        --constraint "$venv/constraints.txt" --editable "${root}[$extras]" ||
        die "pip failed, see above; a package without a wheel for this machine needs a C compiler"
    # What has more has dev too.
    fingerprint | tee "$stamp" >"$venv/megapack.stamp"
}

main
