#!/usr/bin/env bash
# Runs bench/ep_sweep.py on this host, a rank for each GPU (4 ranks on the CPU where there is none):
#   launch/ep_sweep.sh                                 the whole sweep
#   NPROC=4 launch/ep_sweep.sh --tokens 1,64,4096      four ranks, three sizes
#   LAUNCHER=mpirun launch/ep_sweep.sh                 by mpirun instead of torchrun
# Under Slurm: sbatch launch/slurm.sbatch bench/ep_sweep.py      (two nodes: sbatch --nodes=2 ...)
# No multicast memory is made or used, unless --allow-multicast is given, which the machine's owner must agree to.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
if [ -z "${NPROC:-}" ]; then
	gpus="$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)"
	if [ "$gpus" -gt 0 ] && [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then # those that the ranks will see
		gpus="$(tr , '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c . || true)"
	fi
	NPROC="$([ "$gpus" -gt 0 ] && echo "$gpus" || echo 4)"
fi
export NPROC
allowed=
for word in "$@"; do [ "$word" != --allow-multicast ] || allowed=1; done
if [ -z "$allowed" ]; then
	export TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NCCL_NVLS_ENABLE=0 NVSHMEM_DISABLE_NVLS=1
fi
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-32}" # read when CUDA starts
if [ "$NPROC" -eq 1 ]; then # one GPU alone: a local world
	python="$root/.venv/bin/python"
	[ -x "$python" ] || python=python3
	exec "$python" "$root/bench/ep_sweep.py" "$@"
fi
exec "$root/launch/${LAUNCHER:-torchrun}.sh" "$root/bench/ep_sweep.py" "$@"
