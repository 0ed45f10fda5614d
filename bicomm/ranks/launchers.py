"""Who started this process, and as which rank: read from the environment alone.

torchrun's variables win over MPI's, and those over Slurm's: each may have started the one before it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence

from bicomm.errors import LaunchError

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# rank, size, local rank, in the words of each MPI. Intel's and MPICH's launcher (Hydra) use the same.
_MPI = {
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "MPICH or Intel MPI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
}
# SLURM_STEP_NUM_TASKS is what tells a rank under srun from the batch script itself, which also has a SLURM_PROCID.
_SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")


@dataclasses.dataclass(frozen=True)
class Launch:
    """What the environment says of this process.

    launcher    "torchrun", "mpirun", "slurm" or "alone".
    local_rank  the rank on this host, -1 where the launcher does not say.
    said        the variables it was read from, as `NAME=value NAME=value`, for messages.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    said: str


def detect(environment: Mapping[str, str]) -> Launch:
    """The launcher of this process. Raises LaunchError, naming variables and values, where they make no sense."""
    torchrun, mpi, slurm = _torchrun(environment), _mpi(environment), _slurm(environment)
    if torchrun is not None:
        outer = mpi or slurm
        # One outer process may start many ranks, but not fewer than one.
        if outer and torchrun.size < outer.size and "TORCHELASTIC_RUN_ID" not in environment:
            raise LaunchError(
                f"the environment names two worlds: {torchrun.said} and {outer.said}. The first is the one of "
                f"torchrun, yet {outer.launcher} started more processes than it has ranks: unset {', '.join(_TORCHRUN)}"
            )
        return torchrun
    if mpi is not None and slurm is not None and (mpi.rank, mpi.size) == (slurm.rank, slurm.size):
        # srun --mpi=pmi2 sets PMI's variables for every program. Both lead to the same ranks; Slurm's way needs no MPI.
        return mpi if "OMPI_COMM_WORLD_RANK" in environment else slurm
    return mpi or slurm or Launch("alone", 0, 1, 0, "none of the variables of torchrun, MPI or srun is set")


def _torchrun(environment: Mapping[str, str]) -> Launch | None:
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return None
    missing = [name for name in _TORCHRUN if not environment.get(name)]
    if missing:
        raise LaunchError(
            f"{_say(environment, _TORCHRUN)}, but {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not "
            f"set: start with torchrun, set all of {', '.join(_TORCHRUN)}, or unset RANK and WORLD_SIZE"
        )
    _number(environment, "MASTER_PORT", 65535)
    return _launch("torchrun", environment, ("RANK", "WORLD_SIZE", "LOCAL_RANK"), "MASTER_ADDR", "MASTER_PORT")


def _mpi(environment: Mapping[str, str]) -> Launch | None:
    for names in _MPI.values():
        if names[0] in environment or names[1] in environment:
            return _launch("mpirun", environment, names)
    return None


def _slurm(environment: Mapping[str, str]) -> Launch | None:
    if _SLURM[0] in environment and _SLURM[1] in environment:
        return _launch("slurm", environment, _SLURM)
    return None


def _launch(launcher: str, environment: Mapping[str, str], names: Sequence[str], *shown: str) -> Launch:
    said = _say(environment, (*names, *shown))
    for name in names[:2]:
        if name not in environment:
            raise LaunchError(f"{said}, but {name} is not set: the variables of one launcher come together")
    rank, size = _number(environment, names[0]), _number(environment, names[1])
    local = _number(environment, names[2]) if names[2] in environment else -1
    if rank >= size or local >= size:
        raise LaunchError(f"{said}: ranks and local ranks go from 0 to the size - 1")
    return Launch(launcher, rank, size, local, said)


def _number(environment: Mapping[str, str], name: str, most: int = 1 << 31) -> int:
    text = environment[name]
    if not (text.isascii() and text.isdigit() and int(text) <= most):
        raise LaunchError(f"{name}={text!r} is not a whole number from 0 to {most}")
    return int(text)


def _say(environment: Mapping[str, str], names: Sequence[str]) -> str:
    return " ".join(f"{name}={environment[name]}" for name in names if name in environment)


def expand_nodes(text: str) -> list[str]:
    """The host names in a Slurm node list: `gpu[01-03,7],login,r[1-2]n[3,5]`, in its order, zeros kept.

    Raises LaunchError on a list that cannot be read.
    """
    nodes = [node for item in _split(text) for node in _expand(item, text)]
    if not nodes:
        raise LaunchError(f"the Slurm node list {text!r} has no node")
    return nodes


def _split(text: str) -> Iterator[str]:
    """Cut at the commas that stand outside brackets."""
    for item in re.split(r",(?![^\[]*\])", text.strip()):
        if item:
            yield item.strip()


def _expand(item: str, text: str) -> Iterator[str]:
    match = re.fullmatch(r"([^\[\]]*)(?:\[([^\[\]]+)\](.*))?", item)
    if match is None:
        raise LaunchError(f"the Slurm node list {text!r} cannot be read at {item!r}")
    head, ranges, tail = match.groups()
    if ranges is None:
        yield head
        return
    for part in ranges.split(","):
        bounds = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if bounds is None or int(bounds[2] or bounds[1]) < int(bounds[1]):
            raise LaunchError(f"the Slurm node list {text!r} cannot be read at [{ranges}]")
        first, last = bounds[1], bounds[2] or bounds[1]
        for number in range(int(first), int(last) + 1):
            for rest in _expand(tail, text):
                yield f"{head}{number:0{len(first)}d}{rest}"
