"""Who may read: requests with the token, which other accounts of this machine do not have either."""

from __future__ import annotations

import hmac
import ipaddress
import re
import secrets
from collections.abc import Mapping
from email.message import Message

#: Characters of a token, which is part of addresses.
_TOKEN = re.compile(r"[A-Za-z0-9_.~-]+")


def is_local(host: str) -> bool:
    """Whether an address to bind to, or the one in a request, is of this machine alone."""
    name = host.strip("[]")
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class Access:
    """Decides about requests.

    Args:
        host: the address that the server is bound to.
        token: that requests need; by default a new one. Empty: none, which only an address of this machine may have.

    Attributes:
        token: that requests need, or None.

    Raises:
        ValueError: the token has signs that an address cannot have, or other machines could read without one.
    """

    def __init__(self, host: str, token: str | None = None) -> None:
        if token and not _TOKEN.fullmatch(token):
            raise ValueError(f"a token has letters, digits and the signs _ . ~ - only, got {token!r}")
        self._is_local = is_local(host)
        if token == "" and not self._is_local:
            raise ValueError(f"everybody could read at {host} without a token; leave it out at an address of this machine only")
        self.token = secrets.token_urlsafe(24) if token is None else token or None

    def names_this_machine(self, host: str) -> bool:
        """Whether the ``Host`` of a request is allowed: on this machine only its own names, so that no page of another site that
        has its name resolved to this machine can read.
        """
        name = host.rpartition(":")[0] if host.count(":") == 1 or "]:" in host else host
        return not self._is_local or is_local(name)

    @staticmethod
    def is_of_another_site(headers: Message, query: Mapping[str, list[str]]) -> bool:
        """Whether a page of another site has made the request; a link with the token, which that site cannot know, is none of its."""
        is_link = headers.get("Sec-Fetch-Mode") == "navigate" and "token" in query
        return headers.get("Sec-Fetch-Site") == "cross-site" and not is_link

    def has_token(self, query: Mapping[str, list[str]]) -> bool:
        """Whether the token is in the address. No cookie has it: browsers send cookies of one port to all ports of a machine."""
        given = query.get("token", [""])[0]
        return self.token is None or hmac.compare_digest(given.encode(), self.token.encode())
