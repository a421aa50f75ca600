"""Runs the worker process of one model."""

import sys

from .worker import main

if __name__ == "__main__":
    sys.exit(main())
