"""`python -m infinilm` is the command `infinilm`."""

import sys


def run() -> int:
    """Run the command line; returns the exit code, also of a Ctrl-C that comes before there is anything to stop."""
    try:
        from infinilm.cli.main import main

        return main()
    except KeyboardInterrupt:
        return 130
    except ImportError as error:
        if error.name:  # a module that is missing, or that cannot be loaded
            raise
        print(f"infinilm: {error}", file=sys.stderr)  # a source tree, which says so
        return 1


if __name__ == "__main__":
    sys.exit(run())
