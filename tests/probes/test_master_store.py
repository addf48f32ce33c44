"""A connection that says nothing and closes does no harm to torch's store, which may be what listens at the master."""

from __future__ import annotations

import sys

import pytest

from tests.lab.hosts import hosts
from tests.lab.needs import CannotPlay

PROGRAM = """
import datetime
import sys
from torch.distributed import TCPStore
from doctor.probes.runtime.deadline import ProbeDeadline
from doctor.probes.reachability.light_probe import try_master_port

options = dict(timeout=datetime.timedelta(seconds=20), wait_for_workers=False, use_libuv=sys.argv[1] == "libuv")
server = TCPStore("127.0.0.1", 0, 3, True, **options)
first = TCPStore("127.0.0.1", server.port, 3, False, **options)
for _ in range(100):
    assert try_master_port("127.0.0.1", server.port, ProbeDeadline(5), patient=True)[0] == "open"
server.set("key", "value")
second = TCPStore("127.0.0.1", server.port, 3, False, **options)
print(first.get("key"), second.get("key"), second.add("count", 3), first.add("count", 4))
"""


@pytest.mark.parametrize("backend", ["libuv", "plain"])
def test_the_store_keeps_working(backend: str) -> None:
    pytest.importorskip("torch")
    try:
        # Of its own, so that torch's look-ups of names end at once.
        with hosts(1) as (host,):
            done = host.run([sys.executable, "-c", PROGRAM, backend])
    except CannotPlay as reason:
        pytest.skip(str(reason))
    assert done.stdout == "b'value' b'value' 3 7\n", done.stderr
    assert "remote address" not in done.stderr
