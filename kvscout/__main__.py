"""``python -m kvscout``: the command line from a bare checkout."""

import sys

if __name__ == "__main__":
    try:
        from .cli.main import main
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(main())
