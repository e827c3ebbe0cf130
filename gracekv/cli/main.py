"""The `gracekv` console command: checks its extra, then runs `gracekv.cli.commands`."""

from __future__ import annotations

import io
import os
import sys

from gracekv.errors import GracekvError, required


def main() -> None:
    """Run the command line; errors of gracekv print their message and exit with status 2."""
    # An answer may hold characters that the output's encoding lacks.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    # Questions from a file or pipe are UTF-8, as other files are.
    if isinstance(sys.stdin, io.TextIOWrapper) and not sys.stdin.isatty():
        sys.stdin.reconfigure(encoding="utf-8-sig", errors="strict")
    try:
        for package in ("typer", "rich"):
            required(package, "cli")
        from gracekv.cli import evaluate_commands, saved_commands
        from gracekv.cli.commands import app

        saved_commands.register(app)
        evaluate_commands.register(app)
        app(prog_name="gracekv")
    except GracekvError as error:
        _fail(f"{type(error).__name__}: {error}")
    except OSError as error:
        # Errors of files name the file; a failed write to stdout has no name.
        if error.errno is None or error.filename is not None:
            raise
        # Python flushes stdout again when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        _fail(f"The output cannot be written: {error.strerror}.")


def _fail(message: str) -> None:
    print(message, file=sys.stderr)
    raise SystemExit(2)
