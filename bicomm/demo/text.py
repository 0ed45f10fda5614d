"""Tokens from real text: the bytes of this project's licence, embedded with seeded tables."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import torch
from torch import Tensor

from bicomm.demo.layer import in_tiles, weights

CONTEXT = 8  # bytes that a token sees: itself and those before it


def licence() -> bytes:
    """The text of the licence, from the repository or from the installed package; runs of blanks made one.

    Raises FileNotFoundError where neither has it.
    """
    beside = Path(__file__).resolve().parents[2] / "LICENSE"
    text = beside.read_text() if beside.is_file() else None
    if text is None:
        try:
            text = importlib.metadata.distribution("bicomm").read_text("licenses/LICENSE")
        except importlib.metadata.PackageNotFoundError:
            text = None
    if text is None:
        raise FileNotFoundError(
            f"the demo's text is bicomm's licence, and neither {beside} nor the installed package has it"
        )
    return " ".join(text.split()).encode()


def embed(text: bytes, tokens: int, hidden: int, seed: int, device: torch.device) -> Tensor:
    """The first `tokens` bytes of a text (again from its start where it ends) as fp32 [tokens, hidden], RMS 1.

    A token is the sum of seeded vectors, one for each of the eight bytes that end in it: what it is does not depend on
    the batch that it will be in.
    """
    wound = [text[i % len(text)] for i in range(-CONTEXT + 1, tokens)]
    bytes_ = torch.tensor(wound, dtype=torch.int64, device=device)
    x = torch.zeros(tokens, hidden, dtype=torch.float32, device=device)
    for back in range(CONTEXT):
        table = weights((256, hidden), 1, seed + back, device)
        x += table[bytes_[CONTEXT - 1 - back : CONTEXT - 1 - back + tokens]] * 0.5**back
    return in_tiles(lambda tile: tile * torch.rsqrt(tile.square().mean(1, keepdim=True) + 1e-6), x)
