#!/usr/bin/env bash
# Train on several machines under SLURM:  sbatch --nodes 2 runs/slurm.sh RECIPE --frames STORE --run RUN [settings]
#
# When SLURM takes the machines away (pre-emption, time limit), the job is put back into the queue and goes on
# from its last checkpoint. RUN and STORE must be on a file system that every machine sees.
# PYTHON is the Python that has tcore (default: python3); change partition and account to yours.
#SBATCH --job-name=tcore
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=tcore-%j.log
#SBATCH --signal=B:USR1@120
set -euo pipefail

if [[ $# -eq 0 || -z "${SLURM_JOB_ID:-}" ]]; then
    sed -n '2,6s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi

export PYTHON="${PYTHON:-python3}"
# The machines meet at the first of them; a port of its own for every job.
read -r first < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
port=$((20000 + SLURM_JOB_ID % 20000))
step=

requeue() {
    echo "$(date +%FT%T) job $SLURM_JOB_ID: $1; back into the queue" >&2
    trap '' USR1 TERM
    # torchrun hands SIGTERM to the training processes and gives them 30 s.
    kill -TERM "$step" 2>/dev/null || true
    wait "$step" || true
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
}
trap 'requeue "the time limit is near"' USR1
trap 'requeue "pre-empted"' TERM

# srun starts one torchrun on each machine, and torchrun one process for each GPU.
srun --kill-on-bad-exit=1 "$PYTHON" -m torch.distributed.run \
    --nnodes "${SLURM_JOB_NUM_NODES:-1}" \
    --nproc-per-node "${PROCESSES:-auto}" \
    --rdzv-backend c10d \
    --rdzv-endpoint "$first:$port" \
    --rdzv-id "$SLURM_JOB_ID" \
    --max-restarts "${RESTARTS:-3}" \
    -m tcore -- train "$@" &
step=$!
wait "$step"
