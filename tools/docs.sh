#!/usr/bin/env bash
# Builds the documents into build/site. A broken link, or a page that would load
# something from another machine is an error.
#
#   tools/docs.sh [mkdocs build arguments]
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$root/.venv/bin/python
"$root/tools/venv.sh"
cd "$root"

# tools/venv.sh does not install these, because neither the demo nor the tests need them.
if ! "$python" -c 'import material' 2>/dev/null; then
    "$python" -m pip install --quiet --disable-pip-version-check \
        --constraint .venv/constraints.txt --editable "${root}[docs]"
fi
NO_MKDOCS_2_WARNING=1 "$python" -m mkdocs build --quiet "$@"
"$python" tools/check_site.py build/site
