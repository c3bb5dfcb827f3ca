"""The server itself."""

from __future__ import annotations

import os
import socket
from http.server import ThreadingHTTPServer
from typing import Any
from urllib.parse import quote

from .access import Access
from .board import Board
from .handler import Handler

PORT = 8642


class Server(ThreadingHTTPServer):
    """Serves the runs below a directory.

    Args:
        root: the directory, or one run.
        host: the address to bind to.
        port: 0 for any free one.
        token: that requests need; by default none on this machine, and a new one elsewhere.

    Attributes:
        root: as given.
        board: what is known of the runs.
        access: who may read.
        is_closing: whether streams have to end.

    Raises:
        FileNotFoundError: there is no such directory.
        ValueError: the token has signs that an address cannot have.
        OSError: the port is taken.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, root: str | os.PathLike[str], host: str = "127.0.0.1", port: int = PORT, token: str | None = None) -> None:
        self.root, self.board, self.access, self.is_closing = root, Board(root), Access(host, token), False
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), Handler)

    @property
    def cookie(self) -> str:
        """The name of the cookie with the token; cookies do not differ by port."""
        return f"gradmon_token_{self.server_address[1]}"

    @property
    def address(self) -> str:
        """What a browser opens."""
        host, port = self.server_address[:2]
        name = f"[{host!s}]" if self.address_family == socket.AF_INET6 else str(host)
        return f"http://{name}:{port}/" + (f"?token={quote(self.access.token)}" if self.access.token is not None else "")

    def server_close(self) -> None:
        """End the streams and the thread of diagnoses too."""
        self.is_closing = True
        super().server_close()
        self.board.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: a browser that leaves is no error."""
