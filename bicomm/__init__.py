"""bicomm: expert-parallel combine whose bits are a written contract, in generation and in training.

import bicomm
bicomm.init()                                  # from torchrun, mpirun, Slurm, an mpi4py communicator or a process group
out = bicomm.combine(x, mode="exact")          # fp32 [sum(splits), hidden] -> [splits[rank], hidden]
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bicomm import mirror as mirror
    from bicomm.communicator import Communicator as Communicator
    from bicomm.contract import Contract as Contract
    from bicomm.contract import Partial as Partial
    from bicomm.errors import Aborted as Aborted
    from bicomm.errors import BicommError as BicommError
    from bicomm.errors import CallMismatch as CallMismatch
    from bicomm.errors import CaptureError as CaptureError
    from bicomm.errors import LaunchError as LaunchError
    from bicomm.errors import NoRoom as NoRoom
    from bicomm.errors import NoSharedMemory as NoSharedMemory
    from bicomm.errors import NotInitialized as NotInitialized
    from bicomm.errors import PeerRefused as PeerRefused
    from bicomm.errors import PeerTimeout as PeerTimeout
    from bicomm.front import combine as combine
    from bicomm.front import combine_rows as combine_rows
    from bicomm.front import default_communicator as default_communicator
    from bicomm.front import dispatch as dispatch
    from bicomm.local import local_world as local_world
    from bicomm.mirror import ContractMismatch as ContractMismatch
    from bicomm.operators.ops import save_collectives as save_collectives
    from bicomm.presets import PRESETS as PRESETS
    from bicomm.world import init as init
    from bicomm.world import shutdown as shutdown

__version__ = "0.1.0"

# Names are imported when they are first used: `import bicomm` then adds little to torch's own import, and no kernel
# module is loaded on a machine that never launches one.
_HOME = {
    "Communicator": "communicator",
    "Contract": "contract",
    "Partial": "contract",
    "Aborted": "errors",
    "BicommError": "errors",
    "CallMismatch": "errors",
    "CaptureError": "errors",
    "ContractMismatch": "mirror",
    "LaunchError": "errors",
    "NoRoom": "errors",
    "NoSharedMemory": "errors",
    "NotInitialized": "errors",
    "PeerRefused": "errors",
    "PeerTimeout": "errors",
    "combine": "front",
    "combine_rows": "front",
    "default_communicator": "front",
    "dispatch": "front",
    "local_world": "local",
    "save_collectives": "operators.ops",
    "PRESETS": "presets",
    "init": "world",
    "shutdown": "world",
}

__all__ = [*_HOME, "mirror"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(f"bicomm.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    if name in ("mirror", "contract", "presets", "errors"):
        return importlib.import_module(f"bicomm.{name}")
    raise AttributeError(f"module 'bicomm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
