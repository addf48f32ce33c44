"""The secret key of a job, read from a file that the user names."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from doctor.cluster.transport.signing import Secret
from doctor.cluster.transport.store import DeadlineWorker
from doctor.core.errors import UnusableError

VARIABLE = "DOCTOR_SECRET_FILE"
LEAST, MOST = 16, 4096
"""Minimum and maximum bytes of a key; the minimum is 128 bits."""
SECONDS = 5.0
"""Timeout of the file system."""


def secret_from_environ(environ: Mapping[str, str]) -> Secret | None:
    """Return the key in the file that the environment names, or ``None`` if it names none.

    Raises:
        UnusableError: the file cannot be used; the message is one sentence.
    """
    named = environ.get(VARIABLE, "")
    if not named:
        return None
    worker = DeadlineWorker()
    try:
        return Secret(worker.run(lambda: _key_in(Path(named)), SECONDS), VARIABLE)
    except TimeoutError:
        raise UnusableError(f"cannot read {named} ({VARIABLE}): the file system does not respond") from None
    except OSError as error:
        raise UnusableError(f"cannot read {named} ({VARIABLE}): {error.strerror or error}") from None
    except ValueError as error:
        raise UnusableError(f"{named} ({VARIABLE}) is not used: {error}") from None
    finally:
        worker.close()


def _key_in(path: Path) -> bytes:
    """Read the key from a file, which may be a symbolic link.

    Secrets that Kubernetes mounts are links; permissions are checked on the opened file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as stream:
        _require_private(os.fstat(descriptor))
        key = stream.read(MOST + 1).rstrip(b"\r\n")
    if not LEAST <= len(key) <= MOST:
        size = f"more than {MOST}" if len(key) > MOST else len(key)
        raise ValueError(f"a key has {LEAST} to {MOST} bytes; this one has {size}")
    return key


def _require_private(seen: os.stat_result) -> None:
    """Raise ``ValueError`` unless only this user can read and write the file."""
    if not stat.S_ISREG(seen.st_mode):
        raise ValueError("it is not a regular file")
    if seen.st_uid != os.geteuid():
        raise ValueError(f"it belongs to uid {seen.st_uid}, and this process runs as uid {os.geteuid()}")
    if seen.st_mode & 0o077:
        raise ValueError(f"other users have access to it (mode {stat.S_IMODE(seen.st_mode):04o}): chmod 600")
