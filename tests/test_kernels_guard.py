"""No kernel reads or writes beyond what it was given: the page after each buffer must not be touched.

A wrong access ends the process, so the kernels run in one of their own: this file as a script, in the interpreter.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
PAGE = mmap.PAGESIZE
KEPT: list[mmap.mmap] = []


def guarded(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A copy of x that ends where memory ends, and the page it begins in (an address that is a multiple of 16)."""
    nbytes = x.numel() * x.element_size()
    pages = max(1, -(-nbytes // PAGE))
    memory = mmap.mmap(-1, (pages + 1) * PAGE)
    KEPT.append(memory)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(start + pages * PAGE), ctypes.c_size_t(PAGE), 0) == 0
    whole = torch.frombuffer(memory, dtype=torch.uint8)[pages * PAGE - nbytes : pages * PAGE]
    copy = whole.view(x.dtype).view(x.shape) if nbytes else x.clone()
    return copy.copy_(x), start


def buffers(data: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Addresses of guarded copies of data[r], and the offset at which each begins."""
    places = [guarded(x) for x in data]
    nbytes = data[0].numel() * data.element_size()
    return torch.tensor([start for _, start in places]), -(-nbytes // PAGE) * PAGE - nbytes


def main() -> None:
    from bicomm.contract import EXACT, ORDERED, OWNER
    from bicomm.kernels import exact, gather, multimem, ordered, owner
    from bicomm.kernels.broadcast import Broadcast, broadcast
    from bicomm.kernels.call import Gather, Pull, Reduce, Tile
    from kernel_cases import assert_bits, family, routing

    tile = Tile(64, 4, 2)
    word, _ = guarded(torch.ones(1, dtype=torch.int32))
    for hidden in (1, 7, 20):
        data = family("cancellation", 3, [3, hidden])
        peers, offset = buffers(data)
        splits, _ = guarded(torch.tensor([1, 0, 2]))
        out, _ = guarded(torch.zeros(2, hidden))
        call = Reduce(peers, offset, 2, hidden, out, splits=splits)
        for reduce, contract in (
            (lambda call: ordered.reduce(call, tile=tile), ORDERED),
            (lambda call: exact.reduce(call, tile=tile), EXACT),
            (lambda call: multimem.reduce(call, multicast=0, trusted=word, hardware=False, tile=tile), EXACT),
        ):
            reduce(call)
            assert_bits(out, contract.sum(data[:, 1:]))

        case = routing(3, 2, hidden, 2, 2)
        peers, offset = buffers(case.rows)
        rows, ranks = guarded(case.row_of_slot)[0], guarded(case.rank_of_slot)[0]
        owner.pull(Pull(peers, offset, 0, torch.bfloat16, out, rows, ranks), tile=tile)
        assert_bits(out, OWNER.sum(case.addends()))

        pairs = data[:, :2].contiguous()
        peers, offset = buffers(pairs)
        counts, _ = guarded(torch.tensor([2, 2, 2]))
        gathered, _ = guarded(torch.zeros(6, hidden))
        gather.gather(Gather(peers, offset, 0, gathered, counts), tile=tile)
        assert_bits(gathered, pairs.flatten(0, 1))

        results = torch.zeros(3, 6, hidden)
        peers, offset = buffers(results)
        for rank in range(3):
            own, _ = guarded(pairs[rank])
            broadcast(Broadcast(peers, 0, offset, rank, own, counts, 6, word), hardware=False, tile=tile)


def run(argument: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)]),
    }
    command = [sys.executable, __file__, argument]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mprotect of an anonymous mapping")
def test_nothing_beyond_the_buffers_is_touched() -> None:
    done = run("kernels")
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mprotect of an anonymous mapping")
def test_twin_a_touch_beyond_ends_the_process() -> None:
    assert run("touch").returncode < 0


if __name__ == "__main__":
    if sys.argv[1] == "touch":
        tensor, _ = guarded(torch.zeros(4))
        ctypes.c_float.from_address(tensor.data_ptr() + 16).value += 1.0
    else:
        main()
