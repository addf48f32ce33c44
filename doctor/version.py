"""The release of the distribution, and where its package is installed."""

import os

__version__ = "0.1.0"
PACKAGE = os.path.dirname(__file__)  # noqa: PTH120 - pathlib is not loaded
"""The folder of the package."""
