"""``python -m kvscout``: the command line from a bare checkout."""

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main())
