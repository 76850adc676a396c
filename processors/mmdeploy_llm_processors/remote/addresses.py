"""Decides which IP addresses may be connected to."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

from mmdeploy_llm.errors import MediaError

PRIVATE_HINT = (
    "; for a host in your own network, list it in allowed_media_domains and set "
    "allow_private_media_addresses=True"
)

Address = IPv4Address | IPv6Address
Resolve = Callable[[str, int], list[str]]

NEVER: tuple[IPv4Network | IPv6Network, ...] = tuple(
    map(
        ipaddress.ip_network,
        (
            "0.0.0.0/8",  # "this network": reaches this machine on some systems
            "169.254.0.0/16",  # link-local; metadata of most clouds
            "192.0.0.0/24",  # protocol assignments; metadata of Oracle's cloud
            "100.100.100.200/32",  # metadata of Alibaba's cloud
            "168.63.129.16/32",  # Azure's host, a public address
            "fd00:ec2::/32",  # metadata of Amazon's cloud
            "fd20:ce::/32",  # metadata of Google's cloud
            "fe80::/10",
            "fec0::/10",  # site-local, withdrawn
        ),
    )
)
NOT_PUBLIC: tuple[IPv4Network | IPv6Network, ...] = tuple(
    map(
        ipaddress.ip_network,
        (
            "192.88.99.0/24",  # relays to IPv6
            "::/96",  # IPv4 in IPv6, withdrawn; ::1
            "64:ff9b:1::/48",  # private NAT64
            "3fff::/20",  # documentation
            "5f00::/16",  # segment routing
        ),
    )
)
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def resolve(host: str, port: int) -> list[str]:
    """Returns the addresses of a host, in the system's order. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def check_addresses(host: str, addresses: list[str], *, allow_private: bool) -> None:
    """Raises MediaError when any address of a host is refused: a later lookup may return that one.

    The message does not contain the address, which would reveal the network's structure.
    """
    for text in addresses:
        try:
            address: Address = ipaddress.ip_address(text)
        except ValueError:  # such as fe80::1%eth0
            raise MediaError(f"the host {host} has an address that is not allowed") from None
        if not all(_is_allowed(each, allow_private) for each in _reached(address)):
            raise MediaError(
                f"the host {host} is at an address that is never allowed, or not a public one"
                + ("" if allow_private else PRIVATE_HINT)
            )


def _is_allowed(address: Address, allow_private: bool) -> bool:
    if address.is_multicast or address.is_unspecified or _is_in(address, NEVER):
        return False
    if allow_private and (address.is_private or address.is_loopback):
        return True
    return address.is_global and not address.is_reserved and not _is_in(address, NOT_PUBLIC)


def _reached(address: Address) -> list[Address]:
    """Returns the addresses that traffic to `address` may reach: IPv6 ones can embed IPv4 ones."""
    if isinstance(address, IPv4Address):
        return [address]
    if address.ipv4_mapped is not None:
        return [address.ipv4_mapped]
    if address in NAT64:
        return [IPv4Address(int(address) & 0xFFFFFFFF)]
    inner = [address.sixtofour, *(address.teredo or ())]
    return [address, *(each for each in inner if each is not None)]


def _is_in(address: Address, networks: tuple[IPv4Network | IPv6Network, ...]) -> bool:
    return any(address in network for network in networks)
