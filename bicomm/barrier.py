"""Device barriers: two small Triton functions that open and close every kernel which reads other ranks' memory.

Every rank has control words in symmetric memory. `enter` pushes this rank's header and then its arrival (a release at
system scope) into every rank's words, and waits until all arrivals are there (an acquire). `leave`, in the last block to
finish, does the same with a second set of words, so that nobody writes an operand that somebody still reads. A call thus
has one launch: barrier, work, barrier. Only block 0 signals, all blocks poll, the last block advances the generation: no
block waits for another block of its own grid, so a grid may be larger than the GPU.

Arrivals are generations: epoch * 2**40 + call number, kept in memory, so a replayed graph counts on. The first rank whose
wait runs out of time writes a record and the epoch's LOST word to all ranks; from then on kernels fill their results with
NaN and end at once. `recover()` on the host opens the next epoch, whose generations are all larger.

Two memory patterns: a release pushes what this rank wrote (operands, header) before its flag; an acquire makes the
peers' writes visible after it. Both are `.sys`, and the block-wide barrier beside each extends them to all threads.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

HEAD = tl.constexpr(3)  # int64 words of a header
RECORD = tl.constexpr(4)  # int64 words of a record: generation, missing ranks 0-63, missing ranks 64-127, which barrier

GENERATION = tl.constexpr(0)  # of the last call that ended well
FINISHED = tl.constexpr(1)  # blocks of the running call that are done
LOST = tl.constexpr(2)  # the last epoch that was given up
WORDS = tl.constexpr(8)  # then, W each: arrivals, leaves, headers, records

EPOCH_SHIFT = tl.constexpr(40)
MAX_RANKS = 128  # two words of missing ranks

# What `enter` returns.
GONE = tl.constexpr(0)  # the group has given up: no result, no barrier
GOOD = tl.constexpr(1)

# The page: int64 words in pinned host memory, through which kernels tell the host what went wrong.
PAGE_LOST = tl.constexpr(0)  # the epoch that was given up
PAGE_DIFFERENT = tl.constexpr(1)  # the generation of a call that ranks entered with different headers
PAGE_HEADS = tl.constexpr(8)  # then W headers


def control_words(size: int) -> int:
    """int64 words of control memory on each of `size` ranks."""
    return int(WORDS.value + size * (2 + HEAD.value + RECORD.value))


def page_words(size: int) -> int:
    """int64 words of the page of one rank."""
    return int(PAGE_HEADS.value + size * HEAD.value)


@triton.jit
def _poll(flag, generation, lost, epoch, nanoseconds, SOFT: tl.constexpr):
    """Per lane: 0 once *flag has reached the generation, 1 when the time is over, 2 when *lost has reached the epoch.

    One block of assembly holds the whole loop: Triton believes %globaltimer to be the same in all threads, so a loop in
    Triton around it would put block-wide barriers inside a branch that threads take apart.
    """
    if SOFT:  # the interpreter runs one rank after the other: what is not there will not come
        if tl.max((tl.load(lost) >= epoch).to(tl.int32), axis=0) == 1:
            return tl.full(flag.shape, 2, tl.int32)
        return (tl.load(flag) < generation).to(tl.int32)
    return tl.inline_asm_elementwise(
        """
        {
        .reg .pred p;
        .reg .b64 seen, now, start;
        mov.u64 start, %globaltimer;
        again:
        ld.acquire.sys.global.b64 seen, [$1];
        mov.u32 $0, 0;
        sub.s64 seen, seen, $2;
        setp.ge.s64 p, seen, 0;
        @p bra over;
        ld.relaxed.sys.global.b64 seen, [$3];
        mov.u32 $0, 2;
        setp.ge.s64 p, seen, $4;
        @p bra over;
        mov.u64 now, %globaltimer;
        sub.u64 now, now, start;
        mov.u32 $0, 1;
        setp.lt.u64 p, now, $5;
        @p bra again;
        over:
        }
        """,
        "=r,l,l,l,l,l",
        [flag, generation, lost, epoch, nanoseconds],
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
def _wait(mine, flags, generation, nanoseconds, WP: tl.constexpr, W: tl.constexpr, SOFT: tl.constexpr):
    """Wait until all W flags have reached the generation: per lane, what `_poll` says. Lanes past W repeat the last."""
    lanes = tl.minimum(tl.arange(0, WP), W - 1)
    zero = tl.zeros([WP], tl.int64)
    lost = mine + LOST + zero
    return _poll(flags + lanes, zero + generation, lost, zero + (generation >> EPOCH_SHIFT), zero + nanoseconds, SOFT)


@triton.jit
def _give_up(
    control, page, status, generation, which, rank, W: tl.constexpr, WP: tl.constexpr, SOFT: tl.constexpr
):
    """Tell every rank who was missing, then that the epoch is lost; or, where another rank did, only this host."""
    lanes = tl.arange(0, WP)
    peers = tl.load(control + tl.minimum(lanes, W - 1)).to(tl.pointer_type(tl.int64))
    missing = (status == 1) & (lanes < W)
    if tl.max(missing.to(tl.int32), axis=0) == 1:
        bit = tl.full([WP], 1, tl.int64) << (lanes & 63).to(tl.int64)
        low = tl.sum(tl.where(missing & (lanes < 64), bit, 0), axis=0)
        high = tl.sum(tl.where(missing & (lanes >= 64), bit, 0), axis=0)
        record = peers + WORDS + W * (2 + HEAD) + rank * RECORD
        tl.store(record, generation, mask=lanes < W)
        tl.store(record + 1, low, mask=lanes < W)
        tl.store(record + 2, high, mask=lanes < W)
        tl.store(record + 3, which, mask=lanes < W)
        epoch = tl.zeros([WP], tl.int64) + (generation >> EPOCH_SHIFT)
        _release(peers + LOST, epoch, lanes < W, SOFT)
    tl.store(page + PAGE_LOST, generation >> EPOCH_SHIFT)


@triton.jit
def enter(control, page, what, shape, tokens, patience, rank, W: tl.constexpr, WP: tl.constexpr, SOFT: tl.constexpr):
    """Open a call: GOOD or GONE, the same in all threads of a block.

    control  int64* [W]: the address of every rank's control words.
    page     int64*: this rank's page in pinned host memory.
    what, shape, tokens   this rank's header (signature.py); tokens is compared where the lowest bit of `what` is set.
    patience nanoseconds to wait. WP: the power of two that W is rounded up to. SOFT: for the interpreter, see `_poll`.
    """
    lanes = tl.arange(0, WP)
    inside = lanes < W
    mine = tl.load(control + rank).to(tl.pointer_type(tl.int64))
    generation = tl.load(mine + GENERATION) + 1
    status = tl.full([WP], 2, tl.int32)
    if tl.load(mine + LOST, volatile=True) < (generation >> EPOCH_SHIFT):
        if tl.program_id(0) == 0:
            peers = tl.load(control + tl.minimum(lanes, W - 1)).to(tl.pointer_type(tl.int64))
            head = peers + WORDS + 2 * W + rank * HEAD
            tl.store(head, what, mask=inside)
            tl.store(head + 1, shape, mask=inside)
            tl.store(head + 2, tokens, mask=inside)
            _release(peers + WORDS + rank, tl.zeros([WP], tl.int64) + generation, inside, SOFT)
        status = _wait(mine, mine + WORDS, generation, patience, WP, W, SOFT)
    worst = tl.max(status, axis=0)
    tl.debug_barrier()
    outcome = tl.cast(GONE, tl.int32)
    if worst != 0:
        _give_up(control, page, status, generation, 0, rank, W, WP, SOFT)
    else:
        heads = mine + WORDS + 2 * W + lanes * HEAD
        their_what = tl.load(heads, mask=inside, other=what)
        their_shape = tl.load(heads + 1, mask=inside, other=shape)
        their_tokens = tl.load(heads + 2, mask=inside, other=tokens)
        differ = (their_what != what) | (their_shape != shape) | ((their_tokens != tokens) & ((what & 1) == 1))
        if tl.max(differ.to(tl.int32), axis=0) == 0:
            outcome = tl.cast(GOOD, tl.int32)
        else:  # every rank finds this out by itself, so nobody needs to be told
            told = page + PAGE_HEADS + lanes * HEAD
            tl.store(told, their_what, mask=inside)
            tl.store(told + 1, their_shape, mask=inside)
            tl.store(told + 2, their_tokens, mask=inside)
            tl.store(page + PAGE_DIFFERENT, generation)
            tl.store(mine + LOST, generation >> EPOCH_SHIFT)
            tl.store(page + PAGE_LOST, generation >> EPOCH_SHIFT)
    return outcome


@triton.jit
def leave(control, page, outcome, patience, rank, W: tl.constexpr, WP: tl.constexpr, SOFT: tl.constexpr):
    """Close a call: the last block tells every rank that this one has read all it needs, and waits for theirs."""
    lanes = tl.arange(0, WP)
    mine = tl.load(control + rank).to(tl.pointer_type(tl.int64))
    tl.debug_barrier()
    finished = tl.atomic_add(mine + FINISHED, 1, sem="acq_rel", scope="gpu")
    if finished == tl.num_programs(0) - 1:
        tl.store(mine + FINISHED, 0)
        if outcome == GOOD:
            generation = tl.load(mine + GENERATION) + 1
            peers = tl.load(control + tl.minimum(lanes, W - 1)).to(tl.pointer_type(tl.int64))
            _release(peers + WORDS + W + rank, tl.zeros([WP], tl.int64) + generation, lanes < W, SOFT)
            status = _wait(mine, mine + WORDS + W, generation, patience, WP, W, SOFT)
            if tl.max(status, axis=0) != 0:
                _give_up(control, page, status, generation, 1, rank, W, WP, SOFT)
            else:
                tl.store(mine + GENERATION, generation)


@triton.jit(do_not_specialize=["rank"])
def abort_kernel(control, page, rank: tl.int64, W: tl.constexpr, WP: tl.constexpr):
    """What the host launches to make all ranks give up: a record without missing ranks, then the LOST words."""
    lanes = tl.arange(0, WP)
    mine = tl.load(control + rank).to(tl.pointer_type(tl.int64))
    generation = tl.load(mine + GENERATION, volatile=True) + 1
    peers = tl.load(control + tl.minimum(lanes, W - 1)).to(tl.pointer_type(tl.int64))
    record = peers + WORDS + W * (2 + HEAD) + rank * RECORD
    tl.store(record, generation, mask=lanes < W)
    for word in tl.static_range(1, 3):
        tl.store(record + word, 0, mask=lanes < W)
    tl.store(record + 3, 2, mask=lanes < W)
    _release(peers + LOST, tl.zeros([WP], tl.int64) + (generation >> EPOCH_SHIFT), lanes < W, False)
    tl.store(page + PAGE_LOST, generation >> EPOCH_SHIFT)


@triton.jit(do_not_specialize=["what", "patience", "rank"])
def barrier_kernel(
    control, page, what: tl.int64, patience: tl.int64, rank: tl.int64, W: tl.constexpr, WP: tl.constexpr,
    SOFT: tl.constexpr,
):  # fmt: skip
    """A call without work: one full barrier, for timing and for ranks that refuse their arguments."""
    outcome = enter(control, page, what, 0, 0, patience, rank, W, WP, SOFT)
    leave(control, page, outcome, patience, rank, W, WP, SOFT)
