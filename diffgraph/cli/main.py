"""`diffgraph COMMAND …`: finds the command and turns what is wrong with its input into one line and exit code 2."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from diffgraph.cli import bench, doctor, run, shapes
from diffgraph.cli.errors import UsageError
from diffgraph.errors import DiffgraphError

COMMANDS = {"doctor": doctor, "bench": bench, "run": run, "shapes": shapes}
BAD_INPUT = 2


class _Parser(argparse.ArgumentParser):
    """One line for bad input, not a page of usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {message}; see {self.prog} --help\n")


def parser() -> argparse.ArgumentParser:
    made = _Parser(prog="diffgraph", description="diffusers pipelines, faster where the GPU waits for Python.")
    commands = made.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        told = (command.__doc__ or "").splitlines()[0]
        command.add_arguments(commands.add_parser(name, help=told, description=command.__doc__, formatter_class=_Help))
    return made


class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Defaults beside the options, and descriptions as they were written."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, False, []) else super()._get_help_string(action)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0, done; 1, done and found wanting, or memory ran out; 2, bad input."""
    try:
        options = parser().parse_args(argv)
    except SystemExit as stop:  # argparse's way
        return int(stop.code or 0)
    try:
        return COMMANDS[options.command].run(options)
    except (UsageError, DiffgraphError) as error:
        print(f"diffgraph {options.command}: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_INPUT
    except BrokenPipeError:  # the reader of our output left: `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if type(error).__name__ != "OutOfMemoryError":
            raise
        print(f"diffgraph {options.command}: out of memory; try a smaller shape, or --dtype bfloat16", file=sys.stderr)
        return 1
