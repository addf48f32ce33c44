"""Announces a leader in a store, follows its announcements, and acknowledges its outcome."""

from __future__ import annotations

from doctor.cluster.membership.protocol import JOIN_REQUESTS, JoinRequest, LeaderAnnouncement
from doctor.cluster.transport.codec import decode_or_none, encode
from doctor.cluster.transport.failover import Store
from doctor.cluster.transport.signing import RejectedMessages


class Leadership:
    """The ``announcement`` of this process under one ``key`` of a store."""

    def __init__(self, store: Store, key: str, announcement: LeaderAnnouncement) -> None:
        self._store = store
        self._key = key
        self._announcement = encode(announcement)

    def announce(self) -> None:
        """Announce it, replacing any other announcement."""
        self._store.set(self._key, self._announcement)

    def take_over(self, after: bytes | None) -> bool:
        """Replace the announcement ``after``; return ``False`` if another process did so first."""
        return bool(self._store.exchange(self._key, after, self._announcement))

    def is_held(self) -> bool:
        """Return whether no other process leads; announces it again if it was removed."""
        current = self._store.get(self._key)
        if current is None:  # removed, or overwritten by a process without the key
            self.announce()
        return current in (None, self._announcement)


class JoinAttempt:
    """Follows the announcements under one ``key`` of a store, and requests to join each new leader.

    ``current``: what the key held last; ``latest``: the last value that was not empty; ``announcement``: the leader in
    it, if it is one. ``rejected``: messages of that store that were not authentic.
    """

    def __init__(self, store: Store, key: str, request: JoinRequest, rejected: RejectedMessages | None = None) -> None:
        self._store = store
        self._key = key
        self._request = encode(request)
        self._rejected = rejected or RejectedMessages()
        self._rejected.kept.add(key)
        self._answered = b""
        self.current: bytes | None = None
        self.latest: bytes | None = None
        self.announcement: LeaderAnnouncement | None = None

    def look(self) -> bool:
        """Read the key; return whether it holds something new."""
        self.current = self._store.get(self._key)
        if self.current is None:
            # An announcement with another key or none: a reply lets its sender see this process.
            data = self._rejected.latest.get(self._key, b"")
            announcement = decode_or_none(data, LeaderAnnouncement)
            if data != self._answered and announcement is not None:
                self._answered = data
                self._request_from(announcement)
        if self.current is None or self.current == self.latest:
            return False
        self.latest, self.announcement = self.current, decode_or_none(self.current, LeaderAnnouncement)
        if self.announcement is not None:
            self._request_from(self.announcement)
        return True

    def _request_from(self, leader: LeaderAnnouncement) -> None:
        self._store.append(f"{leader.nonce}/{JOIN_REQUESTS}", self._request)


def acknowledge(store: Store, prefix: str, outcome: str, mailbox: str, data: bytes) -> bool:
    """Append to ``mailbox`` if ``outcome`` is set, both below ``prefix``; return whether they were removed meanwhile.

    The leader removes them once all have acknowledged or its deadline has passed. An entry that is appended after that
    creates the folders again, and no other process would remove them.
    """
    if store.get(f"{prefix}/{outcome}") is None:
        return False
    store.append(f"{prefix}/{mailbox}", data)
    if store.get(f"{prefix}/{outcome}") is not None:
        return False
    store.clear(prefix)
    return True
