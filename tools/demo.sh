#!/usr/bin/env bash
# The main job on this machine's CPU: four processes, dp2 x pp2 x vpp2, generated rollouts.
#
#   tools/demo.sh [section.key=value ...]    overrides of the config; paths from the repository
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/tools/venv.sh"
cd "$root"

# One thread per process: four processes share the cores.
export OMP_NUM_THREADS=1
# --standalone picks a free port; --local-addr avoids a look-up of the machine's name.
exec .venv/bin/python -m torch.distributed.run --standalone --local-addr 127.0.0.1 \
    --nproc-per-node 4 -m megapack train configs/gpt_tiny_dp2_pp2_vpp2_cpu.yaml \
    plan.calibrate=start "$@"
