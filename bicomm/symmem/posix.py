"""Shared memory between processes of one host, through files in /dev/shm that have no name once all ranks map them."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets

from bicomm.errors import NoRoom, NoSharedMemory

DIRECTORY = "/dev/shm"


def create(nbytes: int) -> tuple[str, mmap.mmap]:
    """Make a segment of zeros: its path and mapping. Raises NoRoom before any write where it does not fit, and
    NoSharedMemory where there is no such memory here.

    The name cannot be guessed and the mode is 0600; `posix_fallocate` reserves the memory, where a plain truncate would
    end in a bus error at the first write that finds none.
    """
    path = f"{DIRECTORY}/bicomm-{secrets.token_hex(16)}"
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise NoSharedMemory(f"cannot make a file in {DIRECTORY}: {error}") from error
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
        return path, mmap.mmap(descriptor, nbytes)
    except (OSError, OverflowError) as error:
        unlink(path)
        full = (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT)
        if isinstance(error, OverflowError) or error.errno in full:
            raise NoRoom(
                f"{DIRECTORY} has no room for {nbytes:,} bytes ({free_bytes():,} are free): make it larger "
                f"(docker run --shm-size=..., mount -o remount,size=...), use fewer tokens, hidden sizes or ranks, or "
                f"make the communicator with share_memory=False"
            ) from error
        raise NoSharedMemory(f"cannot reserve {nbytes:,} bytes in {DIRECTORY}: {error}") from error
    except BaseException:
        unlink(path)
        raise
    finally:
        os.close(descriptor)


def attach(path: str, nbytes: int) -> mmap.mmap:
    """Map another rank's segment. Raises NoSharedMemory where it cannot be seen from here (another host, container)."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise NoSharedMemory(
            f"cannot open another rank's memory, so it lives on another host or container: {error}"
        ) from error
    try:
        size = os.fstat(descriptor).st_size
        if size != nbytes:
            raise NoSharedMemory(f"another rank's memory has {size:,} bytes, expected {nbytes:,}")
        return mmap.mmap(descriptor, nbytes)
    except OSError as error:
        raise NoSharedMemory(f"cannot map {nbytes:,} bytes of another rank's memory: {error}") from error
    finally:
        os.close(descriptor)


def unlink(path: str) -> None:
    """Take the name away; the memory stays as long as a rank maps it."""
    with contextlib.suppress(OSError):  # another rank was quicker, or this one never saw it
        os.unlink(path)


def free_bytes() -> int:
    """What is free in /dev/shm; 0 where there is none."""
    try:
        stat = os.statvfs(DIRECTORY)
    except OSError:
        return 0
    return stat.f_bavail * stat.f_frsize
