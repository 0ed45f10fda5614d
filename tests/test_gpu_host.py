"""The host's side of the GPU transport, on a CPU: CUDA is a fake that remembers, and kernels are recorded, not run.

What the kernels do is in test_barrier.py and test_kernels_*.py; that both work together, in tests/gpu/.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from bicomm import arguments
from bicomm.agreement.signature import describe, sign
from bicomm.agreement.store import StoreSync
from bicomm.communicator import Communicator, LocalRank
from bicomm.contract import EXACT
from bicomm.errors import Aborted, CallMismatch, CaptureError, NoRoom, NoSharedMemory, PeerRefused, PeerTimeout
from bicomm.kernels import barrier, exact, gather, multimem, ordered, owner
from bicomm.local_gpu import rehearsal
from bicomm.plan import Facts
from bicomm.ranks import peers
from bicomm.ranks.peers import Peer, settled
from bicomm.symmem import cuda
from bicomm.symmem.buffer import SymmetricBuffer
from bicomm.symmem.cuda import make_local_buffers
from bicomm.transports import gpu, gpu_faults, gpu_group, nvls
from bicomm.transports.gpu import GpuTransport
from bicomm.transports.link import LocalLink, LocalWorld, StoreLink
from bicomm.transports.nvls import Nvls

W = 3
CPU = torch.device("cpu")
INTERPRETED = {"exact": exact.reduce, "multimem": multimem.reduce}  # as they are, for tests that run them


class Stream:
    """A stream that knows which others it waits for."""

    def __init__(self, *_: object, **__: object) -> None:
        self.behind: list[Stream] = []

    def record_event(self) -> Stream:
        return self

    def wait_event(self, event: Stream) -> None:
        self.behind.append(event)

    def synchronize(self) -> None:
        """Nothing runs."""


class Fake:
    """What the fake CUDA remembers. launches: (kernel, its call) in order; during: run at each launch, where given."""

    def __init__(self) -> None:
        self.stream, self.capturing, self.set = Stream(), False, False
        self.launches: list[tuple[str, Any]] = []
        self.during: Callable[[str, Any], None] = lambda *_: None

    def launch(self, name: str) -> Callable[..., Any]:
        def run(*call: Any, **_: Any) -> None:
            assert self.set, "Triton would launch on whichever GPU this thread has set"
            self.launches.append((name, call[0]))
            self.during(name, call[0])

        return run

    @contextlib.contextmanager
    def device(self, _: torch.device) -> Iterator[None]:
        before, self.set = self.set, True
        yield
        self.set = before

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.stream, self.set = (self.stream, self.set), stream, True
        yield
        self.stream, self.set = before


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    made = Fake()
    for name, value in {
        "synchronize": lambda *_: None,
        "current_stream": lambda *_: made.stream,
        "is_current_stream_capturing": lambda: made.capturing,
        "device": made.device,
        "stream": made.on,
        "Stream": Stream,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    for name, module in {"ordered": ordered, "exact": exact, "multimem": multimem}.items():
        monkeypatch.setattr(module, "reduce", made.launch(name))
    monkeypatch.setattr(owner, "pull", made.launch("owner"))
    monkeypatch.setattr(gather, "gather", made.launch("gather"))
    monkeypatch.setattr(gpu, "copy_in", made.launch("copy_in"))
    for name in ("barrier_kernel", "abort_kernel"):
        monkeypatch.setattr(barrier, name, {(1,): made.launch(name)})
    return made


def world(size: int = W) -> list[Communicator]:
    """A local world, as local_gpu.py makes it."""
    shared, comms = LocalWorld(size, CPU), []
    for rank, control in enumerate(make_local_buffers(size, CPU, 8 * barrier.control_words(size))):
        transport = GpuTransport(rank, size, CPU, control, LocalLink(shared, rank), 4.0, 9.0)
        comms.append(LocalRank(transport, Facts("cuda", size, "", "none here"), CPU).communicator(rank, "exact", False))
    return comms


def transport_of(comm: Communicator) -> GpuTransport:
    assert isinstance(comm.transport, GpuTransport)
    return comm.transport


def told(call: Any) -> str:
    """The header of a recorded call, for people."""
    return describe(call.sync.what, call.sync.shape, call.sync.tokens)


def lose(comm: Communicator) -> None:
    """What a kernel leaves whose peers did not come: rank 2's bit in a record of rank 0, and the page."""
    transport = transport_of(comm)
    words, records = transport._words(), barrier.WORDS.value + 2 * comm.size
    words[records : records + 4] = torch.tensor([1, 1 << 2, 0, 7 << 2])
    transport._page[barrier.PAGE_LOST.value] = 1


# ---------------------------------------------------------------------------------- what ranks ask gradients for


def test_a_call_says_what_it_asks_a_gradient_for(fake: Fake) -> None:
    comm = world()[0]
    x, plain = torch.ones(6, 4, requires_grad=True), torch.ones(6, 4)
    comm.combine(x)
    comm.combine(plain)
    with torch.no_grad():
        comm.combine(x)
    comm.dispatch(torch.ones(2, 4, requires_grad=True), splits=[2, 2, 2])
    maps = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3)
    with comm.acquire(6, 4) as rows:
        comm.combine_rows(rows, *maps)
        comm.combine_rows(rows, *maps[:2], maps[2].requires_grad_())
        comm.combine_rows(rows.requires_grad_(), *maps)
    seen = [told(call).partition("gradient=")[2].partition(",")[0] for name, call in fake.launches if name != "copy_in"]
    assert seen == ["x", "none", "none", "x", "none", "weights", "rows+weights"]
    marks = [call.sync.mark for name, call in fake.launches if name == "exact"]
    assert marks[0] != marks[1] == marks[2]


def test_counts_ask_for_no_gradient_and_the_call_itself_does(fake: Fake) -> None:
    comm = world()[0]

    def count(name: str, call: Any) -> None:
        if name == "gather" and call.out.dtype == torch.int64:
            call.out.copy_(torch.tensor([[2], [0], [5]]))

    fake.during = count
    assert comm.dispatch(torch.ones(2, 4, requires_grad=True)).shape == (7, 4)
    first, second = (told(call) for name, call in fake.launches if name == "gather")
    assert "gradient=none" in first and "gradient=x" in second


def test_ranks_that_differ_in_their_gradients_read_both_sides_and_what_to_do(fake: Fake) -> None:
    comm = world()[0]
    comm.combine(torch.ones(6, 4, requires_grad=True))
    comm.combine(torch.ones(6, 4))
    asking, plain = ([c.sync.what, c.sync.shape, c.sync.tokens] for name, c in fake.launches if name == "exact")
    page, start = transport_of(comm)._page, barrier.PAGE_HEADS.value
    page[start : start + 9] = torch.tensor([*asking, *asking, *plain])
    page[barrier.PAGE_DIFFERENT.value], page[barrier.PAGE_LOST.value] = 5, 1
    with pytest.raises(CallMismatch, match=r"rank 0 combine\(.*gradient=x.*rank 2 combine\(.*gradient=none") as caught:
        comm.check()
    assert "requires_grad_()" in str(caught.value)


def test_a_refusal_is_read_as_that_and_in_the_words_of_the_rank() -> None:
    call, refusal = (
        sign("combine", torch.float32, EXACT, 4, (0, 0), 6),
        sign("refused", torch.float32, None, 0, (0, 0), None),
    )
    page, start = torch.zeros(barrier.page_words(W), dtype=torch.int64), barrier.PAGE_HEADS.value
    heads = [[s.what, s.shape, s.tokens] for s in (call, refusal, call)]
    page[start:] = torch.tensor(heads).flatten()
    assert gpu_faults.of_page(page, W, str) is None  # nobody noted a difference
    page[barrier.PAGE_DIFFERENT.value] = 5
    error = gpu_faults.of_page(page, W, lambda rank: f"what rank {rank} said")
    assert isinstance(error, PeerRefused) and "rank 1: what rank 1 said" in str(error)


def test_a_record_of_this_epoch_names_the_missing_ranks_beyond_the_64th_too() -> None:
    size, words = 72, torch.zeros(barrier.control_words(72), dtype=torch.int64)
    records = words[barrier.WORDS.value + 2 * size :].view(size, barrier.RECORD.value)
    records[3] = torch.tensor([1, 1, 0, 4 << 2 | barrier.ENTERING.value])  # of an epoch that is over
    assert "no rank left a record" in str(gpu_faults.of_records(words, size, 9, 2, str))
    records[71] = torch.tensor([2, 1 << 7, 1 << (70 - 64), 48 << 2 | barrier.LEAVING.value])
    error = gpu_faults.of_records(words, size, 9, 2, str)
    assert isinstance(error, PeerTimeout) and (error.missing, error.waiting, error.sequence) == ((7, 70), 71, 48)
    assert "ranks 7, 70 did not leave call 48" in str(error)
    records[5] = torch.tensor([2, 0, 0, barrier.ABORTED.value])
    assert isinstance(gpu_faults.of_records(words, size, 9, 2, lambda rank: "enough"), Aborted)


def test_slots_and_products_are_compared_as_on_a_cpu(fake: Fake) -> None:
    comm = world()[0]
    with comm.acquire(6, 4) as rows:
        for slots, product in ((2, torch.float32), (3, torch.float32), (3, torch.bfloat16)):
            maps = torch.zeros(2, slots, dtype=torch.int64), torch.zeros(2, slots, dtype=torch.int64)
            comm.combine_rows(rows, *maps, torch.ones(2, slots), product_dtype=product)
    calls = [call for _, call in fake.launches]
    assert len({call.sync.mark for call in calls}) == 3
    assert "slots=3, product bfloat16" in told(calls[2])


# ---------------------------------------------------------------------------------- dispatch


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.complex64], ids=str)
def test_a_dispatch_carries_any_type(fake: Fake, dtype: torch.dtype) -> None:
    comm = world()[0]
    comm.dispatch(torch.zeros(2, 8, dtype=dtype), splits=[2, 0, 1])
    assert f"dtype={str(dtype).removeprefix('torch.')}" in told(fake.launches[-1][1])


@pytest.mark.parametrize(
    ("out", "says"),
    [
        (torch.zeros(2, 4), "expected (3, 4)"),
        (torch.zeros(3, 2), "expected (3, 4)"),
        (torch.zeros(4, 3).t(), "not contiguous"),
        (torch.zeros(3, 4, dtype=torch.bfloat16), "out is bfloat16 and x float32"),
    ],
)
def test_a_dispatch_whose_out_does_not_fit_is_refused_on_all_ranks(fake: Fake, out: Tensor, says: str) -> None:
    comm = world()[1]
    with pytest.raises((TypeError, ValueError)) as caught:
        comm.dispatch(torch.zeros(1, 4), splits=[2, 1, 0], out=out)
    assert says in str(caught.value)
    assert [name for name, _ in fake.launches] == ["barrier_kernel"], "the others learn it"
    assert says in transport_of(comm)._link.read(1)


def test_with_counts_on_the_device_out_is_the_capacity(fake: Fake) -> None:
    transport, counts = transport_of(world()[0]), torch.ones(W, dtype=torch.int64)
    for rows, capacity in ((5, None), (5, 5)):
        out = torch.zeros(rows, 4)
        assert transport.dispatch(torch.zeros(2, 4), counts, out, capacity) is out
    assert transport.dispatch(torch.zeros(2, 4), counts, None, None).shape == (6, 4)
    with pytest.raises(ValueError, match=r"expected \(6, 4\)"):
        transport.dispatch(torch.zeros(2, 4), counts, torch.zeros(5, 4), 6)


def test_counts_that_never_came_are_a_time_out_and_no_size(fake: Fake) -> None:
    """After a fault kernels fill their results: 0x7fc07fc07fc07fc0 rows would be asked for."""
    for call in (
        lambda comm: comm.dispatch(torch.ones(2, 4)),
        lambda comm: comm.combine_rows(torch.ones(2, 4), *torch.zeros(2, 1, 1, dtype=torch.int64)),
    ):
        comm = world()[0]

        def fault(name: str, recorded: Any, comm: Communicator = comm) -> None:
            if name == "gather":
                recorded.out.fill_(0x7FC07FC07FC07FC0)
                lose(comm)

        fake.during = fault
        with pytest.raises(PeerTimeout, match="rank 2 did not enter call 7") as caught:
            call(comm)
        assert caught.value.missing == (2,)


def test_a_rehearsal_needs_no_counts(fake: Fake) -> None:
    comms = world()
    fake.during = lambda name, call: (
        call.out.fill_(1 << 62) if name == "gather" and not call.out.is_floating_point() else None
    )
    with rehearsal(comms):
        for comm in comms:
            assert comm.dispatch(torch.ones(2, 4)).shape == (6, 4)


def test_what_agrees_on_the_host_cannot_be_captured(fake: Fake) -> None:
    comm = world()[0]
    comm.reserve(64, 64)
    fake.capturing = True
    with pytest.raises(CaptureError, match=r"exchange_counts\(own\)"):
        comm.dispatch(torch.ones(2, 4))
    with pytest.raises(CaptureError, match="comm.acquire"):
        comm.combine_rows(torch.ones(2, 4), *torch.zeros(2, 1, 1, dtype=torch.int64))
    assert not fake.launches


# ---------------------------------------------------------------------------------- streams and memory


def test_an_acquired_buffer_comes_after_the_calls_that_read_it_before(fake: Fake) -> None:
    comm, first, second = world()[0], fake.stream, Stream()
    with comm.acquire(6, 4) as buffer:
        comm.combine(buffer)
    with fake.on(second), comm.acquire(6, 4) as again:
        assert again.data_ptr() == buffer.data_ptr()
        assert second.behind == [first], "the caller writes where peers may still read"


def test_an_operand_in_a_released_buffer_is_refused_as_on_a_cpu(fake: Fake) -> None:
    comm = world()[0]
    with comm.acquire(6, 4) as buffer:
        comm.combine(buffer)
    with pytest.raises(ValueError, match="released"):
        comm.combine(buffer)


def test_a_copy_that_fails_leaves_the_places_alike(fake: Fake) -> None:
    comm = world()[0]

    def fail(name: str, _: Any) -> None:
        if name == "copy_in":
            raise torch.OutOfMemoryError("CUDA out of memory")

    fake.during = fail
    with pytest.raises(torch.OutOfMemoryError):
        comm.combine(torch.ones(6, 4))
    assert transport_of(comm)._arenas.in_use == 0


def test_without_a_multicast_address_the_contract_runs_in_software(fake: Fake) -> None:
    """Multicast slots are few: an arena that grows later may get none, and a load from address 0 is the GPU's end."""
    comm = world()[0]
    transport = transport_of(comm)
    comm._facts = dataclasses.replace(comm._facts, multicast="", certified=EXACT, confirmed=EXACT)
    transport.nvls = Nvls(EXACT, CPU, lambda _: "", lambda _: "")
    comm.combine(torch.ones(6, 4), "multimem")
    for buffer in transport._arenas._buffers.values():
        buffer.multicast = 4096
    comm.combine(torch.ones(6, 4), "multimem")
    assert [name for name, _ in fake.launches if name != "copy_in"] == ["exact", "multimem"]


def test_a_time_out_beyond_what_a_device_counts_is_for_ever(fake: Fake) -> None:
    comm = world()[0]
    transport_of(comm).timeout = 1e300
    comm.combine(torch.ones(6, 4))
    assert next(call for name, call in fake.launches if name == "exact").sync.patience == 3 * 10**18 < 1 << 62


def test_every_rank_begins_to_read_at_another_peer(fake: Fake) -> None:
    """Else all ranks would read one rank's link at a time."""
    for comm in world():
        fake.launches.clear()
        for mode in ("ordered", "exact", "fp64"):
            comm.combine(torch.ones(6, 4), mode)
        comm.dispatch(torch.ones(2, 4), splits=[2, 2, 2])
        begins = [(name, call.rotate) for name, call in fake.launches if name != "copy_in"]
        assert begins == [(name, comm.rank) for name in ("ordered", "exact", "ordered", "gather")]


class Switched:
    """A local world whose calls go the switch's way, added by the real kernels in the interpreter, without barriers:
    `ask` drives the ranks in turn. lie: what the switch's own sums are after a fault of the switch."""

    def __init__(self, fake: Fake, monkeypatch: pytest.MonkeyPatch, every: int) -> None:
        self.comms, self.agreed = world(), [""] * W
        self.lie: Callable[[Tensor], None] = lambda _: None
        self.lose: Callable[[GpuTransport], None] = lambda _: None
        self.order: list[tuple[str, int, int]] = []  # kernel, elements of its result, nanoseconds of patience
        self.now = 0
        for name in INTERPRETED:
            monkeypatch.setattr({"exact": exact, "multimem": multimem}[name], "reduce", self._kernel(name))
        for comm in self.comms:
            comm._facts = dataclasses.replace(comm._facts, multicast="", certified=EXACT, confirmed=EXACT)
            transport_of(comm).nvls = Nvls(EXACT, CPU, self._known, self._agree, every, hardware=False)

    def _known(self, _: Any) -> str:
        self.order.append(("known columns", 0, 0))
        return ""

    def _agree(self, reason: str) -> str:
        self.agreed[self.now] = reason
        return reason

    def _kernel(self, name: str) -> Callable[..., Tensor]:
        def run(call: Any, *positional: Any, **named: Any) -> Tensor:
            self.order.append((name, call.out.numel(), call.sync.patience))
            out = INTERPRETED[name](dataclasses.replace(call, sync=None), *positional, **named)
            if name == "multimem" and int(named["trusted"]):
                self.lie(out)
            if name == "exact":
                self.lose(transport_of(self.comms[self.now]))
            return out

        return run

    def ask(self, data: Tensor, splits: Any, out_dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """One combine of fp32 [W, rows, hidden], of buffers that all ranks have filled."""
        with contextlib.ExitStack() as held:
            buffers = [held.enter_context(comm.acquire(*data.shape[1:])) for comm in self.comms]
            for buffer, own in zip(buffers, data, strict=True):
                buffer.copy_(own)
            outs = []
            for comm, buffer in zip(self.comms, buffers, strict=True):
                self.now = comm.rank
                share = data.shape[1] if isinstance(splits, Tensor) else splits[comm.rank]
                out = torch.full((share, data.shape[2]), 7.0, dtype=out_dtype)
                transport, place = transport_of(comm), comm._acquired.place_of(buffer)
                transport.combine(buffer, splits, EXACT, out, place, True)
                outs.append(out)
            return outs


DUST = torch.tensor([1.0, 2.0**-24, 2.0**-60])


def dusty(rows: int, hidden: int) -> Tensor:
    """A tie that the last rank's dust decides, in every element: an fp32 chain loses it."""
    return DUST.view(W, 1, 1) * (1 + torch.arange(rows * hidden).view(1, rows, hidden) % 3)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("splits", "hidden"), [((3, 0, 2), 8), ((1, 4, 0), 7)])
def test_a_periodic_check_sums_a_block_of_the_operand_both_ways(
    fake: Fake,
    monkeypatch: pytest.MonkeyPatch,
    splits: tuple[int, ...],
    hidden: int,
    out_dtype: torch.dtype,
    on_device: bool,
) -> None:
    monkeypatch.setattr(nvls, "BLOCK_ELEMENTS", 2 * hidden)
    ranks = Switched(fake, monkeypatch, every=2)
    data = dusty(sum(splits), hidden)
    wanted = EXACT.sum(data).to(out_dtype).split(splits)
    for due in (False, True, False):
        ranks.order.clear()
        outs = ranks.ask(data, torch.tensor(splits) if on_device else splits, out_dtype)
        for out, want, own in zip(outs, wanted, splits, strict=True):
            assert torch.equal(out[:own].view(torch.int16), want.view(torch.int16))
            assert out[own:].eq(7).all()
        assert [name for name, *_ in ranks.order] == (["multimem", "exact", "known columns"] * due + ["multimem"]) * W
        sizes = [size for name, size, _ in ranks.order if name == "exact"]
        assert all(size <= 2 * hidden for size in sizes) and len(sizes) == W * due
        if due:
            waits = [patience for _, _, patience in ranks.order[:4]]
            assert waits == [9 * 10**9, 9 * 10**9, 0, 4 * 10**9], "kernels for a block may have to be compiled"
    assert all(transport_of(comm).nvls.reason == "" for comm in ranks.comms)  # type: ignore[union-attr]


def test_one_bit_that_the_switch_gets_wrong_in_a_live_operand_turns_it_off(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The known columns are as they should be: the twin without a look at the operand would notice nothing."""
    ranks = Switched(fake, monkeypatch, every=3)
    data, splits = dusty(6, 8), (2, 2, 2)
    wanted = EXACT.sum(data)

    def lie(out: Tensor) -> None:
        out.view(torch.int32)[1, 5] ^= 1

    ranks.lie = lie
    for _ in range(2):
        assert not torch.equal(torch.cat(ranks.ask(data, splits)), wanted), "nobody looks at these calls"
    assert torch.equal(torch.cat(ranks.ask(data, splits)), wanted), "the call of the check is right already"
    for rank, comm in enumerate(ranks.comms):
        assert transport_of(comm).nvls.trusted.tolist() == [0]  # type: ignore[union-attr]
        said = comm.plan("multimem").candidates[0].reason
        want = int(wanted[2 * rank + 1, 5].view(torch.int32))
        assert f"row 1 of this rank's tokens, column 5, the switch gave 0x{want ^ 1:08x}" in said
        assert f"exact/1 is 0x{want:08x} (1 of 16 elements differ)" in said
    assert torch.equal(torch.cat(ranks.ask(data, splits)), wanted), "for good"


def test_a_fault_during_a_check_is_no_difference(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the group is lost between the two sums, one of them is NaN."""
    ranks = Switched(fake, monkeypatch, every=1)

    def lie(out: Tensor) -> None:
        out.fill_(torch.nan)

    def lose(transport: GpuTransport) -> None:
        transport._page[barrier.PAGE_LOST.value] = 1

    ranks.lie, ranks.lose = lie, lose
    ranks.ask(dusty(3, 4), (1, 1, 1))
    assert all(transport_of(comm).nvls.reason == "" for comm in ranks.comms)  # type: ignore[union-attr]
    with pytest.raises(PeerTimeout):
        ranks.comms[0].check()


# ---------------------------------------------------------------------------------- what is left


@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_communicators_made_and_destroyed_leave_no_memory(fake: Fake, how: str) -> None:
    held: list[weakref.ref[Tensor]] = []
    for _ in range(200):
        comms = world()
        for comm in comms:
            comm.combine(torch.ones(6, 4))
            with comm.acquire(6, 4) as buffer:
                comm.combine(buffer)
            transport = transport_of(comm)
            arenas = transport._arenas._buffers.values()
            held += [weakref.ref(b.owner) for b in (transport._control, *arenas)]
            held += [weakref.ref(transport._page)]
        fake.launches.clear()
        if how == "closed":
            for comm in comms:
                comm.close()
    del comms, comm, transport, arenas, buffer
    gc.collect()
    assert len(held) == 200 * W * 3 and not [one for one in held if one() is not None]


# ---------------------------------------------------------------------------------- faults


def test_ranks_that_a_fault_parted_in_a_growth_go_on_together(fake: Fake) -> None:
    comms = world()
    small, large = torch.ones(6, 4), torch.ones(6, 1 << 14)

    def marks() -> list[tuple[int, int]]:
        places = [transport_of(comm).take(small.numel() * 4) for comm in comms]
        for comm, place in zip(comms, places, strict=True):
            transport_of(comm).release(place)
        return [place.mark for place in places]

    for comm in comms:
        comm.combine(small)
    comms[0].combine(large)  # it grows, and the others never come
    assert len(set(marks())) > 1
    for comm in comms:
        comm.recover()
    assert len(set(marks())) == 1
    for comm in comms:
        comm.combine(large)
    assert len(set(marks())) == 1


def test_recovery_keeps_what_graphs_and_callers_hold(fake: Fake) -> None:
    comms = world()
    for comm in comms:
        comm.reserve(6, 4)
    fake.capturing = True
    for comm in comms:
        comm.combine(torch.ones(6, 4))
    fake.capturing = False
    held = [comm.memory() for comm in comms]
    for comm in comms:
        comm.recover()
    assert [comm.memory() for comm in comms] == held, "nothing parted the ranks, so nothing moves"
    with comms[1].acquire(6, 4) as buffer:
        buffer.fill_(3.0)
        for comm in comms:
            comm.recover()
        for comm in comms:
            assert comm.memory()["captured"] == held[0]["captured"]
            comm.combine(torch.ones(6, 4))
        assert buffer.eq(3).all()
    for comm in comms:
        comm.suspend()
        assert comm.memory()["captured"] == held[0]["captured"]


def test_abort_frees_the_waiting_kernels_first_and_is_known_at_once(fake: Fake) -> None:
    comm = world()[0]
    transport = transport_of(comm)

    def look(name: str, _: Any) -> None:
        assert name == "abort_kernel"
        assert int(transport._words()[barrier.LOST.value]) == 1, "else no multiprocessor may be free for this kernel"
        with pytest.raises(Aborted, match="shutting down"):
            comm.check()

    fake.during = look
    comm.abort("shutting down")
    with pytest.raises(Aborted, match="rank 0 aborted this communicator: shutting down"):
        comm.combine(torch.ones(6, 4))


def links(size: int) -> list[StoreLink]:
    store = dist.HashStore()
    return [StoreLink(StoreSync(store, rank, size, 5.0), None, CPU) for rank in range(size)]  # type: ignore[arg-type]


def on_all(made: list[StoreLink], call: Callable[[StoreLink], Any]) -> list[Any]:
    def outcome(link: StoreLink) -> Any:
        try:
            return call(link)
        except NoSharedMemory as error:
            return error

    with ThreadPoolExecutor(len(made)) as pool:
        return list(pool.map(outcome, made))


@pytest.mark.parametrize(("kind", "says"), [(NoRoom, "out of memory"), (NoSharedMemory, "no such driver")])
def test_one_rank_without_room_is_an_error_on_all_before_anyone_waits_in_torch(
    monkeypatch: pytest.MonkeyPatch, kind: type[NoSharedMemory], says: str
) -> None:
    lock, turns = threading.Lock(), iter(range(W))

    def reserve(device: torch.device, nbytes: int) -> Tensor:
        with lock:
            if next(turns) == 1:
                raise kind(says)
        return torch.zeros(nbytes, dtype=torch.uint8)

    monkeypatch.setattr(cuda, "reserve", reserve)
    monkeypatch.setattr(cuda, "share", lambda *_: pytest.fail("a rank waits for one that does not come"))
    for outcome in on_all(links(W), lambda link: link.allocate(1000)):
        assert type(outcome) is kind and says in str(outcome)


def test_one_rank_alone_needs_no_symmetric_memory_of_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "reserve", lambda *_: pytest.fail("nobody shares it"))
    buffer = links(1)[0].allocate(1000)
    assert isinstance(buffer, SymmetricBuffer) and buffer.capacity == 1024


# ------------------------------------------------------------------------------------------------------ which GPUs


@dataclasses.dataclass
class Told:
    """A rank's agreement with others that said this of themselves."""

    everyone: list[list[object]]

    def exchange(self, message: bytes) -> list[bytes]:
        return [message, *(json.dumps(each).encode() for each in self.everyone)]


@pytest.mark.parametrize(
    ("others", "says"),
    [
        ([["here", "b", 1, False]], ""),
        ([["there", "b", 1, False]], "2 hosts"),
        ([["here", "a", 0, False]], "several ranks share a GPU"),
        ([["here", "b", 0, False]], "CUDA_VISIBLE_DEVICES"),
        ([["here", "b", 0, True]], "CUDA_VISIBLE_DEVICES"),  # the variable is not set here
    ],
)
def test_why_ranks_cannot_map_each_others_memory(
    monkeypatch: pytest.MonkeyPatch, others: list[list[object]], says: str
) -> None:
    monkeypatch.delenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", raising=False)
    peer = Peer("host", "here", 1, 0, ("a",), 0, True)
    monkeypatch.setattr(gpu_group, "this_process", lambda *_: peer)
    reason = gpu_group._why_apart(Told(others), torch.device("cuda", 0))  # type: ignore[arg-type]
    assert says in reason and bool(reason) == bool(says)
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    allowed = [[*each[:3], True] for each in others]
    again = gpu_group._why_apart(Told(allowed), torch.device("cuda", 0))  # type: ignore[arg-type]
    assert again == ("" if others[0][0] == "here" else reason)


def test_an_operand_on_another_gpu_is_refused() -> None:
    """Its memory cannot be read from here: the kernel would end the CUDA context."""
    with FakeTensorMode():
        x = torch.empty(2, 4, device="cuda:1")
    for device in ("cuda:1", "cuda"):
        arguments.check_operand(x, "x", torch.device(device), [], "")
    for device in ("cuda:0", "cpu"):
        with pytest.raises(ValueError, match=f"x is on cuda:1, and the ranks of this communicator work on {device}"):
            arguments.check_operand(x, "x", torch.device(device), [], "")
        with pytest.raises(ValueError, match="on cuda:1"):
            arguments.check_output(x.float(), None, (2, 4), torch.device(device))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_rank_without_the_gpu_it_asks_for_refuses_before_the_others_wait() -> None:
    assert settled(CPU) == CPU
    with pytest.raises(RuntimeError, match="torch sees no GPU"):
        settled(torch.device("cuda"))


def test_a_gpu_without_a_number_is_the_one_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_gpus", lambda _: (("a", "b"), 1, False))
    assert settled(torch.device("cuda")) == torch.device("cuda", 1)
