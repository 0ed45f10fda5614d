"""How a group of GPUs becomes able to combine: processes with a GPU each, or a local world on one GPU."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from bicomm.agreement.store import StoreSync
from bicomm.capability import identity, multicast_refusal
from bicomm.contract import Contract
from bicomm.errors import NoSharedMemory
from bicomm.kernels import barrier
from bicomm.plan import Facts
from bicomm.ranks.peers import this_process
from bicomm.symmem.buffer import SymmetricBuffer
from bicomm.symmem.cuda import make_local_buffers
from bicomm.transports.alltoall import AllToAllTransport, Wire
from bicomm.transports.base import Transport
from bicomm.transports.gpu import GpuTransport
from bicomm.transports.link import StoreLink
from bicomm.transports.nvls import Nvls, decide
from bicomm.transports.request import Request

_OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


def establish_gpu(
    group: dist.ProcessGroup,
    device: torch.device,
    request: Request,
    sync: StoreSync,
    make_wire: Callable[[], Wire],
) -> tuple[Transport, Facts]:
    """The transport of a group of GPUs, and its facts; the same on every rank. Collective."""
    rank, size = sync.rank, sync.size
    reason = _why_apart(sync, device) if request.share_memory else "the communicator was made with share_memory=False"
    control: SymmetricBuffer | None = None
    link = StoreLink(sync, group, device)
    if not reason and size > 1:
        try:
            control = link.allocate(8 * barrier.control_words(size))
        except NoSharedMemory as error:
            reason = str(error)
        told = {r: text.decode() for r, text in enumerate(sync.exchange(reason.encode()))}
        reason = "; ".join(f"rank {r}: {text}" for r, text in told.items() if text)
    if reason:
        return AllToAllTransport(sync, make_wire, device), Facts("cuda", size, reason, reason)
    if control is None:  # one rank: nobody to wait for
        control = make_local_buffers(1, device, 8 * barrier.control_words(1))[0]
    transport = GpuTransport(rank, size, device, control, link, request.timeout, request.first_timeout)
    reserve = request.max_tokens * request.hidden * 4
    if reserve and size > 1:
        transport.release(transport.take(reserve))
    refusals = [text.decode() for text in sync.exchange(multicast_refusal(control.multicast, device).encode())]
    multicast = "; ".join(f"rank {r}: {text}" for r, text in enumerate(refusals) if text)
    facts = Facts("cuda", size, "", multicast)
    return transport, facts if multicast else _judge_switch(transport, link, sync, device, request, facts)


def _judge_switch(
    transport: GpuTransport, link: StoreLink, sync: StoreSync, device: torch.device, request: Request, facts: Facts
) -> Facts:
    """The facts with what the switch was found to obey; the transport then has an `Nvls`. Collective."""
    from bicomm.certify import trust
    from bicomm.certify.hardware import Switch

    def gather(mine: Any) -> list[Any]:
        return [json.loads(text) for text in sync.exchange(json.dumps(mine).encode())]

    def meet() -> None:
        torch.cuda.synchronize(device)
        sync.exchange(b"")

    def agree(reason: str) -> str:
        return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(gather(reason)) if text)

    index = torch.cuda.current_device() if device.index is None else device.index
    machine = trust.sorted_machine(gather(identity(index)))
    known = trust.find(machine, sync.size)  # one file, which the hosts of a group may have or lack: rank 0's counts
    name, why_not = gather((known.contract.id if known.contract else "", known.reason))[0]
    certified = Contract.parse(name) if name else None
    asked = Contract.parse(request.mode) if "/" in request.mode else None
    columns = trust.check_inputs(sync.size).shape[1]
    switch = Switch(sync.rank, sync.size, sync.rank, link.allocate(4 * columns + 64), machine, meet, gather)

    def check(contract: Contract) -> str:
        return trust.self_check(switch, contract, rank=sync.rank)

    confirmed, reason = decide(asked, certified, why_not, check, agree)
    if confirmed is not None:
        transport.nvls = Nvls(confirmed, device, check, agree, request.check_every)
    return dataclasses.replace(facts, certified=certified, confirmed=confirmed, unconfirmed=reason)


def _why_apart(sync: StoreSync, device: torch.device) -> str:
    """Why these ranks cannot map each other's GPU memory, as far as that is known before it is tried; "" if unknown."""
    peer = this_process(-1, device)
    mine = [*peer.gpu.split(), peer.current, os.environ.get(_OVERLAPPING) == "1"]
    told = [json.loads(text) for text in sync.exchange(json.dumps(mine).encode())]
    hosts, gpus, numbers = ({each[i] for each in told} for i in range(3))
    if len(hosts) > 1:
        return f"the ranks live on {len(hosts)} hosts"
    if all(allowed for *_, allowed in told):
        return ""
    if len(gpus) < len(told):
        return f"several ranks share a GPU, which torch allows with {_OVERLAPPING}=1 only"
    if len(numbers) < len(told):  # torch knows GPUs by these
        return (
            f"each rank has a GPU of its own, but several know theirs by one number (CUDA_VISIBLE_DEVICES), and torch "
            f"takes that for one GPU: let every process see all GPUs of the host, or set {_OVERLAPPING}=1, which "
            f"leaves the NVLink switch out"
        )
    return ""
