"""Tells torchrun that the process has reported the error that ends it, so that its end need not be observed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""The variable with the path of a file that torchrun reads; each rank and attempt has a folder for it."""
_NAME = "rankdoctor-reported"


def note_report(environ: Mapping[str, str] = os.environ) -> None:
    """Leave a mark beside the file that torchrun reads."""
    path = environ.get(ERROR_FILE)
    if path:
        with suppress(OSError):
            Path(path).with_name(_NAME).touch()


def is_noted(error_file: str) -> bool:
    """Return whether the process with this file has left its mark."""
    return bool(error_file) and Path(error_file).with_name(_NAME).exists()
