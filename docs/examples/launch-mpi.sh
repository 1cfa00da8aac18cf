#!/usr/bin/env bash
# Reshards a checkpoint with the workers of an MPI launcher (Open MPI, MPICH, Intel MPI).
#   launch-mpi.sh N SRC DST [OPTIONS of ckpt reshard]             N workers on this host
#   HOSTS=node1:8,node2:8 launch-mpi.sh 16 SRC DST …              on several hosts (Open MPI's --host)
# Failed workers are not restarted; run the same command again to continue from what is already written.
set -euo pipefail
(($# >= 3)) || { echo "usage: launch-mpi.sh N SRC DST [OPTIONS of ckpt reshard]" >&2; exit 2; }
n_workers=$1
shift
hosts=()
if [[ -n ${HOSTS:-} ]]; then
  # Open MPI does not say where rank 0 runs, so use the first host and a port of our choice.
  first=${HOSTS%%,*}
  hosts=(--host "$HOSTS" -x "MASTER_ADDR=${first%%:*}" -x "MASTER_PORT=${MASTER_PORT:-29500}")
fi
exec mpirun -n "$n_workers" "${hosts[@]}" python -m ckpt_cli.worker reshard "$@"
