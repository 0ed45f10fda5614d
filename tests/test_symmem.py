"""Symmetric memory on a CPU: names, modes, what is left behind, too little room, growth, and who may lie where."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RanksFailed, run_ranks

import bicomm
from bicomm import world
from bicomm.communicator import Communicator
from bicomm.errors import CallMismatch, NoRoom, NoSharedMemory, PeerTimeout
from bicomm.symmem import posix
from bicomm.symmem.arenas import Arenas
from bicomm.symmem.buffer import SymmetricBuffer, address_of
from bicomm.symmem.shared import make_buffer
from worlds import Ranks, local_ranks, same_bits

pytestmark = pytest.mark.timeout(120)


def _names() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("bicomm-")}


# ------------------------------------------------------------------------------------------------- one segment


def test_a_segment_has_a_name_nobody_can_guess_and_is_the_owners_alone() -> None:
    paths = []
    for _ in range(2):
        path, mapping = posix.create(5000)
        try:
            status = os.stat(path)
            assert stat.S_IMODE(status.st_mode) == 0o600 and status.st_uid == os.geteuid() and status.st_size == 5000
            assert bytes(mapping) == bytes(5000)
            other = posix.attach(path, 5000)
            other[4999] = 7
            assert mapping[4999] == 7
        finally:
            posix.unlink(path)
        paths.append(path)
    assert paths[0] != paths[1] and all(len(Path(path).name) == len("bicomm-") + 32 for path in paths)
    assert not any(map(os.path.exists, paths))


def test_a_link_in_its_place_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posix, "DIRECTORY", str(tmp_path))
    monkeypatch.setattr(posix.secrets, "token_hex", lambda _: "known")
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "bicomm-known").symlink_to(tmp_path / "victim")
    with pytest.raises(NoSharedMemory, match="File exists"):
        posix.create(100)
    with pytest.raises(NoSharedMemory, match="symbolic links"):
        posix.attach(str(tmp_path / "bicomm-known"), 4)
    assert (tmp_path / "victim").read_text() == "mine"


def test_no_room_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posix, "DIRECTORY", str(tmp_path))

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(posix.os, "posix_fallocate", refuse)
    with pytest.raises(NoRoom, match=r"has no room for 12,345 bytes .*--shm-size"):
        posix.create(12345)
    assert list(tmp_path.iterdir()) == []


def test_a_size_that_no_machine_has_is_no_room() -> None:
    before = _names()
    for nbytes in (1 << 62, 1 << 80):
        with pytest.raises(NoRoom):
            posix.create(nbytes)
    assert _names() == before


def test_a_directory_that_is_not_there_is_no_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posix, "DIRECTORY", "/nowhere")
    with pytest.raises(NoSharedMemory, match="cannot make a file in /nowhere") as caught:
        posix.create(100)
    assert not isinstance(caught.value, NoRoom) and posix.free_bytes() == 0


def test_a_segment_of_another_size_is_refused() -> None:
    path, _mapping = posix.create(4096)
    try:
        with pytest.raises(NoSharedMemory, match="has 4,096 bytes, expected 8,192"):
            posix.attach(path, 8192)
    finally:
        posix.unlink(path)


# ----------------------------------------------------------------------------------------- ranks that map it together


class _Table:
    """An exchange among threads."""

    def __init__(self, size: int) -> None:
        import threading

        self.size, self.barrier, self.told = size, threading.Barrier(size), [b""] * size

    def of(self, rank: int) -> Any:
        def exchange(message: bytes) -> list[bytes]:
            self.told[rank] = message
            self.barrier.wait(10)
            told = list(self.told)
            self.barrier.wait(10)
            return told

        return exchange


def _together(size: int, capacity: int) -> list[Any]:
    table = _Table(size)
    ranks = Ranks(list(range(size)))
    try:
        return ranks.outcomes(lambda rank: make_buffer(table.of(rank), rank, size, capacity))
    finally:
        ranks.close()


def test_every_rank_sees_what_the_others_write() -> None:
    before = _names()
    buffers: list[SymmetricBuffer] = _together(3, 1000)
    assert _names() == before  # mapped, and without a name
    assert [buffer.capacity for buffer in buffers] == [1024] * 3
    for rank, buffer in enumerate(buffers):
        buffer.local.fill_(rank + 1)
    for buffer in buffers:
        assert [int(peer.unique()) for peer in buffer.peers] == [1, 2, 3]


@pytest.mark.parametrize("failing", ["create", "attach on rank 2", "attach with another error", "full"])
def test_a_failure_on_one_rank_is_an_error_on_all(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = _names()
    real_create, real_attach, calls = posix.create, posix.attach, []

    def create(nbytes: int) -> tuple[str, mmap.mmap]:
        if failing == "create":
            raise NoSharedMemory("no such place")
        if failing == "full":
            raise NoRoom("no room for 9 bytes")
        return real_create(nbytes)

    def attach(path: str, nbytes: int) -> mmap.mmap:
        calls.append(path)
        if failing.startswith("attach") and len(calls) == 2:
            raise NoSharedMemory("another host") if failing.endswith("2") else MemoryError()
        return real_attach(path, nbytes)

    monkeypatch.setattr(posix, "create", create)
    monkeypatch.setattr(posix, "attach", attach)
    outcomes = _together(4, 100)
    assert all(isinstance(outcome, NoSharedMemory) for outcome in outcomes)
    assert len({str(outcome) for outcome in outcomes}) == 1
    assert all(isinstance(outcome, NoRoom) == (failing == "full") for outcome in outcomes)
    assert _names() == before


# ------------------------------------------------------------------------------------------------------------- places


def _buffer(capacity: int) -> SymmetricBuffer:
    return SymmetricBuffer(local=torch.zeros(capacity, dtype=torch.uint8))


def test_places_do_not_overlap_and_come_back() -> None:
    buffer = _buffer(4096)
    first, second, third = buffer.take(1), buffer.take(257), buffer.take(256)
    assert (first, second, third) == (0, 256, 768) and buffer.in_use == 1024
    assert buffer.take(4096) is None and buffer.take(3073) is None
    buffer.give(256)
    assert buffer.take(512) == 256 and buffer.take(3072) == 1024 and buffer.take(0) is None
    assert buffer.view(256, (2, 3), torch.float32).data_ptr() - buffer.local.data_ptr() == 256


def test_arenas_grow_and_never_move_what_is_held() -> None:
    made: list[int] = []

    def allocate(nbytes: int) -> SymmetricBuffer:
        made.append(nbytes)
        return _buffer(nbytes)

    arenas = Arenas(allocate)
    assert arenas.take(100) is None
    arenas.grow(100)
    held = arenas.take(100)
    assert held is not None and held.mark == (0, 0) and arenas.take(1) is None
    address = address_of(held.view((25,), torch.float32))
    arenas.grow(1000)
    other = arenas.take(1000)
    assert other is not None and other.mark == (1, 0)
    assert address_of(held.view((25,), torch.float32)) == address and arenas.in_use == 256 + 1024
    arenas.release(other)
    arenas.grow(5000)  # the arena that nobody uses goes
    assert made == [256, 1024, 5120] and arenas.capacity == 256 + 5120
    assert arenas.find(held.view((25,), torch.float32)) is not None and arenas.find(torch.zeros(1)) is None
    arenas.clear()
    assert arenas.capacity == 0 and held.view((25,), torch.float32).sum() == 0  # its holder may still read it


def test_growth_asks_for_more_than_it_needs_but_takes_less_where_room_is_short() -> None:
    room = 3000
    asked: list[int] = []

    def allocate(nbytes: int) -> SymmetricBuffer:
        asked.append(nbytes)
        if nbytes > room:
            raise NoRoom("full")
        return _buffer(nbytes)

    arenas = Arenas(allocate)
    arenas.grow(1500)
    arenas.grow(1700)
    arenas.grow(2500)
    assert asked == [1536, 3072, 1792, 3584, 2560]
    with pytest.raises(NoRoom):
        arenas.grow(4000)


def test_a_tensor_without_elements_has_an_address_too() -> None:
    x = torch.zeros(4, 6)
    assert address_of(x[2:2]) == address_of(x[2:]) == x[2:].data_ptr()


# -------------------------------------------------------------------------------------------- buffers of a communicator


def test_places_follow_shapes_and_buffers_taken_in_another_order_are_detected() -> None:
    with local_ranks(3, mode="exact", timeout=5) as ranks:
        ranks(lambda comm: comm.reserve(100, 100))

        def in_order(comm: Communicator) -> torch.Tensor:
            with comm.acquire(6, 5) as a, comm.acquire(9, 70) as b:
                a.fill_(1.0)
                b.fill_(2.0)
                return torch.cat([comm.combine(a).view(-1), comm.combine(b).view(-1)])

        want = torch.tensor([3.0] * 10 + [6.0] * 210)
        assert all(torch.equal(out, want) for out in ranks(in_order))

        def out_of_order(comm: Communicator) -> torch.Tensor:
            shapes = [(6, 5), (9, 70)] if comm.rank != 1 else [(9, 70), (6, 5)]
            with comm.acquire(*shapes[0]) as one, comm.acquire(*shapes[1]) as two:
                return comm.combine(one if one.shape == (6, 5) else two)

        for outcome in ranks.outcomes(out_of_order):
            assert isinstance(outcome, CallMismatch) and "rank 1" in str(outcome) and "place=" in str(outcome)
            assert "acquired or released in another order" in str(outcome)
        assert all(torch.equal(out, want) for out in ranks(in_order))  # at once

        def larger(comm: Communicator) -> torch.Tensor:  # does not fit on rank 1
            with comm.acquire(1000 if comm.rank == 1 else 6, 500) as one:
                return comm.combine(one)

        for outcome in ranks.outcomes(larger):
            assert isinstance(outcome, CallMismatch) and "rank 1 acquire(2,000,000 bytes)" in str(outcome)
            assert "rank 0 combine(contract=exact/1, dtype=float32, hidden=500" in str(outcome)
            assert "with other sizes" in str(outcome)
        assert all(torch.equal(out, want) for out in ranks(in_order))


@pytest.mark.parametrize("call", ["combine", "dispatch", "combine_rows"])
@pytest.mark.parametrize("grows", [False, True])
def test_a_buffer_held_on_some_ranks_only_is_detected(call: str, grows: bool) -> None:
    """The other ranks would copy their operands to other places than the one where this rank looks for them."""
    with local_ranks(3, mode="exact", timeout=5) as ranks:
        ranks(lambda comm: comm.reserve(6, 5 if grows else 500))

        def work(comm: Communicator) -> torch.Tensor:
            x = torch.ones(6, 5)
            with comm.acquire(6, 5) as held:
                if comm.rank == 2:
                    return _call(comm, call, held)
            return _call(comm, call, x)

        def hold(comm: Communicator) -> torch.Tensor:
            if comm.rank != 2:
                return _call(comm, call, torch.ones(6, 5))
            with comm.acquire(6, 5):
                return _call(comm, call, torch.ones(6, 5))

        for body in (hold, work):
            for outcome in ranks.outcomes(body):
                assert isinstance(outcome, CallMismatch), outcome
                assert "on some ranks only" in str(outcome) or "does not" in str(outcome)
            ranks(lambda comm: _call(comm, call, torch.ones(6, 5)))


def _call(comm: Communicator, call: str, x: torch.Tensor) -> torch.Tensor:
    if call == "combine_rows":
        maps = torch.zeros(2, 1, dtype=torch.int64)
        return comm.combine_rows(x, maps, maps)
    return comm.combine(x) if call == "combine" else comm.dispatch(x)


def test_buffers_grow_together_and_are_counted() -> None:
    with local_ranks(3, mode="ordered", timeout=5) as ranks:
        assert ranks.members[0].memory() == {"held": 0, "in_use": 0}
        for tokens in (3, 30, 3, 3000):
            xs = [torch.randn(tokens, 7) for _ in range(3)]
            outs = ranks(lambda comm, xs=xs: comm.combine(xs[comm.rank]))
            assert same_bits(torch.cat(outs), bicomm.Contract.parse("ordered").sum(xs))
        held = {comm.memory()["held"] for comm in ranks.members}
        assert len(held) == 1 and held.pop() >= 3000 * 7 * 4
        ranks(lambda comm: comm.suspend())
        assert ranks.members[1].memory() == {"held": 0, "in_use": 0}
        ranks(lambda comm: comm.combine(torch.ones(3, 7)))
        ranks(lambda comm: comm.resume(10, 7))
        assert ranks.members[1].memory()["held"] >= 280


def test_a_growth_that_fails_is_an_error_on_all_and_the_next_call_works(monkeypatch: pytest.MonkeyPatch) -> None:
    with local_ranks(3, mode="exact", timeout=5) as ranks:
        ranks(lambda comm: comm.combine(torch.ones(3, 4)))
        real = torch.empty

        def empty(*size: Any, **options: Any) -> torch.Tensor:
            if size and isinstance(size[0], int) and size[0] > 10**6:
                raise RuntimeError("DefaultCPUAllocator: not enough memory")
            return real(*size, **options)

        monkeypatch.setattr(torch, "empty", empty)
        for outcome in ranks.outcomes(lambda comm: comm.combine(torch.ones(3, 400_000))):
            assert isinstance(outcome, NoRoom) and "rank 0 cannot allocate" in str(outcome)
        monkeypatch.undo()
        outs = ranks(lambda comm: comm.combine(torch.ones(3, 400_000)))
        assert all(torch.equal(out, torch.full((1, 400_000), 3.0)) for out in outs)


def test_a_bad_map_that_meets_a_growth_leaves_the_ranks_in_step() -> None:
    with local_ranks(3, timeout=5) as ranks:

        def work(comm: Communicator) -> torch.Tensor:
            maps = torch.zeros(2, 1, dtype=torch.int64)
            return comm.combine_rows(torch.ones(5, 9), maps + 5 * (comm.rank == 1), maps)

        outcomes = ranks.outcomes(work)
        assert isinstance(outcomes[1], IndexError) and "names row 5 of rank 0" in str(outcomes[1])
        assert all("IndexError" in str(outcomes[r]) and "rank 1" in str(outcomes[r]) for r in (0, 2))
        assert all(
            torch.equal(out, torch.full((2, 9), 1.0))
            for out in ranks(lambda comm: _call(comm, "combine_rows", torch.ones(5, 9)))
        )


# ------------------------------------------------------------------------------------------------------------ processes


class _SmallDisk:
    """The module `os`, on a file system with little room: where the tests may not mount one."""

    def __init__(self, room: int) -> None:
        self._room = room

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def posix_fallocate(self, descriptor: int, offset: int, length: int) -> None:
        if length > self._room:
            raise OSError(errno.ENOSPC, "No space left on device")
        os.posix_fallocate(descriptor, offset, length)


def _room_for(megabytes: int) -> dict[str, Any]:
    """Every rank uses a directory that holds this much; what each saw."""
    w = world.init(device="cpu")
    base = Path(os.environ["ROOM_DIRECTORY"])
    posix.DIRECTORY = str(base)
    if os.environ["ROOM_BYTES"]:
        posix.os = _SmallDisk(int(os.environ["ROOM_BYTES"]))  # type: ignore[assignment]
    told: dict[str, Any] = {}
    try:
        Communicator(mode="exact", max_tokens=1024, hidden=megabytes * 256, timeout=20)
    except NoRoom as error:
        told["made"] = str(error)
    comm = Communicator(mode="exact", max_tokens=8, hidden=16, timeout=20)
    x = torch.full((8, 16), float(w.rank + 1))
    told["before"] = comm.combine(x, splits=[8, 0]).sum().item()
    try:
        comm.combine(torch.ones(1024, megabytes * 256))
    except NoRoom as error:
        told["grown"] = str(error)
    told["after"] = comm.combine(x, splits=[0, 8]).sum().item()
    comm.close()
    left = os.listdir(base)
    world.shutdown()
    return {**told, "left": left}


def test_a_full_directory_is_an_error_on_every_rank_that_says_what_to_do(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path)]
    mounted = shutil.which("mount") is not None and subprocess.run(mount, capture_output=True).returncode == 0
    room = "" if mounted else str(2 << 20)
    try:
        variables = {"ROOM_DIRECTORY": str(tmp_path), "ROOM_BYTES": room}
        results = run_ranks(2, _room_for, 8, launcher="fork", env=variables)
    finally:
        if mounted:
            subprocess.run(["umount", str(tmp_path)], check=True)
    for result in results:
        for step in ("made", "grown"):
            assert "rank 0: " in result.value[step] and "has no room for" in result.value[step]
            assert "--shm-size" in result.value[step]
        assert result.value["left"] == []
    assert [r.value["before"] for r in results] == [3.0 * 128, 0.0]
    assert [r.value["after"] for r in results] == [0.0, 3.0 * 128]


def _work_until_killed() -> None:
    world.init(device="cpu")
    comm = Communicator(mode="exact", max_tokens=1024, hidden=64, timeout=20)
    with comm.acquire(64, 64):
        rank = comm.rank
        for call in range(1000):
            comm.combine(torch.ones(96 * (call + 1), 64))
            if call == 5 and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)


def test_nothing_is_left_of_a_killed_run() -> None:
    before = _names()
    start = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        run_ranks(3, _work_until_killed, launcher="fork")
    assert time.monotonic() - start < 60
    assert [r.returncode for r in caught.value.results] == [1, None, 1]
    for result in caught.value.results[::2]:
        assert PeerTimeout.__name__ in result.error and "rank 1 died" in result.error
    assert _names() == before


def test_no_descriptor_stays_open_and_children_inherit_none() -> None:
    before = len(os.listdir("/proc/self/fd"))
    path, mapping = posix.create(4096)
    posix.unlink(path)
    code = "import pathlib; print([str(f.resolve()) for f in pathlib.Path('/proc/self/fd').iterdir()])"
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, close_fds=False, check=True
    ).stdout
    assert "bicomm-" not in shown and "/dev" in shown
    mapping.close()
    assert len(os.listdir("/proc/self/fd")) == before
