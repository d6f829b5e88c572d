"""A server on this machine alone, at an address that nobody can guess."""

from __future__ import annotations

import errno
import secrets
import socket

from factormix.errors import InputError
from factormix.views.explorer.app import make_app
from factormix.views.explorer.exhibition import Exhibition

__all__ = ["Server"]


class Server:
    """Hold a port from the beginning on, so that its address can be told before it is served."""

    def __init__(self, exhibition: Exhibition, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen at ``host`` and ``port``; 0 takes a port that is free."""
        self.exhibition, self.host = exhibition, host
        self.token = secrets.token_urlsafe(16)
        self._socket = _listening(host, port)
        self.port = int(self._socket.getsockname()[1])

    @property
    def address(self) -> str:
        """The address to open, token included."""
        name = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        name = f"[{name}]" if ":" in name else name
        return f"http://{name}:{self.port}/{self.token}/"

    def serve(self) -> None:
        """Answer until the process is told to end."""
        import uvicorn

        app = make_app(self.exhibition, self.token, self.host, self.port)
        settings = uvicorn.Config(
            app,
            log_level="critical",
            access_log=False,
            server_header=False,
            lifespan="off",
            # A page that is still open must not keep the process from ending.
            timeout_graceful_shutdown=1,
        )
        try:
            uvicorn.Server(settings).run(sockets=[self._socket])
        finally:
            self.exhibition.close()
            self._socket.close()


def _listening(host: str, port: int) -> socket.socket:
    try:
        kind, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(kind, socket.SOCK_STREAM)
    except OSError as error:
        raise InputError(
            f"the host {host!r} is not known ({error.strerror}): leave --host out."
        ) from error
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(where)
        found.listen(64)
    except OSError as error:
        found.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise InputError(
                f"the host {host!r} is not an address of this machine: leave --host out."
            ) from error
        raise InputError(
            f"port {port} of {host} cannot be used ({error.strerror}): name another --port, or"
            " leave it out for one that is free."
        ) from error
    return found
