"""`python -m tools.bridge`, for whoever starts bridges as children."""

from __future__ import annotations

import sys

from tools.cli import main

if __name__ == "__main__":
    sys.exit(main(["bridge", *sys.argv[1:]]))
