"""How the ranks of a launcher meet: each way ends in a torch.distributed store that all of them share."""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import struct
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from bicomm.errors import LaunchError
from bicomm.ranks.launchers import Launch, expand_nodes
from bicomm.ranks.peers import boot_id

_HERE = "127.0.0.1"


def over_torchrun(launch: Launch, timeout: float) -> dist.Store:
    """The store at MASTER_ADDR and MASTER_PORT, which torchrun's agent or rank 0 holds."""
    try:
        made = dist.rendezvous("env://", launch.rank, launch.size, timeout=timedelta(seconds=timeout))
        store: dist.Store = next(made)[0]
    except (RuntimeError, ValueError) as error:
        raise LaunchError(f"rank {launch.rank} found no store with {launch.said}: {error}") from error
    return store


def world_communicator(launch: Launch) -> Any:
    """mpi4py's COMM_WORLD. Raises LaunchError where mpi4py is missing or belongs to another MPI than the launcher."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"this process was started by an MPI launcher ({launch.said}). It gives no address to meet at, so bicomm "
            f"agrees on one over MPI, and needs mpi4py for that: pip install 'bicomm[mpi]', or start with torchrun. "
            f"mpi4py said: {error}"
        ) from error
    comm = MPI.COMM_WORLD
    if (comm.Get_rank(), comm.Get_size()) != (launch.rank, launch.size):
        library = MPI.Get_library_version().strip("\0").splitlines()[0]
        raise LaunchError(
            f"the launcher says {launch.said}, but mpi4py says rank {comm.Get_rank()} of {comm.Get_size()}: it uses "
            f"another MPI ({library}) than the one that started this process. Use that library's own mpirun"
        )
    return comm


def over_mpi(comm: Any, timeout: float) -> dist.Store:
    """A store that rank 0 of an mpi4py communicator opens on a free port; its address travels over MPI. Collective."""
    rank, size = comm.Get_rank(), comm.Get_size()
    one_host = len(set(comm.allgather(boot_id()))) == 1
    store: dist.Store | None = None
    told: tuple[list[str], int, str] | str = ""
    if rank == 0:
        try:
            token = secrets.token_hex(16)
            store, port = _host([0], token, size, timeout)
            told = [_HERE] if one_host else _addresses(), port, token
        except LaunchError as error:
            told = str(error)
    told = comm.bcast(told, root=0)
    if isinstance(told, str):
        raise LaunchError(told)
    addresses, port, token = told
    failure = ""
    if store is None:
        try:
            store = _meet(addresses, [port], token, timeout)
        except LaunchError as error:
            failure = f"rank {rank} of {size}: {error}"
    failures = [text for text in comm.allgather(failure) if text]
    if failures:  # all ranks say so, instead of some waiting for the others
        raise LaunchError("; ".join(failures))
    assert store is not None
    return store


def over_slurm(launch: Launch, environment: Mapping[str, str], timeout: float) -> dist.Store:
    """A store on the first node of the step, at a port that follows from the job and the step.

    MASTER_ADDR and MASTER_PORT, where both are set, say it instead. Somebody else may hold the port, so there are some
    to try, and ranks know their own step's.
    """
    lists = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    nodes = next((environment[name] for name in lists if environment.get(name)), "")
    step = f"slurm/{os.getuid()}/{environment.get('SLURM_JOB_ID', '')}.{environment.get('SLURM_STEP_ID', '')}"
    if environment.get("MASTER_ADDR") and environment.get("MASTER_PORT", "").isdigit():
        address, ports = environment["MASTER_ADDR"], [int(environment["MASTER_PORT"])]
    elif nodes:
        first, *others = expand_nodes(nodes)
        address, ports = first if others else _HERE, slurm_ports(step)
    else:
        raise LaunchError(f"{launch.said}, but none of {', '.join(lists)} is set, so the first node is unknown")
    return _host(ports, step, launch.size, timeout)[0] if launch.rank == 0 else _meet([address], ports, step, timeout)


def slurm_ports(step: str) -> list[int]:
    """The ports to try for a step, below 32768, where systems begin to hand out ports of their own."""
    return [20000 + zlib.crc32(f"{step}/{attempt}".encode()) % 12000 for attempt in range(8)]


# A store's own client waits without end for a program that accepts and says nothing. So ranks do not try ports with it:
# they ask at a door, which knows the token and tells where the store is.


def _host(ports: Sequence[int], token: str, size: int, timeout: float) -> tuple[dist.Store, int]:
    """Rank 0: a store on a free port, and a door to it on the first of the ports that is free (0: any); its port."""
    refusals = []
    for port in ports:
        try:
            door = _listen(port)
            store = dist.TCPStore(_HERE, 0, None, True, timedelta(seconds=timeout), wait_for_workers=False)
        except (OSError, RuntimeError) as error:
            refusals.append(f"port {port}: {error}")
            continue
        number = int(door.getsockname()[1])  # now: the door closes itself behind the last guest
        arguments = (door, f"{token}\n".encode(), f"{store.port}\n".encode(), size - 1, time.monotonic() + timeout)
        threading.Thread(target=_answer, args=arguments, name="bicomm door", daemon=True).start()
        return store, number
    raise LaunchError(f"rank 0 on {socket.gethostname()} cannot open a port ({'; '.join(refusals)})")


def _listen(port: int) -> socket.socket:
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=1024, dualstack_ipv6=both)


def _answer(door: socket.socket, token: bytes, answer: bytes, guests: int, deadline: float) -> None:
    with door:
        while guests > 0 and time.monotonic() < deadline:
            door.settimeout(max(0.1, deadline - time.monotonic()))
            try:
                guest, _ = door.accept()
                with guest:
                    guest.settimeout(1.0)
                    if guest.recv(len(token), socket.MSG_WAITALL) == token:
                        guest.sendall(answer)
                        guests -= 1
            except OSError:
                continue


def _meet(addresses: Sequence[str], ports: Sequence[int], token: str, timeout: float) -> dist.Store:
    """Another rank: the store behind one of these doors; tried in turn until the time is over."""
    deadline = time.monotonic() + timeout
    last: dict[str, str] = {}
    while time.monotonic() < deadline:
        for address in addresses:
            for port in ports:
                try:
                    with socket.create_connection((address, port), 3.0) as guest:
                        guest.sendall(f"{token}\n".encode())
                        answer = guest.makefile().readline(16).strip()
                    if answer.isdigit():
                        return dist.TCPStore(address, int(answer), None, False, timedelta(seconds=timeout))
                    last[f"{address}:{port}"] = "somebody else answers there"
                except (OSError, RuntimeError, UnicodeDecodeError) as error:
                    last[f"{address}:{port}"] = str(error).splitlines()[0]
        time.sleep(0.05)
    tried = "; ".join(f"{where}: {why}" for where, why in last.items())
    raise LaunchError(f"{socket.gethostname()} did not find rank 0 within {timeout:g} s ({tried})")


def _addresses() -> list[str]:
    """Where other hosts may reach this one: its name, then the IPv4 address of every interface that is not loopback."""
    found = [socket.gethostname()]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name[:15].encode()))  # SIOCGIFADDR
            except OSError:
                continue
            address = socket.inet_ntoa(answer[20:24])
            if not address.startswith("127."):
                found.append(address)
    return found


def take_leave(store: dist.Store, rank: int, size: int, seconds: float) -> None:
    """Say that this rank leaves. Rank 0, whose process may hold the store, stays until all have said so."""
    store.add("left", 1)
    deadline = time.monotonic() + seconds
    while rank == 0 and store.add("left", 0) < size and time.monotonic() < deadline:
        time.sleep(0.01)
