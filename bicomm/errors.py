"""What can go wrong between ranks, as exceptions that say who, what and what to do."""

from __future__ import annotations


class BicommError(RuntimeError):
    """The base of every error that bicomm raises about a group of ranks."""


class NotInitialized(BicommError):
    """A collective was called before `bicomm.init()`."""


class LaunchError(BicommError):
    """The environment does not say who the ranks are, says it in two ways, or the ranks cannot find each other."""


class PeerTimeout(BicommError):
    """Some ranks did not arrive in time, died, or closed the communicator, which raises this from then on.

    After a late rank, until all ranks call `recover()` (that of `bicomm.combine`: `bicomm.default_communicator()`).
    After a death or a close, go on with a new communicator of the ranks that are left:
    `torch.distributed.new_group([0, 2], use_local_synchronization=True)` gives its group. Raised by the making of a
    communicator: make it again, on all ranks together.

    missing: the ranks that were waited for. waiting: the rank that gave up first. sequence: the call it was in.
    kind: `late`, `died` or `closed`; "" where that is not known. seconds: how long they were waited for, at most.
    """

    def __init__(
        self,
        message: str,
        *,
        missing: tuple[int, ...] = (),
        waiting: int = -1,
        sequence: int = -1,
        kind: str = "",
        seconds: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.missing, self.waiting, self.sequence = missing, waiting, sequence
        self.kind, self.seconds = kind, seconds


class Aborted(BicommError):
    """A rank called `comm.abort()`: the communicator raises this until all ranks call `recover()`."""


class CallMismatch(BicommError):
    """Ranks entered different calls (contract, shape, dtype, splits). Raised on every rank; nothing was computed."""


class PeerRefused(BicommError):
    """Another rank refused its own arguments, so this call did not run. The message carries that rank's reason."""


class NoSharedMemory(BicommError):
    """The ranks of a group cannot map each other's memory, or there is not enough of it."""


class NoRoom(NoSharedMemory):
    """The ranks could share memory, but there is too little of it: the message says how much, and what to do."""


class CaptureError(BicommError):
    """Something that a CUDA graph cannot hold (an allocation, a rendezvous) was asked for during capture."""
