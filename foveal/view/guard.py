"""What every request must be, and what every answer says: the page shows untrusted text and is for one reader."""

from __future__ import annotations

import ipaddress
import socket

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = ("127.0.0.1", "localhost", "::1")
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; img-src 'self'; style-src 'self'; script-src 'self'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class Guard:
    """Lets only GET and HEAD through, and only for hosts that mean this machine.

    Without the second a web page elsewhere could give its own name our address (DNS rebinding) and read along.

    Args:
        host: what the server listens on. Beyond loopback, plain IP addresses and this machine's names are let in too.
    """

    def __init__(self, app: ASGIApp, host: str) -> None:
        self.app = app
        self.public = host not in LOOPBACK
        self.names = {*LOOPBACK, host.lower()}
        if self.public:
            self.names |= {socket.gethostname().lower(), socket.getfqdn().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        if scope["method"] not in ("GET", "HEAD"):
            refusal = PlainTextResponse("only GET", 405, {"Allow": "GET, HEAD"})
            await refusal(scope, receive, send_guarded)
        elif not self._means_us(Headers(scope=scope).get("host", "")):
            text = "this page is not served under that name; see `foveal view --help` on --host"
            await PlainTextResponse(text, 421)(scope, receive, send_guarded)
        else:
            await self.app(scope, receive, send_guarded)

    def _means_us(self, host: str) -> bool:
        name = host_name(host)
        return name in self.names or (self.public and _is_address(name))


def host_name(host: str) -> str:
    """The name in a Host header, in small letters, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdigit() else host).lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
