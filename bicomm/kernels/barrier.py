"""Device barriers: two small Triton functions that open and close every kernel which reads other ranks' memory.

Every rank has control words in symmetric memory. `enter` pushes this rank's arrival into every rank's words (a
release at system scope) and waits until all arrivals are there (an acquire). `leave`, in the last block to finish,
does the same with a second set of words, so that nobody writes an operand that somebody still reads. A call thus has
one launch: barrier, work, barrier. Only block 0 signals, all blocks poll, the last block advances the generation: no
block waits for another block of its own grid, so a grid may be larger than the GPU.

A flag is `generation * 2**24 + mark`: the number of the call, and a check sum of this rank's header, so that one load
tells both that a peer is there and that it entered the same call. Generations are kept in memory, so a replayed graph
counts on. The first rank whose wait runs out of time leaves a record and the LOST word with all ranks; from then on
kernels fill their results with NaN and end at once. `recover()` on the host opens the next epoch, in which LOST is
behind again, and sets all ranks to a generation beyond every flag that was ever pushed.

Memory patterns: a release pushes what this rank wrote before (operands, header) ahead of its flag; an acquire makes
the peers' writes visible after it. Both are `.sys`, and a block-wide barrier beside each extends them to all threads.
What `enter` needs from memory is loaded at once: a chain of loads would cost some 0.6 us each (20 us a barrier, when
tried).
"""

from __future__ import annotations

import triton
import triton.language as tl

HEAD = tl.constexpr(3)  # int64 words of a header
RECORD = tl.constexpr(4)  # int64 words of a record: epoch, missing ranks 0-63, missing ranks 64-127, call and barrier

GENERATION = tl.constexpr(0)  # of the last call that ended well
FINISHED = tl.constexpr(1)  # blocks of the running call that are done
LOST = tl.constexpr(2)  # the last epoch that was given up
EPOCH = tl.constexpr(3)  # the epoch of this rank
OWN_HEAD = tl.constexpr(4)  # this rank's header, for those whose mark differs
WORDS = tl.constexpr(8)  # then, W each: arrivals, leaves, records

MARK_BITS = tl.constexpr(24)
MAX_RANKS = 128  # a lane each, of the 4 warps that every kernel has at least; two words of missing ranks

# What `enter` returns.
GONE = tl.constexpr(0)  # the group has given up: no result, no barrier
GOOD = tl.constexpr(1)

# What a lane's wait comes to.
THERE = tl.constexpr(0)
LATE = tl.constexpr(1)
GIVEN_UP = tl.constexpr(2)
DIFFERENT = tl.constexpr(3)

# Which wait a record speaks of.
ENTERING = tl.constexpr(0)
LEAVING = tl.constexpr(1)
ABORTED = tl.constexpr(2)

# The page: int64 words in pinned host memory, through which kernels tell the host what went wrong.
PAGE_LOST = tl.constexpr(0)  # the epoch that was given up
PAGE_DIFFERENT = tl.constexpr(1)  # the generation of a call that ranks entered with different headers
PAGE_HEADS = tl.constexpr(8)  # then W headers


def control_words(size: int) -> int:
    """int64 words of control memory on each of `size` ranks."""
    return int(WORDS.value + size * (2 + RECORD.value))


def page_words(size: int) -> int:
    """int64 words of the page of one rank."""
    return int(PAGE_HEADS.value + size * HEAD.value)


@triton.jit
def _poll(flag, word, lost, epoch, patience, active, SOFT: tl.constexpr):
    """Per lane: THERE once *flag is word, DIFFERENT if its generation is there with another mark, LATE when the time is
    over, GIVEN_UP when *lost has reached the epoch. Lanes that are not active are THERE.

    One block of assembly holds the whole loop: Triton believes %globaltimer to be the same in all threads, so a loop in
    Triton around it would put block-wide barriers inside a branch that threads take apart.
    """
    if SOFT:  # the interpreter runs one rank after the other: what is not there will not come
        seen = tl.load(flag, mask=active, other=0)
        status = tl.where((seen >> MARK_BITS) >= (word >> MARK_BITS), DIFFERENT, LATE)
        status = tl.where(seen == word, THERE, status)
        status = tl.where(tl.load(lost, mask=active, other=0) >= epoch, GIVEN_UP, status)
        return tl.where(active, status, THERE)
    else:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .pred p;
            .reg .b64 seen, gone, now, start;
            mov.u32 $0, 0;
            setp.eq.s32 p, $6, 0;
            @p bra over;
            mov.u64 start, %globaltimer;
            again:
            ld.relaxed.sys.global.b64 gone, [$3];
            ld.acquire.sys.global.b64 seen, [$1];
            mov.u32 $0, 2;
            setp.ge.s64 p, gone, $4;
            @p bra over;
            mov.u32 $0, 0;
            setp.eq.s64 p, seen, $2;
            @p bra over;
            mov.u32 $0, 3;
            shr.s64 seen, seen, 24;
            shr.s64 now, $2, 24;
            setp.ge.s64 p, seen, now;
            @p bra over;
            mov.u32 $0, 1;
            mov.u64 now, %globaltimer;
            sub.u64 now, now, start;
            setp.lt.u64 p, now, $5;
            @p bra again;
            over:
            }
            """,
            "=r,l,l,l,l,l,r",
            [flag, word, lost, epoch, patience, active.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _release(flag, value, active, SOFT: tl.constexpr):
    """Store value in *flag, a peer's memory, after everything this block wrote before. A store, since peers that are
    reached over PCIe take no atomic operations. The block-wide barrier makes all threads' writes precede it."""
    tl.debug_barrier()
    if SOFT:
        tl.store(flag, value, mask=active)
    else:
        tl.inline_asm_elementwise(
            """
            {
            .reg .pred p;
            setp.ne.s32 p, $3, 0;
            @p st.release.sys.global.b64 [$1], $2;
            mov.u32 $0, 0;
            }
            """,
            "=r,l,l,r",
            [flag, value, active.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _wait(mine, flags, word, epoch, patience, W: tl.constexpr, LANES: tl.constexpr, SOFT: tl.constexpr):
    """Wait for one flag of each rank; a lane each, one lane a thread, so that no flag is polled twice."""
    lanes = tl.arange(0, LANES)
    zero = tl.zeros([LANES], tl.int64)
    flag = flags + tl.minimum(lanes, W - 1)
    return _poll(flag, zero + word, mine + LOST + zero, zero + epoch, zero + patience, lanes < W, SOFT)


@triton.jit
def _give_up(
    peers, mine, page, status, generation, epoch, which, rank, W: tl.constexpr, LANES: tl.constexpr, SOFT: tl.constexpr
):
    """Tell every rank who was late, then that the epoch is lost. Where headers differ, or another rank has given up,
    every rank finds that out by itself: only the host and the own later kernels are told."""
    lanes = tl.arange(0, LANES)
    inside = lanes < W
    late = status == LATE
    if tl.max(late.to(tl.int32), axis=0) == 1:
        bit = tl.full([LANES], 1, tl.int64) << (lanes & 63).to(tl.int64)
        low = tl.sum(tl.where(late & (lanes < 64), bit, 0), axis=0)
        high = tl.sum(tl.where(late & (lanes >= 64), bit, 0), axis=0)
        record = peers + WORDS + 2 * W + rank * RECORD
        tl.store(record, epoch, mask=inside)
        tl.store(record + 1, low, mask=inside)
        tl.store(record + 2, high, mask=inside)
        tl.store(record + 3, generation * 4 + which, mask=inside)
        _release(peers + LOST, tl.zeros([LANES], tl.int64) + epoch, inside, SOFT)
    elif tl.max((status == DIFFERENT).to(tl.int32), axis=0) == 1:
        told = page + PAGE_HEADS + lanes * HEAD
        for i in tl.static_range(3):
            tl.store(told + i, tl.load(peers + OWN_HEAD + i, mask=inside, other=0), mask=inside)
        tl.store(page + PAGE_DIFFERENT, generation)
        tl.store(mine + LOST, epoch)
    tl.debug_barrier()
    tl.store(page + PAGE_LOST, epoch)


@triton.jit
def enter(
    control, mine, page, what, shape, tokens, mark, patience, rank, W: tl.constexpr, LANES: tl.constexpr,
    SOFT: tl.constexpr,
):  # fmt: skip
    """Open a call. Returns (GOOD or GONE, the same in all threads; what `leave` needs).

    control  int64* [W]: the address of every rank's control words. mine: this rank's.
    page     int64*: this rank's page in pinned host memory.
    what, shape, tokens, mark   this rank's header and its check sum: see signature.py.
    patience nanoseconds to wait. LANES: threads of the block. SOFT: for the interpreter, see `_poll`.
    """
    lanes = tl.arange(0, LANES)
    peers = tl.load(control + tl.minimum(lanes, W - 1)).to(tl.pointer_type(tl.int64))
    generation = tl.load(mine + GENERATION) + 1
    epoch = tl.load(mine + EPOCH)
    word = (generation << MARK_BITS) + mark
    if tl.program_id(0) == 0:
        tl.store(mine + OWN_HEAD, what)
        tl.store(mine + OWN_HEAD + 1, shape)
        tl.store(mine + OWN_HEAD + 2, tokens)
        _release(peers + WORDS + rank, tl.zeros([LANES], tl.int64) + word, lanes < W, SOFT)
    status = _wait(mine, mine + WORDS, word, epoch, patience, W, LANES, SOFT)
    bad = tl.max(status, axis=0)
    tl.debug_barrier()
    if bad != 0:
        _give_up(peers, mine, page, status, generation, epoch, ENTERING, rank, W, LANES, SOFT)
    return (bad == 0).to(tl.int32), (peers, generation, epoch)


@triton.jit
def leave(opened, mine, page, outcome, patience, rank, W: tl.constexpr, LANES: tl.constexpr, SOFT: tl.constexpr):
    """Close a call: the last block tells every rank that this one has read all it needs, and waits for theirs."""
    peers, generation, epoch = opened
    tl.debug_barrier()
    finished = tl.atomic_add(mine + FINISHED, 1, sem="acq_rel", scope="gpu")
    if finished == tl.num_programs(0) - 1:
        tl.store(mine + FINISHED, 0)
        if outcome == GOOD:
            lanes = tl.arange(0, LANES)
            word = generation << MARK_BITS
            _release(peers + WORDS + W + rank, tl.zeros([LANES], tl.int64) + word, lanes < W, SOFT)
            status = _wait(mine, mine + WORDS + W, word, epoch, patience, W, LANES, SOFT)
            if tl.max(status, axis=0) != 0:
                _give_up(peers, mine, page, status, generation, epoch, LEAVING, rank, W, LANES, SOFT)
            else:
                tl.store(mine + GENERATION, generation)


@triton.jit(do_not_specialize=["rank"])
def abort_kernel(control, mine, page, rank: tl.int64, W: tl.constexpr, LANES: tl.constexpr):
    """What the host launches to make all ranks give up: a record without missing ranks, then the LOST words."""
    lanes = tl.arange(0, LANES)
    inside = lanes < W
    epoch = tl.load(mine + EPOCH)
    peers = tl.load(control + tl.minimum(lanes, W - 1)).to(tl.pointer_type(tl.int64))
    record = peers + WORDS + 2 * W + rank * RECORD
    tl.store(record, epoch, mask=inside)
    tl.store(record + 1, 0, mask=inside)
    tl.store(record + 2, 0, mask=inside)
    tl.store(record + 3, ABORTED, mask=inside)
    _release(peers + LOST, tl.zeros([LANES], tl.int64) + epoch, inside, False)
    tl.store(page + PAGE_LOST, epoch)


@triton.jit(do_not_specialize=["what", "mark", "patience", "rank"])
def barrier_kernel(
    control, mine, page, what: tl.int64, mark: tl.int64, patience: tl.int64, rank: tl.int64, W: tl.constexpr,
    LANES: tl.constexpr, SOFT: tl.constexpr,
):  # fmt: skip
    """A call without work: one full barrier, for timing and for ranks that refuse their arguments."""
    ok, opened = enter(control, mine, page, what, 0, 0, mark, patience, rank, W, LANES, SOFT)
    leave(opened, mine, page, ok, patience, rank, W, LANES, SOFT)
