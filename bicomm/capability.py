"""Can the NVLink switch add for this GPU, and if not, why? Attributes are read; no multicast object is ever made here.

Every "no" is a text that `plan()`, `doctor` and exceptions show; "" means that nothing speaks against it.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import torch

# Switches by which an owner forbids multicast on a machine, and the values that mean "off". All of them are honoured:
# who turns NVLS off for one library does it because of the fabric, not because of the library.
SWITCHES: dict[str, str] = {
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "set",
    "NVSHMEM_DISABLE_NVLS": "set",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "set",  # no wish of the owner's, but torch makes no multicast under it
}
NEEDED = (9, 0)  # compute capability of multimem instructions


@dataclasses.dataclass(frozen=True)
class Facts:
    """What the driver says of one GPU. None: neither cuda-python nor torch can ask.

    multicast   CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED: an NVSwitch, a running fabric manager, and access to both.
    handles     CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED: memory can be shared beyond this host.
    driver      the newest CUDA version that the driver supports, as 13000 for 13.0.
    state       of the fabric, by NVML: "completed", "in_progress", "not_started", "not_supported".
    cluster, clique  the NVLink domain, by NVML.
    """

    multicast: bool | None = None
    handles: bool | None = None
    driver: int | None = None
    state: str | None = None
    cluster: str | None = None
    clique: str | None = None


def switched_off(environment: Mapping[str, str] = os.environ) -> str:
    """Which environment variable forbids multicast; "" if none does."""
    for name, value in SWITCHES.items():
        given = environment.get(name, "").strip()
        if (value == "set" and given not in ("", "0")) or (value != "set" and given == value):
            return f"{name}={given} is set"
    return ""


def multicast_reason(capability: tuple[int, int], facts: Facts, environment: Mapping[str, str] = os.environ) -> str:
    """Why a GPU of this compute capability, of which the driver says this, cannot take part in multicast."""
    if capability < NEEDED:
        return f"multimem needs compute capability 9.0 or higher, this GPU has {capability[0]}.{capability[1]}"
    off = switched_off(environment)
    if off:
        return off
    if facts.state in ("not_started", "in_progress"):
        return f"the NVLink fabric is not up (state {facts.state}): is the fabric manager running?"
    if facts.multicast is False:
        return "the driver says no: no NVSwitch, no running fabric manager, MIG, or a container or VM that hides it"
    return ""


def reason(index: int) -> str:
    """Why GPU `index` of this process cannot take part in multicast, as far as attributes tell."""
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    return multicast_reason(torch.cuda.get_device_capability(index), facts(index))


def multicast_refusal(address: int, device: torch.device) -> str:
    """The same once memory is shared: `address` is the buffer's multicast address (`handle.multicast_ptr`), or 0."""
    if device.type != "cuda":
        return "the ranks work on CPUs"
    known = reason(torch.cuda.current_device() if device.index is None else device.index)
    if known or address:
        return known
    return (
        "torch's symmetric memory has no multicast address (multicast_ptr is 0): no NVSwitch between these GPUs, no "
        "multicast slot left, a fabric manager that does not run, or a container that hides it"
    )


def facts(index: int) -> Facts:
    """Ask the driver about GPU `index` of this process. Nothing is allocated. Most of it needs cuda-python."""
    state, cluster, clique = _of_fabric(index)
    return dataclasses.replace(_of_driver(index), state=state, cluster=cluster, clique=clique)


def _of_driver(index: int) -> Facts:
    try:
        from cuda.bindings import driver

        def value(result: tuple[Any, ...]) -> int:
            if int(result[0]):
                raise RuntimeError(f"the driver answers {result[0]}")
            return int(result[1]) if len(result) > 1 else 0

        value(driver.cuInit(0))
        device = driver.cuDeviceGet(index)[1]
        names = driver.CUdevice_attribute
        multicast = driver.cuDeviceGetAttribute(names.CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED, device)
        handles = driver.cuDeviceGetAttribute(names.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED, device)
        return Facts(bool(value(multicast)), bool(value(handles)), value(driver.cuDriverGetVersion()))
    except (ImportError, AttributeError, RuntimeError):
        return Facts(multicast=_by_torch(index))


def _by_torch(index: int) -> bool | None:
    try:
        from torch._C._autograd import DeviceType
        from torch._C._distributed_c10d import _SymmetricMemory

        return bool(_SymmetricMemory.has_multicast_support(DeviceType.CUDA, index))
    except (ImportError, AttributeError, RuntimeError):
        return None


def _of_fabric(index: int) -> tuple[str | None, str | None, str | None]:
    """State, cluster and clique by NVML, which newer cuda-python carries; None where it cannot say."""
    unknown = (None, None, None)
    try:
        from cuda.bindings import nvml

        nvml.init_v2()
        try:
            handle = nvml.device_get_handle_by_uuid(f"GPU-{torch.cuda.get_device_properties(index).uuid}")
            info = nvml.device_get_gpu_fabric_info_v(handle)
            state = nvml.GpuFabricState(int(info.state)).name.lower()
            return state, bytes(info.cluster_uuid).hex(), str(int(info.clique_id))
        finally:
            nvml.shutdown()
    except (ImportError, AttributeError, RuntimeError, ValueError, TypeError):
        return unknown
    except Exception as error:
        if type(error).__module__.startswith("cuda.bindings"):  # NVML's own errors derive from Exception alone
            return unknown
        raise


def identity(index: int) -> dict[str, str]:
    """What a certificate binds a GPU by: which one it is, in which fabric, under which driver."""
    of = torch.cuda.get_device_properties(index)
    known = facts(index)
    return {
        "uuid": str(of.uuid),
        "name": of.name,
        "capability": f"{of.major}.{of.minor}",
        "driver": "" if known.driver is None else str(known.driver),
        "release": _release(),
        "fabric": known.state or "",
        "cluster": known.cluster or "",
        "clique": known.clique or "",
    }


def _release() -> str:
    """The driver's release, as 580.159.03; "" where the kernel module does not tell it."""
    try:
        with open("/proc/driver/nvidia/version") as file:
            words = file.readline().split()
    except OSError:
        return ""
    return next((word for word in words if word[:3].isdigit() and "." in word), "")
