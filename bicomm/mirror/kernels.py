"""The mirror on a GPU: what ops.py calls where a tensor is on one. Importing this imports Triton."""

from bicomm.mirror.backward import backward
from bicomm.mirror.forward import unpermute
from bicomm.mirror.sort import sort_slots

__all__ = ["backward", "sort_slots", "unpermute"]
