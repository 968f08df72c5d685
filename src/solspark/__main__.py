"""Run the command line: `python -m solspark`."""

from .cli import main

main()
