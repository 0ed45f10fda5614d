"""Symmetric buffers on GPUs, through torch's symmetric memory; and those of a local world, side by side on one GPU."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from bicomm.errors import NoRoom, NoSharedMemory
from bicomm.symmem.buffer import SymmetricBuffer, align


def make_buffer(group: dist.ProcessGroup, device: torch.device, nbytes: int) -> SymmetricBuffer:
    """A buffer of zeros on the GPUs of all ranks of `group`: what `reserve` and then `share` make."""
    return share(group, device, reserve(device, nbytes))


def reserve(device: torch.device, nbytes: int) -> Tensor:
    """This rank's part of a buffer, uint8 zeros. Not collective. Raises NoRoom, or NoSharedMemory for other reasons."""
    import torch.distributed._symmetric_memory as symm_mem

    try:
        with torch.cuda.device(device):
            return symm_mem.empty(align(nbytes), dtype=torch.uint8, device=device).zero_()
    except (RuntimeError, OSError) as error:
        kind = NoRoom if "out of memory" in str(error).lower() else NoSharedMemory
        raise kind(f"{align(nbytes):,} bytes on {device}: {_first(error)}{_hint(error)}") from error


def share(group: dist.ProcessGroup, device: torch.device, local: Tensor) -> SymmetricBuffer:
    """The buffer whose parts all ranks of `group` have reserved. Collective: equal sizes, in one order on all ranks.

    Raises NoSharedMemory, on this rank, with torch's own reason: no peer access, a container without pidfd_getfd, a
    socket path in $TMPDIR that is too long.
    """
    import torch.distributed._symmetric_memory as symm_mem

    try:
        with torch.cuda.device(device):
            handle = symm_mem.rendezvous(local, group.group_name)
            torch.cuda.synchronize(device)
    except (RuntimeError, OSError) as error:
        raise NoSharedMemory(f"{_first(error)}{_hint(error)}") from error
    if handle is None:
        raise NoSharedMemory("torch's symmetric memory gave no handle for this group")
    # A tensor may lie anywhere in its allocation; the same distance holds on every rank.
    inside = local.data_ptr() - handle.buffer_ptrs[handle.rank]
    addresses = torch.tensor([p + inside for p in handle.buffer_ptrs], dtype=torch.int64, device=device)
    # torch's multicast address has its own offset in it; the peers' addresses have not.
    offset = getattr(handle, "offset", 0)
    multicast = handle.multicast_ptr + inside - offset if handle.multicast_ptr else 0
    return SymmetricBuffer(local=local, addresses=addresses, multicast=multicast, owner=handle)


def make_local_buffers(size: int, device: torch.device, nbytes: int) -> list[SymmetricBuffer]:
    """Buffers of zeros for W ranks in one process, on one GPU."""
    stride = align(nbytes)
    whole = torch.zeros(size * stride, dtype=torch.uint8, device=device)
    parts = [whole[r * stride : (r + 1) * stride] for r in range(size)]
    addresses = torch.tensor([part.data_ptr() for part in parts], dtype=torch.int64, device=device)
    return [SymmetricBuffer(local=part, peers=parts, addresses=addresses, owner=whole) for part in parts]


def _first(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _hint(error: Exception) -> str:
    text = str(error)
    if "overlapping devices" in text:
        return (
            ". Several ranks share a GPU, or see theirs under one number: set "
            "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 if that is meant"
        )
    if "pidfd" in text:
        return ". The container forbids pidfd_getfd: run it with --cap-add=SYS_PTRACE"
    if "bind" in text or "socket" in text:
        return ". torch's socket lies under $TMPDIR, whose path can have about 90 characters: set a shorter one"
    return ""
