"""The command line: `infinilm generate | chat | bench | info | plan`."""

from infinilm.cli.main import main

__all__ = ["main"]
