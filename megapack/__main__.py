"""Runs the command line for `python -m megapack`."""

import sys

from megapack.cli import main

sys.exit(main())
