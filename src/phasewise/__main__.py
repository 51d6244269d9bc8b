"""python -m phasewise: the command line."""

import sys

from phasewise.cli import main

if __name__ == "__main__":
    sys.exit(main())
