"""What ranks tell each other of themselves, and which GPU follows from that."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

_LOCAL_RANK = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")


@dataclasses.dataclass(frozen=True)
class Peer:
    """What a rank told the others of itself.

    host        its host's name. boot: the id of that host's boot, equal on one host only.
    local_rank  its launcher's word, or -1.
    gpus        the UUIDs of the GPUs it may use, in its own numbering. current: which of them is set, or chosen.
    fixed       the GPU was named in `init(device=...)`.
    """

    host: str
    boot: str
    pid: int
    local_rank: int
    gpus: tuple[str, ...]
    current: int
    fixed: bool

    @property
    def gpu(self) -> str:
        """The GPU of this rank, beyond doubt: `host boot UUID`; "" for a rank on the CPU."""
        return f"{self.boot} {self.gpus[self.current]}" if self.gpus else ""


def boot_id() -> str:
    """What names this host beyond doubt: two hosts may share a name, and two containers of one host may not."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()


def local_rank(environment: Mapping[str, str]) -> int:
    """The local rank that any launcher left in the environment, or -1."""
    return next((int(environment[name]) for name in _LOCAL_RANK if environment.get(name, "").isdigit()), -1)


def this_process(local: int, wanted: torch.device | None) -> Peer:
    """This process, `wanted` being the device that its caller named. Raises where there is no such device."""
    return Peer(socket.gethostname(), boot_id(), os.getpid(), local, *_gpus(wanted))


def settled(device: torch.device) -> torch.device:
    """The device with its number: `cuda` alone is the GPU that is set. Raises where there is no such device."""
    uuids, current, _ = _gpus(device)
    return torch.device("cuda", current) if uuids else device


def _gpus(wanted: torch.device | None) -> tuple[tuple[str, ...], int, bool]:
    """The UUIDs of the GPUs that this process sees, the one that is set, and whether the caller named it."""
    if wanted is not None and wanted.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, got {wanted}")
    if wanted is not None and wanted.type == "cpu":
        return (), 0, False
    if not torch.cuda.is_available():
        if wanted is not None:
            raise RuntimeError(f"device {wanted} was asked for, but torch sees no GPU")
        return (), 0, False
    count = torch.cuda.device_count()
    uuids = tuple(str(torch.cuda.get_device_properties(index).uuid) for index in range(count))
    if wanted is not None and wanted.index is not None:
        if wanted.index >= count:
            raise ValueError(f"device {wanted} was asked for, but this process sees {count} GPUs")
        return uuids, wanted.index, True
    # Before CUDA starts in a process, nothing can have been set.
    return uuids, torch.cuda.current_device() if torch.cuda.is_initialized() else 0, False


def place(peers: Sequence[Peer]) -> tuple[Peer, ...]:
    """Give every rank its local rank where the launcher said none, and its GPU.

    Where ranks of one host have set their devices, or see one GPU each, that holds. Where all stand on their first GPU
    and it is the same one, nobody has called set_device: the local rank chooses, in turn if there are more ranks.
    """
    seen: Counter[str] = Counter()
    placed = []
    for peer in peers:
        local = peer.local_rank if peer.local_rank >= 0 else seen[peer.boot]
        seen[peer.boot] += 1
        placed.append(dataclasses.replace(peer, local_rank=local))
    for boot in seen:
        here = [r for r, peer in enumerate(placed) if peer.boot == boot and peer.gpus and not peer.fixed]
        forgotten = all(placed[r].current == 0 for r in here) and len({placed[r].gpu for r in here}) < len(here)
        if forgotten:
            for r in here:
                placed[r] = dataclasses.replace(placed[r], current=placed[r].local_rank % len(placed[r].gpus))
    return tuple(placed)


def shares_gpu(peers: Sequence[Peer]) -> bool:
    """Do two of these ranks use one GPU?"""
    used = [peer.gpu for peer in peers if peer.gpu]
    return len(set(used)) < len(used)
