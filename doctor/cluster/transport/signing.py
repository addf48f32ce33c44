"""Signs the messages of this process and accepts only those signed with the same key.

The signature covers the name of a message and its bytes: a message cannot be moved to another name. An earlier one can
be replayed under the same name; the names of a gather begin with its random nonce. Withholding and removing messages
cannot be prevented: whatever serves the store can always do so.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable

from doctor.cluster.transport.store import StoreBackend

SIGNED = b"\xc1rankdoctor\x01"
"""Prefix of a signature. 0xc1 is never used in MessagePack, so a process without a key cannot decode the message."""
_DIGEST = hashlib.sha256().digest_size
LARGEST = 64 << 20
"""Bytes of a message: longer ones are ignored."""
MOST_COUNTED = 1 << 16


class Secret:
    """Secret key of the processes of this job; ``source`` names its origin for a sentence."""

    def __init__(self, key: bytes, source: str) -> None:
        self._key = key
        self.source = source

    def __repr__(self) -> str:
        """Return a representation without the key."""
        return f"Secret({self.source!r})"

    def signer(self, run: str) -> Callable[[str, bytes], bytes]:
        """Return a function that signs a message by its name in the store of that run."""
        key = hmac.digest(self._key, b"rankdoctor messages\0" + run.encode(), "sha256")

        def sign(name: str, data: bytes) -> bytes:
            head = name.encode("utf-8", "surrogateescape")
            return hmac.digest(key, len(head).to_bytes(4, "big") + head + data, "sha256")

        return sign


class RejectedMessages:
    """Messages that could not be authenticated, each counted once however often it is read."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()
        self.kept: set[str] = set()
        """Names of the messages of which the latest is kept."""
        self.is_signed = False
        """Whether one of them was signed and this process has no key."""
        self.latest: dict[str, bytes] = {}
        """Latest message of the kept names, without its signature."""

    @property
    def count(self) -> int:
        """Number of messages."""
        return len(self._seen)

    def note(self, name: str, data: bytes) -> None:
        """Count a message with that name."""
        if name in self.kept:
            self.latest[name] = data[len(SIGNED) + _DIGEST :] if data.startswith(SIGNED) else data
        if len(self._seen) < MOST_COUNTED:
            self._seen.add(hashlib.sha256(name.encode("utf-8", "surrogateescape") + b"\0" + data).digest()[:12])

    @property
    def warning(self) -> str:
        """Warning for the user; empty if there is no such message."""
        if not self._seen:
            return ""
        messages = "1 message" if self.count == 1 else f"{self.count} messages"
        why = "could not be authenticated and were ignored"
        if self.is_signed:
            why = "of other ranks ignored: they are signed, and this rank has no key"
        return f"{messages} {why}. Give every rank of the job the same DOCTOR_SECRET_FILE."


class SignedBackend:
    """Store backend that signs and verifies messages.

    See :class:`doctor.cluster.transport.store.StoreBackend`. ``run`` identifies the store within its backend. Without a
    ``secret`` nothing is signed, and signed messages of others are ignored.
    """

    def __init__(self, backend: StoreBackend, run: str, secret: Secret | None, rejected: RejectedMessages) -> None:
        self.description = backend.description
        self.survives_coordinator = backend.survives_coordinator

        self._backend = backend
        self._sign = secret.signer(run) if secret is not None else None
        self._rejected = rejected

    def set(self, name: str, data: bytes) -> None:
        """Write it signed."""
        self._backend.set(name, self._sealed(name, data))

    def get(self, name: str) -> bytes | None:
        """Return the value of ``name`` if it is authentic."""
        data = self._backend.get(name)
        return None if data is None else self._opened(name, data)

    def exchange(self, name: str, old: bytes | None, new: bytes) -> bool:
        """Write ``new`` if the value is ``old``; a value that is not authentic counts as ``None``."""
        standing = self._backend.get(name)
        if (None if standing is None else self._opened(name, standing)) != old:
            return False
        return self._backend.exchange(name, standing, self._sealed(name, new))

    def append(self, name: str, data: bytes) -> None:
        """Append it signed."""
        self._backend.append(name, self._sealed(name, data))

    def fetch(self, name: str, mark: object) -> tuple[list[bytes], object]:
        """Return the authentic entries."""
        entries, mark = self._backend.fetch(name, mark)
        opened = (self._opened(name, data) for data in entries)
        return [data for data in opened if data is not None], mark

    def clear(self, name: str) -> None:
        """Clear the backend."""
        self._backend.clear(name)

    def close(self) -> None:
        """Close the backend."""
        self._backend.close()

    def _sealed(self, name: str, data: bytes) -> bytes:
        return data if self._sign is None else SIGNED + self._sign(name, data) + data

    def _opened(self, name: str, data: bytes) -> bytes | None:
        if self._sign is None:
            if not data.startswith(SIGNED):
                return data if len(data) <= LARGEST else None
            self._rejected.is_signed = True
        elif data.startswith(SIGNED) and len(data) <= LARGEST:
            start = len(SIGNED) + _DIGEST
            if hmac.compare_digest(data[len(SIGNED) : start], self._sign(name, data[start:])):
                return data[start:]
        self._rejected.note(name, data)
        return None
