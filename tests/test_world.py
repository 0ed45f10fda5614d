"""Ranks find each other: torchrun, mpirun, Slurm's variables, an existing group, one process alone. Real processes."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankResult, run_ranks

import bicomm
import bicomm.world as world
from bicomm.errors import LaunchError, NotInitialized
from bicomm.ranks.attempt import meet
from bicomm.ranks.rendezvous import slurm_ports


def _sum(w: world.World) -> int:
    """1 + 2 + ... over the ranks, by the group: right only if all of them are there."""
    total = torch.tensor([w.rank + 1])
    dist.all_reduce(total, group=w.group)
    return int(total)


def _no_launcher() -> None:
    """Take away the variables of the launcher that started this rank."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    for name in [name for name in os.environ if name.startswith("TORCHELASTIC_")]:
        del os.environ[name]


def _init_and_sum() -> tuple[str, int, int, int, str, bool, int]:
    w = world.init(device="cpu", timeout=30.0)
    told = w.launcher, w.rank, w.size, w.local_rank, str(w.device), w.one_host, _sum(w)
    world.shutdown()
    return told


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_three_ranks_find_each_other(launcher: str) -> None:
    values = [r.value for r in run_ranks(3, _init_and_sum, launcher=launcher)]
    local = [value[3] for value in values]  # Open MPI need not count them in the order of the ranks
    assert sorted(local) == [0, 1, 2]
    assert values == [(launcher, rank, 3, local[rank], "cpu", True, 6) for rank in range(3)]


def _leave_without_shutdown() -> int:
    w = world.init(device="cpu", timeout=30.0)
    total = _sum(w)
    if w.rank != 0:
        time.sleep(1.0)  # rank 0 is done, but holds the store
        w.store.set(f"late {w.rank}", "x")
    return total


def test_mpi_jobs_on_one_host_do_not_meet_and_the_holder_of_a_store_leaves_last() -> None:
    results: dict[int, list[RankResult]] = {}

    def job(size: int) -> None:
        results[size] = run_ranks(size, _leave_without_shutdown, launcher="mpirun")

    threads = [threading.Thread(target=job, args=(size,)) for size in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {size: [r.value for r in ranks] for size, ranks in results.items()} == {2: [3, 3], 3: [6, 6, 6]}
    for result in results[2] + results[3]:
        assert "Error" not in result.stderr and "was NOT called" not in result.stderr, result.stderr


def _groups() -> tuple[int, ...]:
    before = dict(os.environ)
    with pytest.raises(NotInitialized, match=r"import bicomm\n +bicomm.init\(\)"):
        world.current()
    world.shutdown()  # nothing to do

    first = world.init(device="cpu", timeout=20.0)
    assert world.current() is first and world.init() is first
    assert dist.get_backend() == "gloo"
    closed: list[str] = []
    world.at_shutdown(lambda: closed.append("closed"))
    sums = [_sum(first)]
    world.shutdown()
    assert closed == ["closed"] and not dist.is_initialized()

    # Again, in the same store: nothing of the first time is taken for news.
    sums.append(_sum(world.init(device="cpu", timeout=20.0)))
    world.shutdown()

    # An existing group, whole and in part, is used and left alone.
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    whole = world.init(device="cpu")
    assert whole.launcher == "process group" and whole.group is dist.group.WORLD
    sums.append(_sum(whole))
    parts = [dist.new_group([0, 3]), dist.new_group([1, 2])]
    mine = parts[rank in (1, 2)]
    part = world.init(mine, device="cpu", timeout=20.0)
    assert part.group is mine and part.size == 2 and part.local_rank == rank
    sums.append(_sum(part))
    part.store.set(f"from {part.rank}", str(rank))
    sums.append(int(part.store.get(f"from {1 - part.rank}")))
    # The parts may have made different numbers of worlds before they meet again.
    if rank in (1, 2):
        world.resolve(mine, device="cpu", timeout=20.0)
    sums.append(_sum(world.resolve(device="cpu", timeout=20.0)))
    with pytest.raises(ValueError, match="not in the group"):
        world.resolve(parts[rank not in (1, 2)], device="cpu")
    world.shutdown()
    assert dist.is_initialized()
    dist.destroy_process_group()
    assert dict(os.environ) == before  # no variable was set
    return tuple(sums)


def test_groups_are_made_found_and_left_alone() -> None:
    values = [r.value for r in run_ranks(4, _groups, launcher="fork")]
    partner = [3, 2, 1, 0]
    assert values == [(10, 10, 10, 3, partner[rank], 10) for rank in range(4)]


def _mpi_communicators() -> tuple[int, int, str]:
    from mpi4py import MPI

    half = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.Get_rank() % 2)
    w = world.init(comm=half, device="cpu", timeout=20.0)
    result = w.rank, _sum(w), w.launcher
    with pytest.raises(LaunchError, match=r"torch\.distributed is initialised as rank"):
        world.resolve(comm=MPI.COMM_WORLD)
    with pytest.raises(ValueError, match="not both"):
        world.resolve(group=w.group, comm=half)
    assert world.resolve(comm=half, device="cpu", timeout=20.0).launcher == "process group"
    world.shutdown()
    return result


def test_an_mpi4py_communicator_that_is_a_part_of_all_ranks() -> None:
    values = [r.value for r in run_ranks(4, _mpi_communicators, launcher="mpirun")]
    assert values == [(0, 3, "mpi4py"), (0, 3, "mpi4py"), (1, 3, "mpi4py"), (1, 3, "mpi4py")]


def _under_slurm(job: int, nodes: str, port: int = 0) -> tuple[Any, ...]:
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    _only_slurm(rank, size, job, nodes)
    if port:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    return _init_and_sum()


def _only_slurm(rank: str, size: str, job: int, nodes: str) -> None:
    _no_launcher()
    os.environ.update(SLURM_PROCID=rank, SLURM_STEP_NUM_TASKS=size, SLURM_LOCALID=rank)
    os.environ.update(SLURM_JOB_ID=str(job), SLURM_STEP_ID="0", SLURM_STEP_NODELIST=nodes)


@contextlib.contextmanager
def _occupied(job: int) -> Iterator[None]:
    """The first two ports of a step are taken: by a program that never answers, and by one that talks nonsense."""
    first, second, *_ = slurm_ports(f"slurm/{os.getuid()}/{job}.0")
    with socket.create_server(("", first)), socket.create_server(("", second)) as talker:

        def talk() -> None:
            with contextlib.suppress(OSError):
                while True:
                    talker.accept()[0].sendall(b"\xff nonsense\n" * 10)

        threading.Thread(target=talk, daemon=True).start()
        yield


def test_srun_with_busy_ports() -> None:
    job = os.getpid()
    with _occupied(job):
        values = [r.value for r in run_ranks(3, _under_slurm, job, "node[07-07]", launcher="fork")]
    assert values == [("slurm", rank, 3, rank, "cpu", True, 6) for rank in range(3)]


def test_srun_with_an_address_that_the_user_set() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    values = [r.value for r in run_ranks(2, _under_slurm, os.getpid(), "nowhere[1-2]", port, launcher="fork")]
    assert values == [("slurm", rank, 2, rank, "cpu", True, 3) for rank in range(2)]


def _alone() -> tuple[Any, ...]:
    _no_launcher()
    return _init_and_sum()


def test_one_process_alone() -> None:
    assert run_ranks(1, _alone, launcher="fork")[0].value == ("alone", 0, 1, 0, "cpu", True, 1)


def _bad_starts() -> dict[str, str]:
    """Each way to go wrong, all ranks together, and what each rank was told."""
    rank = int(os.environ["RANK"])
    told = {}

    def attempt(name: str, start: Callable[[], object]) -> None:
        try:
            start()
            told[name] = "no error"
        except Exception as error:
            told[name] = f"{type(error).__name__}: {error}"
        world.shutdown()

    attempt("device", lambda: world.init(device="cuda:0" if rank == 1 else "cpu", timeout=20.0))
    attempt("kind", lambda: world.init(device="meta" if rank == 2 else "cpu", timeout=20.0))
    if rank != 2:
        attempt("late", lambda: world.init(device="cpu", timeout=2.0))
    _only_slurm(str(rank), "3", os.getppid(), "gpu[1")
    attempt("nodes", world.init)
    del os.environ["SLURM_STEP_NODELIST"]
    attempt("no nodes", world.init)
    os.environ.update(RANK=str(rank), WORLD_SIZE="3")
    attempt("half", world.init)
    if rank == 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
        attempt("nobody there", lambda: world.init(timeout=1.0))
    return told


@pytest.mark.skipif(torch.cuda.is_available(), reason="the first case asks for a GPU that is not there")
def test_every_rank_is_told_what_went_wrong() -> None:
    first, second, third = (r.value for r in run_ranks(3, _bad_starts, launcher="fork"))
    assert "rank 1: device cuda:0 was asked for, but torch sees no GPU" in first["device"]
    assert second["device"].startswith("RuntimeError: device cuda:0") and "rank 1" in third["device"]
    assert "rank 2: device must be cpu or cuda, got meta" in first["kind"] and third["kind"].startswith("ValueError")
    for rank, one in enumerate((first, second)):  # the first that gives up speaks for both
        assert one["late"].startswith(f"LaunchError: rank {rank} of 3 ")
        assert one["late"].endswith("waited 2 s for ranks [2] to call init")
    for one in (first, second, third):
        assert "the Slurm node list 'gpu[1' cannot be read" in one["nodes"]
        assert "SLURM_STEP_NODELIST" in one["no nodes"]
        assert "MASTER_ADDR and MASTER_PORT are not set" in one["half"]
    assert (
        "rank 1 found no store with RANK=1 WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 MASTER_PORT=1" in second["nobody there"]
    )


def _same_rank_twice() -> str:
    os.environ["RANK"] = "0"
    try:
        world.init(device="cpu", timeout=2.0)
    except LaunchError as error:
        return str(error)
    return "no error"


def test_two_processes_with_one_rank_are_told() -> None:
    told = sorted(r.value for r in run_ranks(2, _same_rank_twice, launcher="fork"))
    assert "another process is rank 0 already" in told[0] and "waited 2 s for ranks [1]" in told[1]


def _mpi_by_variables_only() -> list[str]:
    """A process that says it is rank 1 of 2 of Open MPI, but was started by nobody."""
    _no_launcher()
    os.environ.update(OMPI_COMM_WORLD_RANK="1", OMPI_COMM_WORLD_SIZE="2")
    told = []
    for blocked in (True, False):
        if blocked:
            sys.modules["mpi4py"] = None  # type: ignore[assignment]
        else:
            del sys.modules["mpi4py"]
        try:
            world.init(device="cpu", timeout=2.0)
        except LaunchError as error:
            told.append(str(error))
    return told


def test_mpi_without_mpi4py_or_with_another_one() -> None:
    missing, other = run_ranks(1, _mpi_by_variables_only, launcher="fork")[0].value
    assert "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2" in missing and "pip install 'bicomm[mpi]'" in missing
    assert "mpi4py says rank 0 of 1" in other and "Open MPI" in other


def _left_alone() -> list[str]:
    """Two ranks try without the third, one of them twice; then all together. So from a launcher and from a group."""
    rank, told = int(os.environ["RANK"]), []
    board = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), None, False)

    def attempt(seconds: float) -> None:
        try:
            told.append(str(_sum(world.init(device="cpu", timeout=seconds))))
        except LaunchError as error:
            told.append(str(error))

    for step in range(2):
        for _ in range(2 - rank):
            attempt(0.2)
        board.set(f"tried {step} {rank}", "")
        board.wait([f"tried {step} {other}" for other in range(3)])
        attempt(20.0)
    world.shutdown()
    return told


def test_ranks_that_were_left_alone_find_the_others_later() -> None:
    first, second, third = (r.value for r in run_ranks(3, _left_alone, launcher="fork"))
    assert third == ["6", "6"]
    assert second[1::2] == ["6", "6"] and first[2::3] == ["6", "6"]
    for told in [*second[::2], *(text for text in first if text != "6")]:
        assert "to call init" in told, told


def _threads_meet(arguments: list[tuple[int, float, float]], size: int, store: dist.Store | None = None) -> list[Any]:
    """meet() by threads: (rank, seconds to sleep first, time-out); what each heard, or its error."""
    store = dist.HashStore() if store is None else store

    def one(argument: tuple[int, float, float]) -> Any:
        rank, pause, timeout = argument
        time.sleep(pause)
        try:
            return meet(store, rank, size, b"%d" % rank, timeout)[1]
        except LaunchError as error:
            return str(error)

    with ThreadPoolExecutor(len(arguments)) as pool:
        return list(pool.map(one, arguments))


def test_an_attempt_ends_in_one_way_on_all_ranks() -> None:
    """A rank whose patience is short ends the attempt for those that wait with it; they go on to the next one."""
    store = dist.HashStore()
    comings = [(0, 0.0, 0.3), (1, 0.0, 0.9), (1, 0.6, 20.0), (2, 0.9, 20.0), (0, 1.2, 20.0)]
    first, second, *together = _threads_meet(comings, 3, store)
    assert first == "rank 0 of 3 waited 0.3 s for ranks [2] to call init"
    assert second == "rank 1 of 3 stopped waiting, because rank 0 waited 0.3 s for ranks [2] to call init"
    assert together == [[b"0", b"1", b"2"]] * 3
    comings = [(0, 0.0, 0.3), (1, 0.0, 20.0), (2, 0.6, 20.0), (0, 0.9, 20.0)]
    assert _threads_meet(comings, 3, store)[1:] == [[b"0", b"1", b"2"]] * 3
    assert _threads_meet([(2, 0.0, 20.0), (1, 0.1, 20.0), (0, 0.2, 20.0)], 3, store) == [[b"0", b"1", b"2"]] * 3


@pytest.mark.parametrize("decided", ["all are there", "given up"])
def test_whoever_decides_first_decides_for_all(decided: str) -> None:
    """A rank that saw all others, and one that gave up at that moment, must not leave with different outcomes."""
    store = dist.HashStore()
    part = dist.PrefixStore("0", store)
    store.add("attempt", 0)
    for other in (1, 2):
        part.set(f"said/{other}", f"{other}")
    lost = {"by": 1, "why": "waited 1 s for ranks [2] to call init"}
    part.compare_set("verdict", "", json.dumps({} if decided == "all are there" else lost))
    if decided == "all are there":
        assert meet(store, 0, 3, b"0", 0.9)[1] == [b"0", b"1", b"2"]
    else:
        with pytest.raises(LaunchError, match="rank 0 of 3 stopped waiting, because rank 1 waited 1 s"):
            meet(store, 0, 3, b"0", 0.9)
    assert store.add("attempt", 0) == 1


def test_a_message_of_each_rank_reaches_all_and_nothing_stays_for_the_next_attempt() -> None:
    store = dist.HashStore()
    for _ in range(3):
        assert _threads_meet([(r, 0.0, 20.0) for r in range(4)], 4, store) == [[b"0", b"1", b"2", b"3"]] * 4


def test_what_init_is_given_in_the_wrong_place_is_told() -> None:
    class Communicator:
        def Get_rank(self) -> int:  # as mpi4py spells it
            return 0

    wrong: Any
    for wrong, words in ((Communicator(), "goes into comm="), ("cpu", "goes into device=")):
        with pytest.raises(TypeError, match=words):
            world.init(wrong)
    with pytest.raises(TypeError, match="comm is an mpi4py communicator, got int"):
        world.init(comm=3)
    for wrong in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="positive number of seconds"):
            world.init(timeout=wrong)
    for wrong in (None, "5", True):
        with pytest.raises(TypeError, match="timeout is a number of seconds"):
            world.init(timeout=wrong)


def _remade() -> list[bool]:
    """A process group that its user destroys and makes again: the old world is none any more."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    base = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), None, False)
    told, worlds = [], []
    for name in ("first", "second"):
        dist.init_process_group("gloo", store=dist.PrefixStore(name, base), rank=rank, world_size=size)
        worlds.append(world.init())
        told += [worlds[-1] is world.init() is world.current(), worlds[-1].group is dist.group.WORLD]
        told.append(bicomm.combine(torch.ones(size, 1), "exact").tolist() == [[2.0]])
        last = bicomm.default_communicator()
        told.append(bicomm.Communicator(mode="exact").combine(torch.ones(size, 1)).tolist() == [[2.0]])
        dist.destroy_process_group()
        with pytest.raises(NotInitialized):
            world.current()
    told += [worlds[0] is not worlds[1], last is next(iter(bicomm.front._made.values())), len(bicomm.front._made) == 1]
    world.shutdown()
    return told


def test_a_destroyed_process_group_is_no_world_any_more() -> None:
    for result in run_ranks(2, _remade, launcher="fork"):
        assert result.value == [True] * 11
