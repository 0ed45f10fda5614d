"""What this machine is and has, as far as a combine cares. It only asks: nothing is allocated, set or sent."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from bicomm import capability

# What it does to bits, or to which path runs.
VARIABLES = {
    "CUBLAS_WORKSPACE_CONFIG": "cuBLAS splits K or not, by the space it gets",
    "CUBLASLT_WORKSPACE_SIZE": "the same for cuBLASLt, in KiB",
    "DISABLE_ADDMM_CUDA_LT": "biased products go to cuBLAS instead of cuBLASLt",
    "NVIDIA_TF32_OVERRIDE": "0 forbids TF32 in all of NVIDIA's libraries",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1 allows TF32 in fp32 products",
    "TRITON_F32_DEFAULT": "the default precision of fp32 tl.dot",
    "TRITON_DEFAULT_FP_FUSION": "whether Triton may contract a * b + c where a launch does not say",
    "TRITON_INTERPRET": "1 runs Triton kernels in Python, on the CPU",
    "NCCL_ALGO": "the order in which NCCL adds",
    "NCCL_PROTO": "the same",
    "NCCL_NVLS_ENABLE": "0 keeps NCCL's sums out of the NVLink switch",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1 keeps torch from making multicast memory",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1 lets ranks that share a GPU share memory",
    "OMP_NUM_THREADS": "CPU sums and products split by thread",
    "MKL_NUM_THREADS": "the same for MKL",
    "MKL_CBWR": "MKL's reproducible mode",
    "ATEN_CPU_CAPABILITY": "the instruction set of torch's CPU kernels",
    "BICOMM_TIMEOUT": "seconds that bicomm waits for a rank",
}
_SOCKET_LIMIT = 107  # bytes in a unix socket's path, of which torch's symmetric memory adds its own name:
_SOCKET_NAME = len("/symm_mem-4194304")


def versions() -> dict[str, str]:
    """Versions of what a combine stands on; "" for what is not there."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda or ""}
    for name in ("triton", "numpy", "mpi4py", "cuda-python"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else ""
    found["mpi"] = _mpi()
    found["driver"] = _driver()
    return found


def _mpi() -> str:
    """The first line of `mpirun --version`, of this Python's own mpirun if it has one."""
    beside = Path(sys.executable).parent / "mpirun"
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    return _first_line(mpirun, "--version") if mpirun else ""


def _driver() -> str:
    try:
        match = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", Path("/proc/driver/nvidia/version").read_text())
    except OSError:  # some containers hide it
        return _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return match[0] if match else ""


def _first_line(*command: str) -> str:
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return next(iter(told.splitlines()), "").strip()


def gpus() -> list[dict[str, Any]]:
    """Name, compute capability, memory and multicast of each GPU; `multicast` is "" or the reason why there is none."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    alone = "there is one GPU, and a switch adds across several" if count == 1 else ""
    found = []
    for index in range(count):
        of = torch.cuda.get_device_properties(index)
        found.append(
            {
                "index": index,
                "name": of.name,
                "capability": f"{of.major}.{of.minor}",
                "memory_gib": round(of.total_memory / 2**30, 1),
                "multicast": capability.reason(index) or alone,
            }
        )
    return found


def peer_access() -> list[list[bool]]:
    """[i][j]: can GPU i read the memory of GPU j?"""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [[i == j or torch.cuda.can_device_access_peer(i, j) for j in range(count)] for i in range(count)]


def shared_memory(path: str = "/dev/shm") -> dict[str, Any]:
    """Size and free bytes of the memory that processes of this host share; `problem` is "" or why it cannot be used."""
    try:
        of = os.statvfs(path)
    except OSError as error:
        return {"path": path, "size": 0, "free": 0, "problem": str(error)}
    writable = os.access(path, os.W_OK | os.X_OK)
    size, free = of.f_frsize * of.f_blocks, of.f_frsize * of.f_bavail
    return {"path": path, "size": size, "free": free, "problem": "" if writable else f"{path} is not writable"}


def sockets() -> dict[str, Any]:
    """Is the path of temporary files short enough for the unix sockets of torch's symmetric memory?"""
    folder = tempfile.gettempdir()
    length, limit = len(os.fsencode(folder)), _SOCKET_LIMIT - _SOCKET_NAME
    problem = f"{length} bytes, at most {limit} work: set a shorter TMPDIR" if length > limit else ""
    return {"tmpdir": folder, "length": length, "limit": limit, "problem": problem}


def file_handles() -> str:
    """Why processes cannot pass file handles by pidfd_getfd, as torch's symmetric memory does; "" if they can."""
    import ctypes

    if not hasattr(os, "pidfd_open"):
        return "this Python has no pidfd_open"
    try:
        own = os.pidfd_open(os.getpid())
    except OSError as error:
        return f"pidfd_open: {error.strerror}"
    probe = socket.socket()
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        got = libc.syscall(438, own, probe.fileno(), 0)  # pidfd_getfd has one number on all processors
        if got < 0:
            return f"pidfd_getfd: {os.strerror(ctypes.get_errno())} (a container needs --cap-add=SYS_PTRACE)"
        os.close(got)
        return ""
    finally:
        probe.close()
        os.close(own)


def variables() -> dict[str, str]:
    """Those of VARIABLES that are set."""
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


def number_settings() -> dict[str, Any]:
    """How this process computes, as far as torch says it."""
    subnormal = torch.tensor([1e-40], dtype=torch.float32, device="cpu") * 1.0
    return {
        "flush_denormal": bool((subnormal == 0).all()),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "bf16_reduced_precision_reduction": bool(torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
    }


def host() -> dict[str, Any]:
    """The host's system, processor and cores."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), "")
    except OSError:
        processor = ""
    return {
        "system": platform.platform(),
        "processor": processor or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
    }
