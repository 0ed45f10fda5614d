"""Symmetric memory: buffers that every rank of a group has, of one size, and that the others can read.

Three back-ends: POSIX shared memory between processes (posix.py), torch's symmetric memory between GPUs (cuda.py), and
a local world of several ranks in one process (local.py). `SymmetricBuffer` hides which one it is.
"""

from bicomm.symmem.buffer import ALIGNMENT, SymmetricBuffer, align

__all__ = ["ALIGNMENT", "SymmetricBuffer", "align"]
