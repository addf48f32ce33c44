"""Placeholders for IP addresses that preserve network membership.

Known networks and addresses form a tree by containment. It is mapped block by block, in order of first appearance,
into the same private range or into a range reserved for documentation. Addresses that shared a network still share
one, gateways stay in their network, and nothing is derived from the original numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network


def _networks(text: str) -> tuple[Network, ...]:
    return tuple(map(ip_network, text.split()))


PRIVATE = _networks("10.0.0.0/8 172.16.0.0/12 192.168.0.0/16 169.254.0.0/16 100.64.0.0/10 fe80::/10 fc00::/7")
"""Ranges that are preserved: RFC 1918, 3927, 6598, 4291 and 4193."""

BRIDGES = "172.17.0.0/16 192.168.122.0/24"
"""The default bridges of Docker and libvirt: identical on every machine, and log checks depend on them."""
KEPT = _networks(f"0.0.0.0/8 127.0.0.0/8 224.0.0.0/3 169.254.169.254/32 ::/127 ff00::/8 {BRIDGES}")
"""Addresses that identify nobody: unspecified, loopback, multicast, broadcast, cloud metadata services, bridges."""

POOLS = {
    4: _networks("192.0.2.0/24 198.51.100.0/24 203.0.113.0/24 198.18.0.0/15 240.0.0.0/4"),
    6: _networks("2001:db8::/32"),
}
"""Target ranges for public addresses: the documentation ranges (RFC 5737, RFC 3849), followed by the ranges for
benchmarks (RFC 2544) and for future use if those are too small."""

ASSUMED = {4: 24, 6: 64}
"""Assumed prefix length of an address without a known network."""

GENERIC = {4: 4, 6: 8}
"""Routes with shorter prefixes do not identify a site."""


class AddressBook:
    """Placeholders for all ``networks`` and ``addresses``, which must be complete, in order of first appearance."""

    def __init__(self, networks: Iterable[Network], addresses: Iterable[Address]) -> None:
        known = dict.fromkeys(network for network in networks if _is_worth(network))
        plain = dict.fromkeys(address for address in addresses if not is_kept(address))
        self._tree = _Tree(known, plain)
        self._layout: dict[Network, Network] = {}
        self._free = {pool: int(pool.network_address) for pools in POOLS.values() for pool in pools}
        roots = self._tree.children(None)
        for root in roots:
            if _home(root) is None:
                self._lay_out(root, self._take(root))
        for home in PRIVATE:
            self._lay_out_children([root for root in roots if _home(root) == home], int(home.network_address))

    def address(self, address: Address) -> Address:
        """The placeholder of an address; the address itself if it identifies nobody."""
        if is_kept(address):
            return address
        if own := self._layout.get(ip_network(address)):
            return own.network_address
        edge = self._tree.edge_of(address)
        if edge is None:
            return address
        standin = self._layout[edge]
        return standin.network_address if address == edge.network_address else standin.broadcast_address

    def network(self, network: Network) -> Network:
        """The placeholder of a network; the network itself if it is too wide to identify a site, or a whole private
        range."""
        return self._layout.get(network, network)

    def _take(self, root: Network) -> int:
        """Return the start of a block for a public network and its descendants. A wide network with few hosts gets a
        narrow block and keeps its own prefix length; if no block fits, the last range is reused from its start."""
        pools, wanted, below = POOLS[root.version], root.num_addresses, self._tree.children(root)
        narrow = pools[0].num_addresses
        is_flat = all(child.prefixlen == child.max_prefixlen for child in below)
        if wanted > narrow and is_flat and len(below) < narrow - 2:
            wanted = narrow
        for pool in pools:
            place = -(-self._free[pool] // wanted) * wanted
            if place + wanted <= int(pool.broadcast_address) + 1:
                self._free[pool] = place + wanted
                return place
        return int(pools[-1].network_address)

    def _lay_out(self, network: Network, place: int) -> None:
        start = (IPv4Address if network.version == 4 else IPv6Address)(place)
        self._layout[network] = ip_network(f"{start}/{network.prefixlen}", strict=False)
        self._lay_out_children(self._tree.children(network), place)

    def _lay_out_children(self, children: list[Network], start: int) -> None:
        """Lay out the largest blocks first: sizes are powers of two, so each block is aligned to its size, and
        whatever fitted the original fits here. The first address of a network is left free."""
        place = start
        for child in sorted(children, key=lambda child: child.prefixlen):
            if place == start and child.prefixlen == child.max_prefixlen:
                place += 1
            self._lay_out(child, place)
            place += child.num_addresses


class _Tree:
    """Networks and single addresses by containment. An address without a known network gets an assumed one."""

    def __init__(self, networks: dict[Network, None], addresses: dict[Address, None]) -> None:
        self._networks = dict(networks)
        self._lengths: dict[int, list[int]] = {4: [], 6: []}
        self._index()
        for address in addresses:
            if self._parent(ip_network(address)) is None:
                self._networks.setdefault(ip_network(f"{address}/{ASSUMED[address.version]}", strict=False))
        self._index()
        self._children: dict[Network | None, list[Network]] = {}
        singles = (ip_network(address) for address in addresses if self.edge_of(address) is None)
        for item in dict.fromkeys((*self._networks, *singles)):
            self._children.setdefault(self._parent(item), []).append(item)

    def children(self, network: Network | None) -> list[Network]:
        """The networks and addresses directly in ``network``; ``None``: those in no other one."""
        return self._children.get(network, [])

    def edge_of(self, address: Address) -> Network | None:
        """The narrowest network of which this is the first or last address."""
        parent = self._parent(ip_network(address))
        return parent if parent and address in (parent.network_address, parent.broadcast_address) else None

    def _index(self) -> None:
        for version, lengths in self._lengths.items():
            lengths[:] = sorted({net.prefixlen for net in self._networks if net.version == version}, reverse=True)

    def _parent(self, item: Network) -> Network | None:
        for length in self._lengths[item.version]:
            if length < item.prefixlen:
                wider = item.supernet(new_prefix=length)
                if wider in self._networks:
                    return wider if _home(wider) == _home(item) else None
        return None


def is_kept(address: Address) -> bool:
    """Whether an address identifies nobody."""
    return any(address in network for network in KEPT)


def parse_address(text: str) -> Address | None:
    """The address in ``text``, or ``None``."""
    try:
        return ip_address(text)
    except ValueError:
        return None


def parse_network(address: str, length: int) -> Network | None:
    """The network of an address with a prefix of ``length``, or ``None``."""
    try:
        return ip_network(f"{address}/{length}", strict=False)
    except ValueError:
        return None


def _is_worth(network: Network) -> bool:
    wide = network.prefixlen < GENERIC[network.version]
    single = network.max_prefixlen - network.prefixlen < 1
    return not (wide or single or network in PRIVATE or any(_inside(network, kept) for kept in KEPT))


def _home(network: Network) -> Network | None:
    """The private range in which a network lies."""
    return next((home for home in PRIVATE if _inside(network, home)), None)


def _inside(network: Network, wider: Network) -> bool:
    is_smaller = network.version == wider.version and network.prefixlen >= wider.prefixlen
    return is_smaller and network.network_address in wider
