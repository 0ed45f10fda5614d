"""The NVLink switch adds: a reduce-scatter by `multimem.ld_reduce`.

One load of 16 aligned bytes from a multicast address brings the sum of what all ranks hold there. What lies before and
after such vectors at the ends of a slice is read from the peers' own addresses, and added under the same contract. The
load stands in one small function, `load_and_reduce`, whose software branch is that contract's sum in exact.py: it is
all there is without a switch (HARDWARE False), and the branch that is taken once the word `trusted` on the device is 0,
so that captured graphs turn to software as well.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from bicomm.kernels.addends import (
    load_peer,
    own_slice,
    peer_pointers,
    store_tile,
    tile_limit,
)
from bicomm.kernels.arithmetic import round_to_fp32
from bicomm.kernels.barrier import enter, leave
from bicomm.kernels.call import (
    RUNTIME_INTEGERS,
    Reduce,
    Tile,
    aligned_elements,
    barriers,
    bits_of,
    cdiv,
    grid,
    vector_width,
)
from bicomm.kernels.exact import spread_limit, sum_exactly, tile_for


@triton.jit
def proxy_fence(value):
    """Between the two kinds of address: what was written through one may from here on be read through the other.

    Every thread executes it. `value` comes back unchanged; what must come after the fence is made to depend on it.
    """
    return tl.inline_asm_elementwise(
        "{ fence.proxy.alias; mov.b32 $0, $1; }", "=r,r", [value], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def switch_load(address, limit, BLOCK: tl.constexpr):
    """fp32 [BLOCK]: the switch's sums of consecutive elements, from a multicast address (int64, a multiple of 16) on.

    Nothing is read from element `limit` on, a multiple of 4.
    """
    vector = tl.arange(0, BLOCK // 4)
    a, b, c, d = tl.inline_asm_elementwise(
        """
        {
        .reg .pred p;
        setp.ne.s32 p, $5, 0;
        mov.b32 $0, 0;
        mov.b32 $1, 0;
        mov.b32 $2, 0;
        mov.b32 $3, 0;
        @p multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {$0, $1, $2, $3}, [$4];
        }
        """,
        "=&r,=&r,=&r,=&r,l,r",
        [address + vector.to(tl.int64) * 16, (vector * 4 < limit).to(tl.int32)],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=False,
        pack=1,
    )
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [BLOCK])


@triton.jit
def load_and_reduce(
    multicast, trusted, args, lane, W: tl.constexpr, BLOCK: tl.constexpr, ROTATE: tl.constexpr, LIMIT: tl.constexpr,
    G: tl.constexpr, T: tl.constexpr, S: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """RN32 of the sum of all ranks' tiles, by the switch or by its contract in software. args: as for `load_peer`."""
    if HARDWARE:
        if trusted != 0:
            _bases, _peers, offset, at, limit = args
            value = round_to_fp32(switch_load(multicast + offset + at * 4, limit, BLOCK))
        else:
            value = sum_exactly(load_peer, args, lane, W, 4, BLOCK, ROTATE, LIMIT, G, T, S)
    else:
        value = sum_exactly(load_peer, args, lane, W, 4, BLOCK, ROTATE, LIMIT, G, T, S)
    return value


@triton.jit(do_not_specialize=RUNTIME_INTEGERS)
def _reduce_kernel(
    peers, out, splits, trusted, multicast: tl.int64, offset: tl.int64, start: tl.int64, units: tl.int64,
    hidden: tl.int64, rows: tl.int64, rank: tl.int64, control, mine, page, what: tl.int64, shape: tl.int64,
    tokens: tl.int64, mark: tl.int64, patience: tl.int64, SYNC: tl.constexpr, LANES: tl.constexpr, W: tl.constexpr,
    ROTATE: tl.constexpr, ON_DEVICE: tl.constexpr, LIMIT: tl.constexpr, G: tl.constexpr, T: tl.constexpr,
    S: tl.constexpr, HARDWARE: tl.constexpr, EDGES: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first, owned = own_slice(splits, start, units, hidden, rows, rank, W, ON_DEVICE)  # loaded while the barrier waits
    bases = peer_pointers(peers, offset, tl.float32, W)
    trust = tl.load(trusted)
    ok = tl.cast(1, tl.int32)
    if SYNC:
        ok, opened = enter(control, mine, page, what, shape, tokens, mark, patience, rank, W, LANES, SYNC == 2)
    good = ok
    if HARDWARE:
        good = proxy_fence(ok)  # the peers wrote through their own addresses

    # `first` and `owned` are elements here: `head` of them lie before the first 16-byte border, the last few after the
    # last one, and whole vectors between.
    head = tl.cast(0, tl.int64)
    if EDGES:
        head = tl.minimum((4 - (first + (offset >> 2)) % 4) % 4, owned)
    vectors = (owned - head) // 4
    lane = tl.arange(0, BLOCK)
    for tile in tl.range(tl.program_id(0), tl.cdiv(vectors, BLOCK // 4), tl.num_programs(0)):
        done = tl.cast(tile, tl.int64) * (BLOCK // 4)
        readable = tile_limit(vectors - done, good, 4, BLOCK)
        args = (bases, peers, offset, first + head + done * 4, readable)
        value = load_and_reduce(multicast, trust, args, lane, W, BLOCK, ROTATE, LIMIT, G, T, S, HARDWARE)
        store_tile(out, head + done * 4, lane, tile_limit(vectors - done, 1, 4, BLOCK), value, good, VEC)
    if EDGES:  # noqa: SIM102 (decided at compile time)
        if tl.program_id(0) == 0:
            few = tl.arange(0, 4)
            for edge in tl.range(0, 2):
                at = tl.where(edge == 0, 0, head + vectors * 4)
                left = tl.where(edge == 0, head, owned - head - vectors * 4)
                args = (bases, peers, offset, first + at, tile_limit(left, good, 1, 4))
                value = sum_exactly(load_peer, args, few, W, 1, 4, ROTATE, LIMIT, G, T, S)
                store_tile(out, at, few, tile_limit(left, 1, 1, 4), value, good, 1)
    if SYNC:
        leave(opened, mine, page, ok, patience, rank, W, LANES, SYNC == 2)


def reduce(
    call: Reduce,
    parameters: tuple[int, ...] = (),
    *,
    multicast: int,
    trusted: Tensor,
    hardware: bool = True,
    tile: Tile | None = None,
) -> Tensor:
    """This rank's slice, added by the switch: for a fabric whose contract is `exact`, or `window(*parameters)`.

    multicast: the address through which all ranks' buffers are reached at once, a multiple of 16; call.offset counts
    from it as from each peer's. trusted: int32 [1] on the device; while it is 0 the contract runs in software.
    hardware=False leaves the instruction out. Returns call.out. Asynchronous on the current stream.
    """
    tile = tile or tile_for(call.capacity, call.world_size)
    rows = (call.start, call.count) if call.splits is None else (call.hidden,)
    edges = vector_width(4, call.offset, *(4 * n for n in rows)) < 4
    g, t, s = parameters or (0, 0, 0)
    _reduce_kernel[grid(cdiv(call.capacity, tile.block), tile, call.out.device, call.sync)](
        call.peers, bits_of(call.out), call.splits, trusted, multicast, call.offset, call.start, call.count,
        call.hidden, call.out.shape[0], call.rank, W=call.world_size, ROTATE=call.rotate,
        ON_DEVICE=call.splits is not None, LIMIT=spread_limit(call.world_size), G=g, T=t, S=s, HARDWARE=hardware,
        EDGES=edges, VEC=1 if edges else min(aligned_elements(call.out), 4), BLOCK=tile.block, **tile.options,
        **barriers(call.sync, tile.warps),
    )  # fmt: skip
    return call.out
