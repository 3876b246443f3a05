"""`python -m tokamax`: the command line without an installed script."""

import sys

from tokamax._src.tools import cli

if __name__ == "__main__":
    sys.exit(cli.main())
