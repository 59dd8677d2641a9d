#!/usr/bin/env bash
# Compares megapack's functions with a host's own, on random inputs. Needs a package index.
#
#   tools/host_check.sh verl    verl's own seqlen_balancing.py, installed into a separate folder
#
# Exits with 1 if megapack loses samples, balances worse, or goes over a budget.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
host=${1:-}
declare -A packages=([verl]=verl==0.9.1)

package=${packages[${host:-none}]:-}
if [[ -z $package ]]; then
    printf 'tools/host_check.sh: no host %q; known: %s\n' "$host" "${!packages[*]}" >&2
    exit 2
fi
python=python
if [[ -z ${VIRTUAL_ENV:-} ]]; then
    "$root/tools/venv.sh"
    python=$root/.venv/bin/python
fi
folder=${TMPDIR:-/tmp}/megapack-hosts/$package
if [[ ! -d $folder/$host ]]; then
    # Without dependencies: some of them are whole training stacks.
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$folder" "$package"
fi
PYTHONPATH=$root exec "$python" "$root/tools/host_check_$host.py" "$folder"
