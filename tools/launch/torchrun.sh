#!/usr/bin/env bash
# `megapack train` on this node, under torchrun.
#
#   tools/launch/torchrun.sh CONFIG [section.key=value ...]
#
#   PYTHON           the interpreter that has megapack; unset: .venv of the repository, or python3
#   NPROC_PER_NODE   ranks on this node; unset: one per GPU
#   RDZV_ENDPOINT, RDZV_ID, NNODES   for a job of several nodes: HOST:PORT of the first node, a name
#                    of the job, the number of nodes; train.sbatch sets them. Unset: this node alone
#   NODE_RANK, LOCAL_ADDR   for several nodes without Slurm: 0 on the node of RDZV_ENDPOINT; an address
#                    of this node that the others reach
#   MAX_RESTARTS     how often all ranks start again after one has failed or a node was lost; unset: 0
#
# For GPUs, megapack itself sets PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, and with tp > 1 or
# cp > 1 before Blackwell CUDA_DEVICE_MAX_CONNECTIONS=1. Where you set them, your values stay.
#
# SIGTERM and SIGUSR1 end the run after its current step, with a checkpoint, if train.save_interval
# is set; else they end it at once. They are passed to the ranks and not to torchrun, which would
# kill its ranks after 30 seconds. The exit code is 75 if such a signal ended the run early: start it
# again with train.resume=auto.
set -euo pipefail

if (($# == 0)); then
    echo 'torchrun.sh: no CONFIG; usage: tools/launch/torchrun.sh CONFIG [section.key=value ...]' >&2
    exit 2
fi

# shellcheck source=/dev/null
source "$(dirname "${BASH_SOURCE[0]}")/python.sh"

# Once per node, before the ranks ask for it together. Without compiled code the ranks compile.
"$PYTHON" -m megapack warm-up >&2 || true

if [[ -n ${RDZV_ENDPOINT:-} ]]; then
    # Set explicitly, because a node may know itself by another name than the other nodes do.
    is_host=$([[ ${NODE_RANK:-${SLURM_NODEID:-0}} == 0 ]] && echo true || echo false)
    options=(--nnodes "$NNODES" --rdzv-backend c10d --rdzv-endpoint "$RDZV_ENDPOINT"
        --rdzv-id "$RDZV_ID" --rdzv-conf "is_host=$is_host"
        --local-addr "${LOCAL_ADDR:-${SLURMD_NODENAME:-$(hostname)}}")
    # Else torchrun keeps the first round's address of the ranks' store, which an agent that joins
    # later is never told.
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}
else
    options=(--standalone --local-addr 127.0.0.1)
fi

if [[ -n ${MAX_RESTARTS:-} ]]; then
    options+=(--max-restarts "$MAX_RESTARTS")
fi

# Slurm sends SIGUSR1 to every process. torchrun would end at once and leave its ranks behind, so it
# ignores the signal. It has its own process group, so that signals to this script's group do not
# reach it.
set -m
(
    trap '' USR1
    exec "$PYTHON" -m torch.distributed.run "${options[@]}" \
        --nproc-per-node "${NPROC_PER_NODE:-gpu}" -m megapack train "$@"
) &
torchrun=$!
set +m

stopped=
# shellcheck disable=SC2329  # called by traps
stop() {
    local ranks
    stopped=1
    read -ra ranks -d '' < <(cat "/proc/$torchrun/task/"*/children 2>/dev/null) || true
    if ((${#ranks[@]})); then
        kill -USR1 "${ranks[@]}" 2>/dev/null || true
    else
        kill -TERM "$torchrun" 2>/dev/null || true
    fi
}
trap stop USR1 TERM
trap 'kill -INT "$torchrun" 2>/dev/null || true' INT HUP QUIT

# `wait` returns early on a signal.
while kill -0 "$torchrun" 2>/dev/null; do
    wait "$torchrun" || true
done
code=0
wait "$torchrun" || code=$?
if ((code)) && [[ -n $stopped ]]; then
    code=75
fi
exit "$code"
