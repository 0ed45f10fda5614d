#!/usr/bin/env bash
# Runs a Python program on NPROC ranks of this host (default 8) with torchrun:
#   launch/torchrun.sh                                 the demo
#   NPROC=4 launch/torchrun.sh my_script.py --flag     a script
#   launch/torchrun.sh -m my.module --flag             a module
# It works from any directory; relative paths are the caller's. TORCHRUN_ARGS go to torchrun itself.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="$root/.venv/bin/python"
[ -x "$python" ] || python=python3
[ $# -gt 0 ] || set -- -m bicomm.demo

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # ranks share the cores; torchrun would set it too, with a warning
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
# --standalone takes a free port, so that jobs on one host do not meet.
# shellcheck disable=SC2086
exec "$python" -m torch.distributed.run --standalone --nproc-per-node="${NPROC:-8}" ${TORCHRUN_ARGS:-} "$@"
