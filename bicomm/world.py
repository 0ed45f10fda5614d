"""Who the ranks are: `init` finds it out from torchrun, mpirun, Slurm, a process group, or one process alone."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import math
import numbers
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store
from torch.distributed.distributed_c10d import _world as _groups

from bicomm.errors import LaunchError, NotInitialized
from bicomm.ranks import rendezvous
from bicomm.ranks.attempt import meet
from bicomm.ranks.launchers import detect
from bicomm.ranks.peers import Peer, local_rank, place, shares_gpu, this_process

TIMEOUT = 120.0


@dataclasses.dataclass(frozen=True, eq=False)
class World:
    """The ranks that work together.

    launcher    "torchrun", "mpirun", "slurm", "alone", "mpi4py" or "process group": where the ranks come from.
    local_rank  this rank among those of its host. device: `cpu`, or the GPU of this rank, which is also set.
    group       gloo on CPUs and where ranks share a GPU, else gloo for CPU tensors and NCCL for CUDA tensors.
    store       of these ranks alone, for small messages between hosts.
    peers       what each rank told of itself, by rank.
    """

    rank: int
    size: int
    local_rank: int
    device: torch.device
    launcher: str
    group: dist.ProcessGroup
    store: dist.Store
    peers: tuple[Peer, ...]

    @property
    def one_host(self) -> bool:
        """Do all ranks run on one host? Containers of one host count as one, and may still share no memory."""
        return len({peer.boot for peer in self.peers}) == 1

    @property
    def shares_gpu(self) -> bool:
        """Do two ranks use one GPU?"""
        return shares_gpu(self.peers)


_current: World | None = None
_maker: World | None = None  # the world whose process group was made here
_home = 0  # the process that these are of: a fork inherits them, and is no rank
_closers: list[Callable[[], None]] = []


def init(
    group: dist.ProcessGroup | None = None,
    comm: Any = None,
    device: torch.device | str | None = None,
    timeout: float = TIMEOUT,
) -> World:
    """Find the other ranks; collective. `bicomm.combine` and new communicators then use what this returns.

    group: an existing process group. comm: an mpi4py communicator. Without either: torch.distributed's default group
    where there is one, else the launcher's word, else this process is a world of its own. device: `cpu` or a GPU;
    without it, the GPU that is set, or the one of the local rank. timeout: seconds to wait for the others, and for each
    collective of a group that is made here. Called again without arguments it returns the same world, as long as its
    process group is there.

    Raises LaunchError where the environment makes no sense, or the ranks do not find each other: then on all that
    came, and all can try again, however often each of them did.
    """
    global _current
    if group is None and comm is None and device is None and _current is not None and stands(_current.group):
        return _current
    _current = resolve(group, comm, device, timeout)
    return _current


def current() -> World:
    """The world of the last `init`. Raises NotInitialized before it, and after its process group was destroyed."""
    if _forked():
        raise NotInitialized(_FORKED.format(_home))
    if _current is None or not stands(_current.group):
        raise NotInitialized(
            "no ranks are known yet. Write, once and on every rank:\n    import bicomm\n    bicomm.init()"
        )
    return _current


def stands(group: dist.ProcessGroup) -> bool:
    """Whether this process may use the group: torch has not destroyed it, and it was not inherited by a fork."""
    return group in _groups.pg_map and not _forked()


_FORKED = (
    "this process was forked from process {}, which is a rank, and is none itself: call bicomm in that one only, or "
    "start ranks with a launcher"
)


def _forked() -> bool:
    return _home not in (0, os.getpid())


def at_shutdown(close: Callable[[], None]) -> None:
    """Have `close` called by the next `shutdown`, before the process group goes."""
    _closers.append(close)


def shutdown() -> None:
    """Forget the ranks, and destroy the process group if `init` made it. Without an `init`, nothing happens."""
    global _current, _maker
    _current, maker, _maker = None, _maker, None
    if _forked():  # an exit function that was inherited: these connections are the parent's
        return
    while _closers:
        _closers.pop()()
    if maker is None or not stands(maker.group):
        return
    # A store goes with the process that holds it, which therefore leaves last. But a process that ends by an exception
    # waits for nobody, and where the holder has gone there is nothing to wait for.
    if getattr(sys, "last_value", None) is None:
        with contextlib.suppress(RuntimeError):
            rendezvous.take_leave(maker.store, maker.rank, maker.size, seconds=5.0)
    dist.destroy_process_group()


def resolve(
    group: dist.ProcessGroup | None = None,
    comm: Any = None,
    device: torch.device | str | None = None,
    timeout: float = TIMEOUT,
) -> World:
    """What `init` does, without making the result the current world."""
    global _home
    _check(group, comm, timeout)
    if _forked():
        raise LaunchError(_FORKED.format(_home))
    wanted = torch.device(device) if device is not None else None
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
        if comm is not None and (comm.Get_rank(), comm.Get_size()) != (dist.get_rank(), dist.get_world_size()):
            raise LaunchError(
                f"torch.distributed is initialised as rank {dist.get_rank()} of {dist.get_world_size()}, but comm is "
                f"rank {comm.Get_rank()} of {comm.Get_size()}: pass group= for a part of the ranks"
            )
    found = _from_launcher(comm, wanted, timeout) if group is None else _from_group(group, wanted, timeout)
    _home = os.getpid()
    return found


def _check(group: Any, comm: Any, timeout: Any) -> None:
    if group is not None and comm is not None:
        raise ValueError("init takes a process group or an mpi4py communicator, not both")
    if hasattr(group, "Get_rank"):
        raise TypeError("group is a torch process group; an mpi4py communicator goes into comm=")
    if hasattr(group, "get_group"):
        raise TypeError("group is a torch process group: pass a mesh's own, mesh.get_group(dimension)")
    if isinstance(group, (str, torch.device)):
        raise TypeError(f"group is a torch process group, got {group!r}; a device goes into device=")
    if comm is not None and not hasattr(comm, "Get_rank"):
        raise TypeError(f"comm is an mpi4py communicator, got {type(comm).__name__}")
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real):
        raise TypeError(f"timeout is a number of seconds, got {timeout!r}")
    if not (math.isfinite(float(timeout)) and float(timeout) > 0):
        raise ValueError(f"a time-out is a positive number of seconds, got {timeout}")


def _from_group(group: dist.ProcessGroup, wanted: torch.device | None, timeout: float) -> World:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError("this rank is not in the group: only its members call init with it")
    shared = dist.PrefixStore(f"bicomm/group {group.group_name}", _get_process_group_store(group))
    store, peers = _introduce(shared, rank, size, local_rank(os.environ), wanted, timeout)
    return _world(rank, size, "process group", group, store, peers)


def _from_launcher(comm: Any, wanted: torch.device | None, timeout: float) -> World:
    global _maker
    store: dist.Store
    if comm is not None:
        launcher, rank, size, local = "mpi4py", comm.Get_rank(), comm.Get_size(), local_rank(os.environ)
        store = rendezvous.over_mpi(comm, timeout)
    else:
        launch = detect(os.environ)
        launcher, rank, size, local = launch.launcher, launch.rank, launch.size, launch.local_rank
        if launcher == "torchrun":
            store = rendezvous.over_torchrun(launch, timeout)
        elif launcher == "mpirun":
            store = rendezvous.over_mpi(rendezvous.world_communicator(launch), timeout)
        elif launcher == "slurm":
            store = rendezvous.over_slurm(launch, os.environ, timeout)
        else:
            store = dist.HashStore()
    shared = dist.PrefixStore(f"bicomm/{launcher} {os.environ.get('TORCHELASTIC_RESTART_COUNT', '')}", store)
    store, peers = _introduce(shared, rank, size, local, wanted, timeout)
    on_gpus = all(peer.gpus for peer in peers)
    nccl = on_gpus and size > 1 and not shares_gpu(peers) and dist.is_nccl_available()
    if on_gpus:  # before NCCL looks at it
        torch.cuda.set_device(peers[rank].current)
    limit = timedelta(seconds=timeout)
    backend = "cpu:gloo,cuda:nccl" if nccl else "gloo"
    try:
        own = dist.PrefixStore("group", store)
        dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=limit)
    except RuntimeError as error:
        raise LaunchError(
            f"rank {rank} of {size} met the others, but torch.distributed could not connect them by {backend}: {error}"
        ) from error
    atexit.unregister(shutdown)
    atexit.register(shutdown)
    assert dist.group.WORLD is not None
    _maker = _world(rank, size, launcher, dist.group.WORLD, store, peers)
    return _maker


def _world(
    rank: int, size: int, launcher: str, group: dist.ProcessGroup, store: dist.Store, peers: tuple[Peer, ...]
) -> World:
    device = torch.device("cpu")
    if peers[rank].gpus:
        device = torch.device("cuda", peers[rank].current)
        torch.cuda.set_device(device)
    return World(rank, size, peers[rank].local_rank, device, launcher, group, store, peers)


def _introduce(
    shared: dist.Store, rank: int, size: int, local: int, wanted: torch.device | None, timeout: float
) -> tuple[dist.Store, tuple[Peer, ...]]:
    """A store of these ranks alone, and what each told of itself. Raises the same LaunchError on all ranks where they
    do not fit."""
    refusal = None
    try:
        mine = dataclasses.asdict(this_process(local, wanted))
    except (RuntimeError, ValueError) as error:
        refusal, mine = error, {"refusal": str(error)}
    store, said = meet(shared, rank, size, json.dumps(mine).encode(), timeout)
    if refusal is not None:
        raise refusal
    told = [json.loads(text) for text in said]
    refusals = [f"rank {r}: {one['refusal']}" for r, one in enumerate(told) if "refusal" in one]
    if refusals:
        raise LaunchError(f"init stopped on every rank, because some refused their arguments: {'; '.join(refusals)}")
    peers = [Peer(**{**one, "gpus": tuple(one["gpus"])}) for one in told]
    without = [f"rank {r} on {peer.host}" for r, peer in enumerate(peers) if not peer.gpus]
    if without and len(without) < size:
        raise LaunchError(
            f"some ranks use a GPU and some do not ({', '.join(without)}): init all with one kind of device"
        )
    return store, place(peers)
