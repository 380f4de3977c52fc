"""`python -m infinilm` is the command `infinilm`."""

import sys

from infinilm.cli.main import main

if __name__ == "__main__":
    try:
        sys.exit(main())
    except ImportError as error:
        if error.name:  # a module that is missing, or that cannot be loaded
            raise
        sys.exit(f"infinilm: {error}")  # a source tree, which says so
