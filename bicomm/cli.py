"""The command line. Each command lives in a module of its own, which is imported when the command is called."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import typer

# Command: the module whose `app` it is, and one line of help.
COMMANDS = {
    "doctor": ("bicomm.doctor", "Show what this machine has, and which executor each mode would get."),
    "certify": ("bicomm.certify.cli", "Measure how this machine's NVLink switch adds, and keep the certificate."),
    "demo": ("bicomm.demo.command", "Combine an MoE layer's output on eight ranks, in every mode."),
}

_OPTIONS = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.callback(invoke_without_command=True)
def _bicomm(version: bool = typer.Option(False, "--version", help="Print the version and leave.")) -> None:
    """The MoE expert-parallel combine as a contract: the same bits in generation and in training."""
    if version:
        from bicomm import __version__

        print(__version__)
        raise typer.Exit


def _forward(name: str, module: str) -> Callable[[typer.Context], None]:
    def call(context: typer.Context) -> None:
        importlib.import_module(module).app(args=context.args, prog_name=f"bicomm {name}")

    return call


for _name, (_module, _help) in COMMANDS.items():
    # Whatever follows, --help too, is for the command itself.
    app.command(_name, help=_help, add_help_option=False, context_settings=_OPTIONS)(_forward(_name, _module))


def main() -> None:
    """The `bicomm` command."""
    app()
