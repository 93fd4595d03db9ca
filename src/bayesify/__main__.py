"""`python -m bayesify` is the command `bayesify`."""

import sys

from bayesify.cli import main

if __name__ == "__main__":
    sys.exit(main())
