#!/usr/bin/env bash
# Train on all GPUs of this machine, or of several:  runs/torchrun.sh RECIPE [--frames STORE] [--run RUN] [settings]
#
#   PROCESSES=8    processes on each machine (default: one per GPU; without a GPU one per core)
#   NODES=2        machines; start this script on each of them, with the same words
#   HEAD=host:port where they meet, an address of one of them (default 127.0.0.1:29400)
#   RESTARTS=3     how often all processes start again, from the last checkpoint, when one dies (default 0)
#   PYTHON=python  the Python that has tcore (default: python3)
set -euo pipefail

if [[ $# -eq 0 ]]; then
    sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi

exec "${PYTHON:-python3}" -m torch.distributed.run \
    --nnodes "${NODES:-1}" \
    --nproc-per-node "${PROCESSES:-auto}" \
    --rdzv-backend c10d \
    --rdzv-endpoint "${HEAD:-127.0.0.1:29400}" \
    --rdzv-id "${JOB:-tcore}" \
    --max-restarts "${RESTARTS:-0}" \
    -m tcore -- train "$@"
