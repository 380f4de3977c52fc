"""The command line: `infinilm COMMAND`."""

from infinilm.cli.main import main

__all__ = ["main"]
