"""What kernels left behind when they gave up, as errors for people.

Two places tell of it: the page in pinned host memory, where a kernel notes the headers of ranks that entered different
calls, and the records in the control words, where the rank that gave up first says whom it waited for.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from bicomm.agreement.flags import AGAIN
from bicomm.agreement.signature import describe, hint, is_refusal
from bicomm.errors import Aborted, BicommError, CallMismatch, PeerRefused, PeerTimeout
from bicomm.kernels import barrier

Read = Callable[[int], str]  # the text that a rank left for the others


def of_page(page: Tensor, size: int, read: Read) -> BicommError | None:
    """PeerRefused or CallMismatch where ranks entered different calls, else None. page: int64, `barrier.page_words`."""
    if not int(page[barrier.PAGE_DIFFERENT.value]):
        return None
    start, words = barrier.PAGE_HEADS.value, barrier.HEAD.value
    heads = page[start : start + words * size].view(size, words).tolist()
    refusing = [rank for rank, head in enumerate(heads) if is_refusal(head[0])]
    if refusing and len(refusing) < size:
        told = "; ".join(f"rank {rank}: {read(rank)}" for rank in refusing)
        return PeerRefused(f"a call did not run, because its arguments were refused: {told}. {AGAIN}")
    other = next(rank for rank, head in enumerate(heads) if head != heads[0])
    return CallMismatch(
        f"ranks entered different calls: rank 0 {describe(*heads[0])}, rank {other} {describe(*heads[other])}"
        f"{hint(heads[0], heads[other])}. Every rank of the group must make the same calls in the same order. Results "
        f"are NaN. {AGAIN}"
    )


def of_records(words: Tensor, size: int, rank: int, epoch: int, read: Read) -> BicommError:
    """Aborted, or PeerTimeout that names the missing ranks. words: this rank's control words, on the CPU."""
    start = int(barrier.WORDS.value) + 2 * size
    records = words[start : start + size * barrier.RECORD.value].view(size, barrier.RECORD.value).tolist()
    for first, (when, low, high, call) in enumerate(records):
        if when != epoch:
            continue
        which = call & 3
        if which == barrier.ABORTED.value:
            return Aborted(f"rank {first} aborted this communicator: {read(first)}. {AGAIN}")
        missing = tuple(r for r in range(size) if (low if r < 64 else high) >> (r & 63) & 1)
        names = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        side = "enter" if which == barrier.ENTERING.value else "leave"
        return PeerTimeout(
            f"{names} did not {side} call {call >> 2} of this communicator in time (rank {first} gave up first, epoch "
            f"{epoch}). Results since then are NaN. {AGAIN}; without a dead rank, make a new one",
            missing=missing,
            waiting=first,
            sequence=call >> 2,
        )
    return PeerTimeout(f"rank {rank}: this communicator was lost, and no rank left a record of why. {AGAIN}")
