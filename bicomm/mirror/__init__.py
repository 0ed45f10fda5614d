"""The training mirror: the engine's combine, bit for bit, in a single process, with gradients.

A trainer must reproduce what its rollout engine computed, whatever its own layout is. `unpermute` sums expert rows
through the engine's tree (which engine rank made each row is data), `combine` sums gathered partials, and the contract
is the same object that the engine's executor names. See docs/mirror.md.
"""

from bicomm.mirror.describe import CANNOT_MIRROR, ContractMismatch, check, describe, differences, resolve
from bicomm.mirror.maps import (
    Placement,
    SlotMap,
    check_maps,
    inverse_map,
    order_of_slot,
    rank_of_slot,
    slots_of_routing_map,
)
from bicomm.mirror.ops import combine, permute, unpermute

__all__ = [
    "CANNOT_MIRROR",
    "ContractMismatch",
    "Placement",
    "SlotMap",
    "check",
    "check_maps",
    "combine",
    "describe",
    "differences",
    "inverse_map",
    "order_of_slot",
    "permute",
    "rank_of_slot",
    "resolve",
    "slots_of_routing_map",
    "unpermute",
]
