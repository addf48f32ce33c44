"""Address of a Ray cluster, and why it cannot be reached."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping

import psutil

from doctor.cluster.rendezvous.connect_attempt import attempt_connect
from doctor.collectors.launch.launcher import PORTS
from doctor.core.clock import monotonic
from doctor.core.errors import UnusableError

CONNECT_TIMEOUT = 5.0
"""Seconds of attempts to connect: the head may still be starting."""


class RayUnreachable(Exception):
    """The cluster cannot be reached; the message is the reason."""


def ray_head_address(text: str, environ: Mapping[str, str]) -> str:
    """Return the address of the head. ``auto`` is RAY_ADDRESS, or the cluster on this host.

    Raises:
        UnusableError: it is not a valid cluster address, or Ray is not installed here.
    """
    named = text.strip()
    source = "--ray"
    if named == "auto" and environ.get("RAY_ADDRESS", "").strip():
        named, source = environ["RAY_ADDRESS"].strip(), "RAY_ADDRESS"
    if named != "auto" and _parsed(named) is None:
        raise UnusableError(f"{source} {named!r} is not auto, HOST:PORT or ray://HOST:PORT")
    found = importlib.util.find_spec("ray")
    if found is None or found.origin is None:  # None too for a mere folder of that name
        raise UnusableError("--ray needs Ray, which is not installed in this Python environment: pip install ray")
    return named


def _parsed(address: str) -> tuple[str, int] | None:
    match = re.fullmatch(r"(?:ray://)?(?:\[([^\[\]\s]+)\]|([^:/\[\]\s]+)):(\d{1,5})", address, re.ASCII)
    if match is None or int(match[3]) not in PORTS:
        return None
    return match[1] or match[2], int(match[3])


def check_listening(address: str, until: float) -> None:
    """Check that the port at ``address`` is open.

    Ray itself would try for two minutes and report no cause.

    Raises:
        RayUnreachable: it is not, by the monotonic time ``until`` and within :data:`CONNECT_TIMEOUT` seconds.
    """
    parsed = _parsed(address)
    if parsed is None:
        return
    name, port = parsed
    found = attempt_connect((name,), port, until=min(until, monotonic() + CONNECT_TIMEOUT))
    if found.open_at is None:
        reason = {
            "unresolved": f"{name} does not resolve on this host ({found.lookup_error or 'no address'})",
            "refused": "connection refused; no Ray head listens there (`ray status` on the head shows its port)",
            "silent": "no response; a firewall drops the packets, or it is the wrong network",
            "unroutable": "this host has no route to that network",
        }[found.attempts[-1].outcome]
        raise RayUnreachable(f"no Ray cluster at {address}: {reason}")


def explain_no_answer(address: str) -> str:
    """Return why Ray keeps retrying although the port at ``address`` is open."""
    if address.startswith("ray://"):
        return "its client server is stopped, or something else listens there"
    if any(process.info["name"] == "raylet" for process in psutil.process_iter(["name"])):
        return "its head does not respond, runs another release of Ray, or something else listens there"
    return "this host is not a node of the cluster (join it with `ray start --address=HOST:PORT`, or use --ray ray://HEAD:10001)"
