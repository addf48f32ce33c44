"""Other interfaces and addresses by which one host might reach another, and the settings that select them."""

from __future__ import annotations

import msgspec

from doctor.analysis.interface_choice import (
    CARRIES_NOTHING,
    InterfaceEndpoint,
    choice_of,
    is_loopback,
    is_usable,
    needs_zone,
    network_of,
)
from doctor.core.facts import Interface, InterfaceFacts
from doctor.core.job import Rank
from doctor.core.message_bounds import Mtu, Name, Text

MOST_WAYS = 4
"""Paths between one pair of hosts that are tried: networks for training, for storage, for management."""


class AlternativePath(msgspec.Struct, frozen=True):
    """A path from one host to an ``address`` of another.

    ``source``: local address, ``None`` if the kernel chooses. ``knob``: the difference from the usual path;
    ``setting``: command that makes a job use it. ``mtu``: bytes, the smaller of both ends, if known.
    """

    knob: Text
    setting: Text
    address: Name
    source: Name | None = None
    mtu: Mtu | None = None


def alternative_paths(own: Rank, peer: Rank, address: str | None) -> tuple[AlternativePath, ...]:
    """Return the paths from the host of ``own`` to addresses of the host of ``peer`` other than ``address``.

    Those of the same family and of a common subnet come first; at most :data:`MOST_WAYS`.
    """
    here, there = _endpoints(own), [end for end in _endpoints(peer) if end.address.address != address]
    usual = next((end for end in _endpoints(peer) if end.address.address == address), None)
    ways = [_alternative_path(own, peer, _facing(here, end), end, usual) for end in there]
    family = ":" in (address or "")
    ways.sort(key=lambda way: ((":" in way.address) != family, way.source is None))
    return tuple(ways)[:MOST_WAYS]


def endpoint_of(member: Rank, address: str | None) -> InterfaceEndpoint | None:
    """Return the interface of the host that has ``address``."""
    return next((end for end in _endpoints(member) if end.address.address == address), None)


def facing(own: Rank, peer: Rank, address: str | None) -> InterfaceEndpoint | None:
    """Return the interface of the host of ``own`` in the subnet of that ``address`` of ``peer``.

    Without one it is the interface that carries the training.
    """
    end = endpoint_of(peer, address)
    found = _facing(_endpoints(own), end) if end is not None else None
    choice = choice_of(own)
    return found or (choice.first if choice is not None else None)


def mtu_between(one: InterfaceEndpoint | None, other: InterfaceEndpoint | None) -> int | None:
    """Return the bytes of the largest packet that both ends accept."""
    sizes = [end.interface.mtu for end in (one, other) if end is not None and end.interface.mtu]
    return min(sizes, default=None)


def usable_interfaces(member: Rank) -> list[Interface]:
    """Return the interfaces of the host that may carry the training."""
    facts = member.find(InterfaceFacts)
    every = facts.interfaces if facts else ()
    return [one for one in every if is_usable(one) and one.kind not in (*CARRIES_NOTHING, "dummy")]


def _endpoints(member: Rank) -> list[InterfaceEndpoint]:
    return [
        InterfaceEndpoint(interface, address)
        for interface in usable_interfaces(member)
        for address in interface.addresses
        if not is_loopback(address.address) and not needs_zone(address)
    ]


def _facing(here: list[InterfaceEndpoint], there: InterfaceEndpoint) -> InterfaceEndpoint | None:
    network = network_of(there.address)
    return next((end for end in here if network is not None and network_of(end.address) == network), None)


def _alternative_path(
    own: Rank, peer: Rank, here: InterfaceEndpoint | None, there: InterfaceEndpoint, usual: InterfaceEndpoint | None
) -> AlternativePath:
    source = here.address.address if here else None
    ends = f"{source} -> {there.address.address}" if source else f"to {there.address.address}"
    if usual is None or usual.interface is not there.interface:
        knob, setting = f"other interface {there.interface.name}", _interface_setting(own, peer, here, there)
    elif usual.address.family != there.address.family:
        family = "IPv6" if there.address.family == "inet6" else "IPv4"
        knob, choice = f"{family} on {there.interface.name}", choice_of(peer)
        setting = _address_setting(peer, there)
        if choice is None or choice.library == "NCCL":
            setting = f"export NCCL_SOCKET_FAMILY=AF_{there.address.family.upper()}  # on all hosts"
    else:
        knob, setting = f"another address of {there.interface.name}", _address_setting(peer, there)
    return AlternativePath(f"{knob} ({ends})", setting, there.address.address, source, mtu_between(here, there))


def _interface_setting(own: Rank, peer: Rank, here: InterfaceEndpoint | None, there: InterfaceEndpoint) -> str:
    choice, name = choice_of(peer) or choice_of(own), there.interface.name
    other = here.interface.name if here is not None and here.interface.name != name else None
    if choice is None or choice.library == "NCCL":
        # NCCL takes of a list what the host has; "=" wants names to be whole.
        names = f"{name},{other}" if other else name
        return f"export NCCL_SOCKET_IFNAME='={names}'  # on all hosts"
    where = f"on {peer.host.name}, and {other} on {own.host.name}" if other else "on all hosts"
    return f"export GLOO_SOCKET_IFNAME={name}  # {where}"


def _address_setting(peer: Rank, there: InterfaceEndpoint) -> str:
    """Return the setting for Gloo, which has no variable: it uses the first address of the host name."""
    name = peer.host.name
    return f"sudo sed -i '1i {there.address.address} {name}' /etc/hosts  # on {name}"
