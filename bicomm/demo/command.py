"""`bicomm demo`: the demo on ranks of its own, or as one rank where a launcher has started this process."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def demo(context: typer.Context, ranks: Annotated[int, typer.Option(min=1, help="Ranks to start.")] = 8) -> None:
    """Combine an MoE layer's output on every rank in every mode, and count the bits that differ."""
    from bicomm.ranks.launchers import detect

    if ranks > 1 and "--help" not in context.args and detect(os.environ).launcher == "alone":
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # the ranks share the cores
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        os.execv(sys.executable, [sys.executable, *torchrun, "-m", "bicomm.demo", *context.args])
    from bicomm.demo.run import main

    sys.argv = ["bicomm demo", *context.args]
    main()
