"""The address: what is refused before and after its name is resolved. Nothing here ever puts it into a text."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass, field
from urllib.parse import urlsplit

METADATA = frozenset(
    map(
        ipaddress.ip_address,
        # AWS (also by IPv6), GCP and Azure; Alibaba; Oracle; Azure's wire server. The first is link-local anyway.
        ("169.254.169.254", "fd00:ec2::254", "100.100.100.200", "192.0.0.192", "168.63.129.16"),
    )
)
"""Where clouds answer with credentials of the machine."""


class BadAddress(ValueError):
    """An address that is not used; the text says why and does not hold it."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where to post. Its parts are left out of ``repr``."""

    host: str = field(repr=False)
    port: int = field(repr=False)
    path: str = field(repr=False)
    secure: bool
    loopback: bool
    """Whether the address itself says this machine: ``localhost``, ``127.0.0.1``, ``[::1]``."""

    @classmethod
    def of(cls, text: str) -> Address:
        """Raises ``BadAddress``."""
        if not text.strip():
            raise BadAddress("it is not set")
        try:
            parts = urlsplit(text.strip())
            host, port = parts.hostname or "", parts.port
        except ValueError:
            raise BadAddress("it cannot be read") from None
        if parts.scheme not in ("https", "http") or not host:
            raise BadAddress("it does not begin with https:// and a host")
        if parts.username or parts.password:
            raise BadAddress("it holds a user or a password before the host")
        if any(character < "!" or character > "~" for character in text.strip()):
            raise BadAddress("it holds spaces or characters that are not ASCII")
        loopback = says_loopback(host)
        if parts.scheme == "http" and not loopback:
            raise BadAddress("only https is used, but for this machine itself")
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        secure = parts.scheme == "https"
        return cls(host, port or (443 if secure else 80), path, secure, loopback)

    def resolve(self) -> list[str]:
        """Numeric addresses of the host, each of them allowed. Raises ``BadAddress``, or ``OSError`` where it has none.

        The connection is made to one of these, so that a name cannot mean one address here and another one then.
        """
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)}
        for text in found:
            refuse(text.partition("%")[0], self.loopback)
        return sorted(found, key=lambda text: ":" in text)  # IPv4 first: containers often have no route for the other


def says_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def refuse(text: str, loopback: bool) -> None:
    """Raise ``BadAddress`` for an address that a webhook has no business with.

    :param loopback: whether this machine itself was asked for.
    """
    address = ipaddress.ip_address(text)
    inner = getattr(address, "ipv4_mapped", None) or getattr(address, "sixtofour", None)
    for one in (address, inner) if inner is not None else (address,):
        if one in METADATA:
            raise BadAddress("its host resolves to a metadata service")
        if one.is_link_local or one.is_multicast or one.is_unspecified or (one.is_reserved and not one.is_loopback):
            raise BadAddress("its host resolves to a link-local or reserved address")
        if one.is_loopback and not loopback:
            raise BadAddress("its host resolves to this machine without saying so")
