"""Who started a process, from the environment alone; node lists; which GPU a rank takes."""

from __future__ import annotations

import re

import pytest

from bicomm.errors import LaunchError
from bicomm.ranks.launchers import detect, expand_nodes
from bicomm.ranks.peers import Peer, place, shares_gpu

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}
ONE_RANK = TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"}
SLURM = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "6", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "7"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ("alone", 0, 1, 0)),
        ({"MASTER_ADDR": "left over"}, ("alone", 0, 1, 0)),
        (TORCHRUN, ("torchrun", 3, 8, 1)),
        ({k: v for k, v in TORCHRUN.items() if k != "LOCAL_RANK"}, ("torchrun", 3, 8, -1)),
        (OPEN_MPI, ("mpirun", 2, 4, 0)),
        (HYDRA, ("mpirun", 1, 4, 1)),
        (SLURM, ("slurm", 5, 6, 1)),
        # The batch script itself: one process, whatever the job asked for.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "7"}, ("alone", 0, 1, 0)),
        # One launcher inside another.
        (TORCHRUN | OPEN_MPI | SLURM, ("torchrun", 3, 8, 1)),
        (OPEN_MPI | SLURM, ("mpirun", 2, 4, 0)),
        (HYDRA | SLURM, ("mpirun", 1, 4, 1)),
        # srun --mpi=pmi2: the same ranks twice.
        (SLURM | {"PMI_RANK": "5", "PMI_SIZE": "6"}, ("slurm", 5, 6, 1)),
        # torchrun with one rank, started once a node by mpirun.
        (OPEN_MPI | ONE_RANK | {"TORCHELASTIC_RUN_ID": "x"}, ("torchrun", 0, 1, 0)),
    ],
)
def test_the_launcher_and_the_rank(environment: dict[str, str], expected: tuple[str, int, int, int]) -> None:
    launch = detect(environment)
    assert (launch.launcher, launch.rank, launch.size, launch.local_rank) == expected


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0"}, "RANK=0, but WORLD_SIZE and MASTER_ADDR and MASTER_PORT are not set"),
        (TORCHRUN | {"MASTER_PORT": ""}, "RANK=3 WORLD_SIZE=8 MASTER_ADDR=a .*but MASTER_PORT is not set"),
        (TORCHRUN | {"RANK": "8"}, "RANK=8 WORLD_SIZE=8"),
        (TORCHRUN | {"RANK": "-1"}, "RANK='-1' is not a whole number"),
        (TORCHRUN | {"WORLD_SIZE": "eight"}, "WORLD_SIZE='eight'"),
        (TORCHRUN | {"MASTER_PORT": "70000"}, "MASTER_PORT='70000'"),
        (TORCHRUN | {"LOCAL_RANK": "8"}, "LOCAL_RANK=8"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "4"}, "OMPI_COMM_WORLD_RANK=4 OMPI_COMM_WORLD_SIZE=4"),
        ({"PMI_RANK": "0"}, "PMI_RANK=0, but PMI_SIZE is not set"),
        (SLURM | {"SLURM_PROCID": "6"}, "SLURM_PROCID=6 SLURM_STEP_NUM_TASKS=6"),
        # A RANK that some shell exported makes a world of one of every process that mpirun starts.
        (OPEN_MPI | ONE_RANK, "RANK=0 WORLD_SIZE=1 .* and OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4"),
    ],
)
def test_an_environment_without_sense_is_named(environment: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchError) as error:
        detect(environment)
    assert re.search(message, str(error.value))


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("login", ["login"]),
        ("a,b-2,c", ["a", "b-2", "c"]),
        ("gpu[1-3]", ["gpu1", "gpu2", "gpu3"]),
        ("gpu[08-11,3]", ["gpu08", "gpu09", "gpu10", "gpu11", "gpu3"]),
        ("gpu[01-02,7],login,r[1-2]n[3,05]", ["gpu01", "gpu02", "gpu7", "login", "r1n3", "r1n05", "r2n3", "r2n05"]),
        ("n[1-2].cluster.example", ["n1.cluster.example", "n2.cluster.example"]),
        ("n[9-11]-ib", ["n9-ib", "n10-ib", "n11-ib"]),
        ("[1-2]", ["1", "2"]),
    ],
)
def test_node_lists(text: str, nodes: list[str]) -> None:
    assert expand_nodes(text) == nodes


@pytest.mark.parametrize("text", ["", "a[1-", "a]1[", "a[3-1]", "a[x-y]", "a[]", "a[1-2", "a[1,[2]]"])
def test_a_node_list_that_cannot_be_read_is_shown(text: str) -> None:
    with pytest.raises(LaunchError, match="Slurm node list"):
        expand_nodes(text)


def _peer(boot: str, gpus: str = "", current: int = 0, local: int = -1, fixed: bool = False) -> Peer:
    return Peer("host", boot, 1, local, tuple(gpus), current, fixed)


def _devices(peers: list[Peer]) -> list[int]:
    return [peer.current for peer in place(peers)]


def test_local_ranks_are_counted_where_no_launcher_says_them() -> None:
    placed = place([_peer("x"), _peer("y"), _peer("x"), _peer("y", local=7), _peer("x")])
    assert [p.local_rank for p in placed] == [0, 0, 1, 7, 2]


def test_set_device_forgotten_the_local_rank_chooses() -> None:
    assert _devices([_peer("x", "abcd") for _ in range(4)]) == [0, 1, 2, 3]
    assert _devices([_peer("x", "ab"), _peer("y", "cd"), _peer("y", "cd"), _peer("x", "ab")]) == [0, 0, 1, 1]
    assert not shares_gpu(place([_peer("x", "ab"), _peer("y", "cd"), _peer("y", "cd"), _peer("x", "ab")]))


def test_a_device_that_was_set_is_kept() -> None:
    assert _devices([_peer("x", "abc", current) for current in (2, 0, 1)]) == [2, 0, 1]
    # Two ranks a GPU, on purpose.
    assert _devices([_peer("x", "ab", current) for current in (0, 0, 1, 1)]) == [0, 0, 1, 1]
    assert _devices([_peer("x", "abcd", 0, local, fixed=True) for local in range(3)]) == [0, 0, 0]


def test_one_gpu_visible_to_each_process_and_each_called_0() -> None:
    peers = [_peer("x", gpu, 0, local) for local, gpu in enumerate("abcd")]
    assert _devices(peers) == [0, 0, 0, 0]
    assert not shares_gpu(place(peers))


def test_ranks_that_share_a_gpu_are_seen() -> None:
    assert shares_gpu(place([_peer("x", "a") for _ in range(3)]))
    assert shares_gpu(place([_peer("x", "ab") for _ in range(3)]))
    # The same UUID on two hosts is two GPUs: a virtual machine's clone, say.
    assert not shares_gpu(place([_peer("x", "a"), _peer("y", "a")]))
    assert not shares_gpu([_peer("x"), _peer("x")])
