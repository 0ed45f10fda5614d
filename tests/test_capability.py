"""Why the switch cannot add here: every no has its reason, and the owner's switches are honoured."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

from bicomm import capability
from bicomm.capability import Facts, multicast_reason, multicast_refusal, switched_off

YES = Facts(multicast=True, handles=True, driver=13000, state="completed", cluster="00", clique="0")


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({}, ""),
        ({"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}, "TORCH_SYMM_MEM_DISABLE_MULTICAST=1 is set"),
        ({"TORCH_SYMM_MEM_DISABLE_MULTICAST": "true"}, "TORCH_SYMM_MEM_DISABLE_MULTICAST=true is set"),
        ({"TORCH_SYMM_MEM_DISABLE_MULTICAST": "0"}, ""),
        ({"TORCH_SYMM_MEM_DISABLE_MULTICAST": ""}, ""),
        ({"NVSHMEM_DISABLE_NVLS": "1"}, "NVSHMEM_DISABLE_NVLS=1 is set"),
        ({"NVSHMEM_DISABLE_NVLS": "0"}, ""),
        ({"NCCL_NVLS_ENABLE": "0"}, "NCCL_NVLS_ENABLE=0 is set"),
        ({"NCCL_NVLS_ENABLE": " 0 "}, "NCCL_NVLS_ENABLE=0 is set"),
        ({"NCCL_NVLS_ENABLE": "1"}, ""),
        ({"NCCL_NVLS_ENABLE": "2"}, ""),
        (
            {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"},
            "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 is set",
        ),
    ],
)
def test_the_owners_switches(environment: dict[str, str], says: str) -> None:
    assert switched_off(environment) == says
    assert multicast_reason((9, 0), YES, environment) == says


@pytest.mark.parametrize(
    ("compute", "facts", "says"),
    [
        ((9, 0), YES, ""),
        ((10, 3), YES, ""),
        ((8, 0), YES, "needs compute capability 9.0 or higher, this GPU has 8.0"),
        ((9, 0), Facts(multicast=False), "the driver says no: no NVSwitch"),
        ((9, 0), Facts(multicast=True, state="in_progress"), "the NVLink fabric is not up (state in_progress)"),
        ((9, 0), Facts(multicast=True, state="not_started"), "is the fabric manager running?"),
        ((9, 0), Facts(multicast=True, state="not_supported"), ""),  # of a machine that needs no fabric manager
        ((9, 0), Facts(), ""),  # nobody can ask: the multicast address decides
    ],
)
def test_reasons(compute: tuple[int, int], facts: Facts, says: str) -> None:
    told = multicast_reason(compute, facts, {})
    assert says in told
    assert bool(told) == bool(says)


def test_the_address_decides_last(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setattr(capability, "reason", lambda index: "")
    assert multicast_refusal(4096, device) == ""
    assert "multicast_ptr is 0" in multicast_refusal(0, device)
    monkeypatch.setattr(capability, "reason", lambda index: "NCCL_NVLS_ENABLE=0 is set")
    assert multicast_refusal(4096, device) == multicast_refusal(0, device) == "NCCL_NVLS_ENABLE=0 is set"
    assert multicast_refusal(4096, torch.device("cpu")) == "the ranks work on CPUs"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu() -> None:
    assert capability.reason(0) == "torch sees no GPU"


class FakeDriver(types.ModuleType):
    """The four calls of cuda-python that are used, with a result for each attribute."""

    class CUdevice_attribute:
        CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED = 132
        CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED = 128

    def __init__(self, failing: str = "") -> None:
        super().__init__("cuda.bindings.driver")
        self.failing = failing
        self.asked: list[str] = []

    def _answer(self, name: str, *values: int) -> tuple[int, ...]:
        self.asked.append(name)
        return (999 if name == self.failing else 0, *values)

    def cuInit(self, flags: int) -> Any:
        return self._answer("cuInit")

    def cuDeviceGet(self, index: int) -> Any:
        return self._answer("cuDeviceGet", index)

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> Any:
        return self._answer("cuDeviceGetAttribute", int(attribute == 132))

    def cuDriverGetVersion(self) -> Any:
        return self._answer("cuDriverGetVersion", 13000)


class NvmlError(Exception):
    """As NVML's: it derives from Exception alone."""


NvmlError.__module__ = "cuda.bindings.nvml"


class FakeNvml(types.ModuleType):
    class GpuFabricState:
        def __init__(self, value: int) -> None:
            self.name = ("NOT_SUPPORTED", "NOT_STARTED", "IN_PROGRESS", "COMPLETED")[value]

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__("cuda.bindings.nvml")
        self.error, self.open = error, 0

    def init_v2(self) -> None:
        self.open += 1

    def shutdown(self) -> None:
        self.open -= 1

    def device_get_handle_by_uuid(self, uuid: str) -> int:
        assert uuid == "GPU-1234"
        return 7

    def device_get_gpu_fabric_info_v(self, handle: int) -> Any:
        if self.error:
            raise self.error
        return types.SimpleNamespace(state=3, cluster_uuid=bytes(range(16)), clique_id=5)


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(driver: types.ModuleType | None, nvml: types.ModuleType | None) -> None:
        cuda, bindings = types.ModuleType("cuda"), types.ModuleType("cuda.bindings")
        cuda.bindings = bindings  # type: ignore[attr-defined]
        for name, module in (("driver", driver), ("nvml", nvml)):
            if module is not None:
                setattr(bindings, name, module)
            monkeypatch.setitem(sys.modules, f"cuda.bindings.{name}", module)
        monkeypatch.setitem(sys.modules, "cuda", cuda)
        monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
        of = types.SimpleNamespace(uuid="1234", name="NVIDIA H200", major=9, minor=0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: of)

    return install


def test_the_driver_is_asked_for_attributes_only(fake_cuda: Any) -> None:
    driver, nvml = FakeDriver(), FakeNvml()
    fake_cuda(driver, nvml)
    known = capability.facts(0)
    assert known == Facts(True, False, 13000, "completed", "000102030405060708090a0b0c0d0e0f", "5")
    assert set(driver.asked) == {"cuInit", "cuDeviceGet", "cuDeviceGetAttribute", "cuDriverGetVersion"}
    assert nvml.open == 0
    told = capability.identity(0)
    assert told["uuid"] == "1234"
    assert (told["driver"], told["fabric"], told["clique"]) == ("13000", "completed", "5")
    assert all(isinstance(value, str) for value in told.values())


def test_an_unwilling_or_missing_driver_is_no_error(fake_cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capability, "_by_torch", lambda index: None)
    nvml = FakeNvml(NvmlError("Not Supported"))
    fake_cuda(FakeDriver(failing="cuDeviceGetAttribute"), nvml)
    assert capability.facts(0) == Facts()
    assert nvml.open == 0
    fake_cuda(None, None)  # an import of them raises ImportError
    assert capability.facts(0) == Facts()
    monkeypatch.setattr(capability, "_by_torch", lambda index: False)
    assert capability.facts(0) == Facts(multicast=False)


def test_other_errors_are_not_hidden(fake_cuda: Any) -> None:
    fake_cuda(FakeDriver(), FakeNvml(KeyError("a fault of ours")))
    with pytest.raises(KeyError):
        capability.facts(0)
