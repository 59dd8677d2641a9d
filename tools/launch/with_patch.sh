#!/usr/bin/env bash
# Another framework's own launch command, with megapack patched into it.
#
#   tools/launch/with_patch.sh HOST[,HOST] COMMAND [ARGUMENT ...]
#   tools/launch/with_patch.sh slime bash scripts/run-qwen3-4B.sh
#
# HOST is a name that `megapack patch list` shows. This script serves all hosts: it sets
# MEGAPACK_PATCH, which every Python process that COMMAND starts reads, including actors of a Ray
# cluster that COMMAND starts. In a Ray cluster that already runs, actors get the job's variables:
#
#   ray job submit --runtime-env-json '{"env_vars": {"MEGAPACK_PATCH": "slime"}}' -- COMMAND
set -euo pipefail

if (($# < 2)); then
    echo 'with_patch.sh: usage: tools/launch/with_patch.sh HOST[,HOST] COMMAND [ARGUMENT ...]' >&2
    exit 2
fi
export MEGAPACK_PATCH=$1
shift
exec "$@"
