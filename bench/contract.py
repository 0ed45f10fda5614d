"""Time of the contract functions as the CPU executor: 8 x 4096 x 2048 fp32, one thread; JSON in bench/results.

    python bench/contract.py [--repeat 3]

`normal` is torch.randn; `hard` has exponents spread over +-60 binades, so that every element needs several slices.
`exact` has bounds, 0.6 s on normal and 1.5 s on hard data: the exit code is 1 where it is slower.
"""

from __future__ import annotations

import argparse
import statistics
import time

import common
import torch

from bicomm.contract import EXACT, FP64, GB200_WINDOW, ORDERED

W, T, H = 8, 4096, 2048
BOUNDS = {("exact/1", "normal"): 0.6, ("exact/1", "hard"): 1.5}


def data(kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(W, T, H, generator=generator)
    if kind == "hard":
        x = torch.ldexp(x, torch.randint(-60, 61, x.shape, generator=generator).to(torch.float32))
    return x


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=common.positive, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for kind in ("normal", "hard"):
        x = data(kind)
        for contract in (ORDERED, FP64, EXACT, GB200_WINDOW):
            contract.sum(x[:, :64])
            seconds = []
            for _ in range(arguments.repeat):
                start = time.perf_counter()
                contract.sum(x)
                seconds.append(time.perf_counter() - start)
            bound = BOUNDS.get((contract.id, kind))
            rows.append({"contract": contract.id, "data": kind, "seconds": statistics.median(seconds), "bound": bound})
    common.save("contract", rows, shape=[W, T, H], threads=1)
    common.table(f"contract functions on one thread, {W} x {T} x {H}", rows)
    return int(any(row["bound"] is not None and row["seconds"] > row["bound"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
