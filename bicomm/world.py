"""Who the ranks are: `init` finds it out from torchrun, mpirun, Slurm, a process group, or one process alone."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import os
import socket
import sys
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from bicomm.errors import LaunchError, NotInitialized
from bicomm.ranks import rendezvous
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
_attempts: Counter[str] = Counter()
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
    collective of a group that is made here. Called again without arguments it returns the same world.

    Raises LaunchError where the environment makes no sense, or the ranks do not find each other.
    """
    global _current
    if group is None and comm is None and device is None and _current is not None and dist.is_initialized():
        return _current
    _current = resolve(group, comm, device, timeout)
    return _current


def current() -> World:
    """The world of the last `init`. Raises NotInitialized before it."""
    if _current is None or not dist.is_initialized():
        raise NotInitialized(
            "no ranks are known yet. Write, once and on every rank:\n    import bicomm\n    bicomm.init()"
        )
    return _current


def at_shutdown(close: Callable[[], None]) -> None:
    """Have `close` called by the next `shutdown`, before the process group goes."""
    _closers.append(close)


def shutdown() -> None:
    """Forget the ranks, and destroy the process group if `init` made it. Without an `init`, nothing happens."""
    global _current, _maker
    _current, maker, _maker = None, _maker, None
    while _closers:
        _closers.pop()()
    if maker is None or not dist.is_initialized():
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
    if group is not None and comm is not None:
        raise ValueError("init takes a process group or an mpi4py communicator, not both")
    wanted = torch.device(device) if device is not None else None
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
        if comm is not None and (comm.Get_rank(), comm.Get_size()) != (dist.get_rank(), dist.get_world_size()):
            raise LaunchError(
                f"torch.distributed is initialised as rank {dist.get_rank()} of {dist.get_world_size()}, but comm is "
                f"rank {comm.Get_rank()} of {comm.Get_size()}: pass group= for a part of the ranks"
            )
    if group is not None:
        return _from_group(group, wanted, timeout)
    return _from_launcher(comm, wanted, timeout)


def _from_group(group: dist.ProcessGroup, wanted: torch.device | None, timeout: float) -> World:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError("this rank is not in the group: only its members call init with it")
    store = _own_part(_get_process_group_store(group), f"group {group.group_name}")
    peers = _introduce(store, rank, size, local_rank(os.environ), wanted, timeout)
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
    store = _own_part(store, f"{launcher} {os.environ.get('TORCHELASTIC_RESTART_COUNT', '')}")
    peers = _introduce(store, rank, size, local, wanted, timeout)
    on_gpus = all(peer.gpus for peer in peers)
    nccl = on_gpus and size > 1 and not shares_gpu(peers) and dist.is_nccl_available()
    if on_gpus:  # before NCCL looks at it
        torch.cuda.set_device(peers[rank].current)
    limit = timedelta(seconds=timeout)
    backend = "cpu:gloo,cuda:nccl" if nccl else "gloo"
    dist.init_process_group(backend, store=dist.PrefixStore("group", store), rank=rank, world_size=size, timeout=limit)
    atexit.unregister(shutdown)
    atexit.register(shutdown)
    assert dist.group.WORLD is not None
    _maker = _world(rank, size, launcher, dist.group.WORLD, store, peers)
    return _maker


def _own_part(store: dist.Store, name: str) -> dist.Store:
    """A part of the store that only this call uses: what an earlier one left there would be taken for news."""
    _attempts[name] += 1
    return dist.PrefixStore(f"bicomm/{name}/{_attempts[name]}", store)


def _world(
    rank: int, size: int, launcher: str, group: dist.ProcessGroup, store: dist.Store, peers: tuple[Peer, ...]
) -> World:
    device = torch.device("cpu")
    if peers[rank].gpus:
        device = torch.device("cuda", peers[rank].current)
        torch.cuda.set_device(device)
    return World(rank, size, peers[rank].local_rank, device, launcher, group, store, peers)


def _introduce(
    store: dist.Store, rank: int, size: int, local: int, wanted: torch.device | None, timeout: float
) -> tuple[Peer, ...]:
    """Tell the others of this rank and hear of them. Raises the same LaunchError on all ranks where they do not fit."""
    if store.add(f"claim/{rank}", 1) > 1:
        raise LaunchError(
            f"another process is rank {rank} already (this one is {os.getpid()} on {socket.gethostname()}): two jobs "
            f"use one MASTER_ADDR and MASTER_PORT, or two processes were given one rank"
        )
    mine, refusal = None, None
    try:
        mine = this_process(local, wanted)
        store.set(f"peer/{rank}", json.dumps(dataclasses.asdict(mine)))
    except (RuntimeError, ValueError) as error:
        refusal = error
        store.set(f"peer/{rank}", json.dumps({"refusal": str(error)}))
    told = [json.loads(text) for text in _hear(store, rank, size, timeout)]
    if refusal is not None:
        raise refusal
    refusals = [f"rank {r}: {one['refusal']}" for r, one in enumerate(told) if "refusal" in one]
    if refusals:
        raise LaunchError(f"init stopped on every rank, because some refused their arguments: {'; '.join(refusals)}")
    peers = [Peer(**{**one, "gpus": tuple(one["gpus"])}) for one in told]
    without = [f"rank {r} on {peer.host}" for r, peer in enumerate(peers) if not peer.gpus]
    if without and len(without) < size:
        raise LaunchError(
            f"some ranks use a GPU and some do not ({', '.join(without)}): init all with one kind of device"
        )
    return place(peers)


def _hear(store: dist.Store, rank: int, size: int, timeout: float) -> list[bytes]:
    keys = [f"peer/{other}" for other in range(size)]
    try:
        store.wait(keys, timedelta(seconds=timeout))
    except RuntimeError as error:
        missing = [other for other in range(size) if not store.check([keys[other]])]
        raise LaunchError(f"rank {rank} of {size} waited {timeout:g} s for ranks {missing} to call init") from error
    return [bytes(store.get(key)) for key in keys]
