"""Symmetric memory: buffers that every rank of a group has, of one size, and that the others can read.

Three back-ends: POSIX shared memory between processes (posix.py, shared.py), torch's symmetric memory between GPUs, and
a local world's buffers side by side on one of them (both in cuda.py). `SymmetricBuffer` hides which one it is.
arenas.py hands out places in it.
"""

from bicomm.symmem.buffer import ALIGNMENT, SymmetricBuffer, align

__all__ = ["ALIGNMENT", "SymmetricBuffer", "align"]
