"""The command line: ``python -m pyop3_mlir COMMAND``.

Commands only read arguments and print; what they do lives in the modules that they call.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console

from pyop3_mlir import __version__
from pyop3_mlir.errors import Pyop3MlirError
from pyop3_mlir.options import Options, configure_logging

__all__ = ["app", "main"]

app = typer.Typer(
    name="pyop3_mlir",
    help=__doc__.splitlines()[0] if __doc__ else None,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and stop."
        ),
    ] = False,
) -> None:
    """Parallel loops over meshes, lowered to MLIR with xDSL and run by IREE."""
    configure_logging(Options.resolve())


def main() -> None:
    """Run the command that ``sys.argv`` names; errors of this package become one line."""
    try:
        app()
    except Pyop3MlirError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {error}", highlight=False)
        sys.exit(1)
