"""Pieces of models that engines and trainers hook in: a router whose rows see no batch, deterministic losses.

Importing this package imports nothing else; each module is loaded when it is first named.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any


def __getattr__(name: str) -> Any:
    if any(module.name == name for module in pkgutil.iter_modules(__path__)):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
