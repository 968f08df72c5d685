"""The measuring command: reads its arguments, takes the rows, prints a table.

Only torch and the standard library are needed, so that a bare GPU machine can run it as
`python -m solspark.bench`; rich draws the table where it is installed.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from solspark.bench.case import methods_of
from solspark.bench.console import print_table, table
from solspark.bench.problems import PROBLEMS
from solspark.bench.session import take_rows
from solspark.bench.settings import (
    LEVELS,
    SUBCOMMANDS,
    Settings,
    load_cases,
    parser,
    selected,
    settings_from,
)
from solspark.errors import SolsparkError


def main(argv: Sequence[str] | None = None, program: str = "python -m solspark.bench") -> int:
    """Run the harness.

    Args:
        argv: arguments; None takes the process's own.
        program: name in help texts.

    Returns:
        0; 1 when a gate of ours or of a baseline failed; 2 for a wrong argument.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in SUBCOMMANDS:
        module = importlib.import_module(SUBCOMMANDS[arguments[0]])
        return module.main(arguments[1:], program=f"{program} {arguments[0]}")
    parse = parser(program)
    options = parse.parse_args(arguments)
    try:
        if options.peers is not None:
            from solspark.bench.peers import add_peers

            add_peers(options.peers)
        load_cases()
        if options.list:
            _print_known()
            return 0
        settings = settings_from(options)
        for level in settings.levels:
            selected(level, settings)
        # What goes wrong inside a case becomes its row; the rest is about files and options.
        return run(settings)
    except (ValueError, OSError, SolsparkError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2


def run(settings: Settings) -> int:
    """Measure what the settings say, print a table, and return the exit code."""
    session = take_rows(settings)
    if session is None:
        return 130
    print_table(table(session.rows))
    return 1 if session.failed else 0


def _print_known() -> None:
    """Print problems and methods."""
    for problem in PROBLEMS.values():
        shape = f"[{problem.batch}, {problem.tokens}, {problem.heads}, {problem.head_dim}]"
        print(f"{problem.name:14} {shape:24} {problem.source}")
    for level in LEVELS:
        print(f"{level:9} {', '.join(methods_of(level))}")
