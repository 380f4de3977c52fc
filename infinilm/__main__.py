"""`python -m infinilm` is the command `infinilm`."""

import sys

from infinilm.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
