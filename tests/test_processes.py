"""Real processes: every check under torchrun and mpirun, by shared memory and by all-to-all, on all and on parts."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import bicomm
from bicomm import world
from bicomm.communicator import Communicator
from bicomm.contract import Contract
from bicomm.errors import CallMismatch, PeerRefused
from bicomm.symmem import posix
from combine_cases import addends_of, check_modes, check_rows, failures, partials, rows_case, want
from worlds import same_bits

pytestmark = [pytest.mark.timeout(180)]


def _everything(by: str) -> dict[str, Any]:
    w = world.init(device="cpu")
    comm = Communicator(timeout=60, share_memory=by == "shared memory", max_tokens=64, hidden=64)
    told = {"wrong": failures(comm), "name": comm.transport.name, "plan": str(comm.plan("exact"))}
    comm.close()
    x = partials("normal", w.size, w.size, 3)
    told["front"] = same_bits(bicomm.combine(x[w.rank], "exact"), want(Contract("exact"), x, [1] * w.size, w.rank))
    bicomm.shutdown()
    return told


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("launcher", "size", "by"),
    [
        ("torchrun", 8, "shared memory"),
        ("mpirun", 8, "shared memory"),
        ("fork", 5, "all-to-all"),
        ("fork", 3, "shared memory"),
    ],
)
def test_every_check_holds(launcher: str, size: int, by: str) -> None:
    results = run_ranks(size, _everything, by, launcher=launcher, timeout=150)
    for result in results:
        assert result.value["wrong"] == [] and result.value["front"]
        assert by.split()[0] in result.value["name"] and by.split()[0] in result.value["plan"].splitlines()[0]
        assert "c10d" not in result.stderr, result.stderr  # torch's own warnings about waiting
    if by == "all-to-all":
        assert (
            "not shared memory on the CPU" in results[0].value["plan"]
            and "share_memory=False" in results[0].value["plan"]
        )


@pytest.mark.long
@pytest.mark.parametrize(
    ("launcher", "size", "by"),
    [
        (launcher, size, by)
        for launcher in ("torchrun", "mpirun")
        for size in (3, 5, 8)
        for by in ("shared memory", "all-to-all")
    ],
)
def test_every_check_holds_everywhere(launcher: str, size: int, by: str) -> None:
    test_every_check_holds(launcher, size, by)


def _under_defaults() -> list[str]:
    """An engine that builds its model in bf16 on another device has set what torch does where nothing is said."""
    w = world.init(device="cpu")
    told = [f"{text}, share_memory={share}" for share in (True, False) for text in _wrong_under_defaults(w, share)]
    bicomm.shutdown()
    return told


def _wrong_under_defaults(w: world.World, share: bool) -> list[str]:
    comm, told = Communicator(timeout=20, share_memory=share), []
    x, case = partials("spread", w.size, w.size, 9, 3), rows_case(w.size, 1, 3, torch.bfloat16)
    sums = {mode: want(Contract.parse(mode), x, [1] * w.size, w.rank) for mode in ("ordered", "exact", "fp64")}
    owned = Contract("owner").sum(addends_of(case, w.rank, True, torch.float32))
    weights = [case["maps"][w.rank][2].clone().requires_grad_() for _ in range(2)]
    rows = [case["rows"][w.rank].clone().requires_grad_() for _ in range(2)]
    partial = x[w.rank].clone().requires_grad_(w.rank == 1)  # the others join its backward pass

    def backward(step: int) -> None:
        got = comm.combine_rows(rows[step], *case["maps"][w.rank][:2], weights[step])
        got.backward(torch.ones_like(got))

    backward(0)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("meta"):
            backward(1)
            for each in (comm, Communicator(timeout=20, share_memory=share)):
                told += [mode for mode in sums if not same_bits(each.combine(x[w.rank], mode), sums[mode])]
                if not same_bits(each.combine_rows(case["rows"][w.rank], *case["maps"][w.rank]), owned):
                    told.append("owner")
            with comm.acquire(w.size, 9) as buffer:
                buffer.copy_(x[w.rank])
                if not same_bits(comm.combine(buffer, "exact"), sums["exact"]):
                    told.append("an acquired buffer")
            if comm.exchange_counts(w.rank).tolist() != list(range(w.size)):
                told.append("counts")
            comm.combine(partial, "exact").sum().backward()
    finally:
        torch.set_default_dtype(before)
    for first, second in (rows, weights):
        if not same_bits(first.grad, second.grad):  # type: ignore[arg-type]
            told.append("a gradient")
    if w.rank == 1 and not torch.equal(partial.grad, torch.ones_like(partial)):  # type: ignore[arg-type]
        told.append("the gradient that one rank asked for")
    return told


def test_what_torch_does_by_default_changes_nothing() -> None:
    assert [r.value for r in run_ranks(3, _under_defaults, launcher="fork")] == [[]] * 3


# ---------------------------------------------------------------------------------------------------- parts and pairs


def _parts() -> dict[str, Any]:
    w = world.init(device="cpu")
    groups = [dist.new_group([0, 1, 2]), dist.new_group([2, 3, 4]), dist.new_group([4, 0])]
    mine = [(k, g) for k, g in enumerate(groups) if dist.get_rank(g) >= 0]
    comms = {k: Communicator(g, device="cpu", mode="exact", timeout=30) for k, g in mine}
    told: dict[str, Any] = {"wrong": []}
    outside = next((g for k, g in enumerate(groups) if k not in comms), None)
    if outside is not None:
        try:
            Communicator(outside, device="cpu", mode="exact")
        except ValueError as error:
            told["outside"] = str(error)

    def work(k: int) -> None:  # one thread a communicator: rank 0, 2 and 4 are in two groups at the same time
        comm = comms[k]
        for step in range(30):
            x = partials("tie_dust", comm.size, comm.size * 2, 5, 100 * k + step)
            got = comm.combine(x[comm.rank])
            if not same_bits(got, want(Contract("exact"), x, [2] * comm.size, comm.rank)):
                told["wrong"].append((k, step))
            if step % 7 == 3 * k % 7:
                time.sleep(0.002)

    threads = [threading.Thread(target=work, args=(k,)) for k in comms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Two communicators of one group, used in turn; a time-out of one leaves the other as it was.
    first, second = Communicator(mode="ordered", timeout=1), Communicator(mode="exact", timeout=20)
    x = partials("spread", w.size, w.size, 4, 9)
    if w.rank != 1:
        try:
            first.combine(x[w.rank])
        except bicomm.PeerTimeout as error:
            told["late"] = error.missing
    if not same_bits(second.combine(x[w.rank]), want(Contract("exact"), x, [1] * w.size, w.rank)):
        told["wrong"].append("second")
    first.recover()
    if not same_bits(first.combine(x[w.rank]), want(Contract("ordered"), x, [1] * w.size, w.rank)):
        told["wrong"].append("first")
    bicomm.shutdown()
    return told


def test_communicators_over_parts_of_the_ranks_at_the_same_time() -> None:
    results = run_ranks(5, _parts, launcher="fork")
    assert [r.value["wrong"] for r in results] == [[]] * 5
    assert all("this rank is not in the group" in r.value["outside"] for r in results)
    assert [r.value.get("late") for r in results] == [(1,), None, (1,), (1,), (1,)]


# ------------------------------------------------------------------------------------------------------ several hosts


def _own_memory(base: str) -> str:
    """Give this process a /dev/shm of its own, as another host or container has; how it was done."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, recursive, private = 0x20000, 0x4000, 0x40000
    if (
        libc.unshare(new_mounts) == 0
        and libc.mount(b"none", b"/", None, recursive | private, None) == 0
        and libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=64m") == 0
    ):
        return "a mount namespace"
    posix.DIRECTORY = base  # without the right to mount: a directory that the others do not look into
    real = posix.attach
    posix.attach = lambda path, nbytes: real(f"{base}/{Path(path).name}", nbytes)
    return "a directory"


def _two_hosts(base: str) -> dict[str, Any]:
    w = world.init(device="cpu")
    own = f"{base}/host{w.rank % 2}"
    if w.rank % 2:
        os.makedirs(own, exist_ok=True)
        how = _own_memory(own)
    else:
        how = "the host's"
    comm = Communicator(timeout=30)
    told = {"wrong": [*check_modes(comm), *check_rows(comm)], "plan": str(comm.plan("ordered")), "how": how}
    told["name"], told["left"] = (
        comm.transport.name,
        [n for n in os.listdir(posix.DIRECTORY) if n.startswith("bicomm-")],
    )
    bicomm.shutdown()
    return told


@pytest.mark.filterwarnings("ignore")
def test_hosts_that_share_no_memory_get_the_same_bits_by_all_to_all(tmp_path: Path) -> None:
    before = {n for n in os.listdir("/dev/shm") if n.startswith("bicomm-")}
    results = run_ranks(4, _two_hosts, str(tmp_path), launcher="fork")
    for result in results:
        assert result.value["wrong"] == [] and "all-to-all" in result.value["name"]
        assert "rank 1: cannot open another rank's memory, so it lives on another host" in result.value["plan"]
        assert set(result.value["left"]) <= before
    assert results[1].value["how"] == results[3].value["how"] != "the host's"


# ----------------------------------------------------------------------------------------- arguments of communicators


def _arguments() -> list[str]:
    w = world.init(device="cpu")
    odd = w.rank == 1
    told = []
    for arguments in (
        {"mode": "exakt" if odd else "exact"},
        {"mode": "exact" if odd else "ordered"},
        {"hidden": 3 if odd else 4},
        {"timeout": -1.0 if odd else 30.0},
        {"max_tokens": -5 if odd else 5},
        {"max_tokens": "many" if odd else 5},
        {"device": "nowhere" if odd else "cpu"},
        {"share_memory": odd},
        {"mode": "multimem", "strict": True},
    ):
        start = time.monotonic()
        try:
            Communicator(**arguments)
            told.append("made")
        except (TypeError, ValueError, RuntimeError) as error:
            told.append(f"{type(error).__name__}: {error}")
        if time.monotonic() - start > 10:
            told.append(f"{arguments} took too long")
    os.environ["BICOMM_TIMEOUT"] = "soon"
    try:
        Communicator()
    except ValueError as error:
        told.append(str(error))
    os.environ["BICOMM_TIMEOUT"], os.environ["BICOMM_DEBUG"] = "7", "1"
    comm = Communicator(mode="exact")
    told.append(f"{comm.transport._sync.timeout} {comm.debug}")  # type: ignore[attr-defined]
    told.append(str(comm.combine(torch.ones(w.size, 2)).tolist()))
    bicomm.shutdown()
    return told


def test_arguments_that_are_bad_or_differ_are_an_error_on_every_rank() -> None:
    values = [r.value for r in run_ranks(3, _arguments, launcher="fork")]
    for rank, told in enumerate(values):
        own = rank == 1
        assert len(told) == 12, told
        assert (
            told[0].startswith("ValueError: unknown contract 'exakt'" if own else "PeerRefused") and "exakt" in told[0]
        )
        assert "rank 1" in told[0] or own
        for number, texts in ((1, ("'ordered'", "'exact'")), (2, ("4", "3")), (7, ("False", "True"))):
            assert told[number].startswith("ValueError") and "on rank 0 and" in told[number]
            assert all(text in told[number] for text in texts)
        for number, text in ((3, "positive number"), (4, "-5"), (5, "str"), (6, "nowhere")):
            assert text in told[number] and (own or "rank 1" in told[number]), told[number]
        assert "strict=True" in told[8] and "BicommError" in told[8]
        assert "BICOMM_TIMEOUT='soon'" in told[9] and told[10] == "7.0 True" and told[11] == "[[3.0, 3.0]]"


def _again() -> list[Any]:
    """init, combine, shutdown, and all of it again: nothing of the first world may serve the second."""
    told = []
    for step in range(3):
        w = world.init(device="cpu")
        x = partials("normal", w.size, w.size, 3, step)
        got = bicomm.combine(x[w.rank], "ordered")
        told.append(same_bits(got, want(Contract("ordered"), x, [1] * w.size, w.rank)))
        told.append(bicomm.default_communicator() is bicomm.default_communicator())
        part = dist.new_group([0, 1])  # destroyed and made again, torch gives it the name that it had
        if w.rank < 2:
            told.append(bicomm.combine(torch.ones(2, 2), "exact", group=part).tolist() == [[2.0, 2.0]])
        last = bicomm.default_communicator()
        world.shutdown()
        try:
            last.combine(x[w.rank], "ordered")
        except bicomm.BicommError as error:
            told.append("closed" in str(error))
    return told


def test_a_world_that_is_shut_down_and_made_again_gets_new_communicators() -> None:
    for result in run_ranks(3, _again, launcher="fork"):
        assert result.value == [True] * len(result.value) and len(result.value) >= 9


def test_the_errors_of_the_table_are_bicomms_own() -> None:
    assert issubclass(PeerRefused, bicomm.BicommError) and issubclass(CallMismatch, bicomm.BicommError)
