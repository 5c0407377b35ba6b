"""An HTTP proxy of one server on loopback that breaks chosen requests: resets, answers that get lost, errors, silence. Real sockets."""

from __future__ import annotations

import http.client
import socket
import struct
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["FAULTS", "FaultProxy"]

FAULTS = (
    "applied, no answer",
    "dropped",
    "late",
    "half an answer",
    "409",
    "412",
    "503",
    "500",
    "SlowDown",
    "stalls",
    "applied, then stalls",
)
_CODES = {
    "409": (409, "ConditionalRequestConflict"),
    "412": (412, "PreconditionFailed"),
    "503": (503, "ServiceUnavailable"),
    "500": (500, "InternalError"),
    "SlowDown": (503, "SlowDown"),
}
_HOP_BY_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "date", "server"})


class FaultProxy:
    """Listens on a port of its own until :meth:`close`.

    Attributes:
        endpoint: its URL.
        requests: since the last :meth:`plan`.
        put: faults that were really put since then.
        stalled: requests that hang since then.
    """

    def __init__(self, upstream: str) -> None:
        host, _, port = upstream.removeprefix("http://").partition(":")
        self._upstream = (host, int(port))
        self._lock = threading.Lock()
        self._late: list[Callable[[], Any]] = []
        self._released = threading.Event()
        self.plan(None)
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="fault-proxy", daemon=True)
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    def plan(self, fault: str | None, at: int = 0, *, sticky: bool = False) -> None:
        """Request ``at`` from now on, from 0, meets the fault; all that follow do, too, if it is sticky. Ends what stalled."""
        self._released.set()
        with self._lock:
            self._released = threading.Event()
            self._fault, self._at, self._sticky = fault, at, sticky
            self.requests = self.put = self.stalled = 0

    def settle(self) -> None:
        """What comes late takes effect now."""
        with self._lock:
            late, self._late = self._late, []
        for forward in late:
            forward()

    def close(self) -> None:
        """Stops listening."""
        self._released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def fault_of_next(self) -> tuple[str | None, threading.Event]:
        """What the next request meets, and what ends its stalling."""
        with self._lock:
            number = self.requests
            self.requests += 1
            meets = self._fault is not None and (number == self._at or (self._sticky and number > self._at))
            self.put += meets
            self.stalled += meets and str(self._fault).endswith("stalls")
            return self._fault if meets else None, self._released

    def keep(self, forward: Callable[[], Any]) -> None:
        """Leaves a request for :meth:`settle`."""
        with self._lock:
            self._late.append(forward)

    def forward(self, method: str, path: str, headers: list[tuple[str, str]], body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        """Sends a request on as it came. Returns status, headers and body of the answer."""
        connection = http.client.HTTPConnection(*self._upstream, timeout=30)
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in headers:
                connection.putheader(name, value)
            connection.endheaders(body or None)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: FaultProxy

    def handle(self) -> None:
        try:
            super().handle()
        except OSError:
            self.close_connection = True  # the client went away, as it may after a fault

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""

    def _serve(self) -> None:
        body = self._body()
        headers = [(name, value) for name, value in self.headers.items() if name.lower() not in ("expect", "connection")]
        request = (self.command, self.path, headers, body)
        fault, released = self.owner.fault_of_next()
        if fault is None:
            self._answer(*self.owner.forward(*request))
        elif fault in _CODES:
            self._answer_error(*_CODES[fault])
        elif fault == "half an answer":
            self._answer(*self.owner.forward(*request), share=0.5)
            self._reset()
        else:
            if fault.startswith("applied"):
                self.owner.forward(*request)
            elif fault == "late" and self.command in ("PUT", "POST", "DELETE"):
                self.owner.keep(lambda: self.owner.forward(*request))
            if fault.endswith("stalls"):
                released.wait()
            self._reset()

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve

    def _body(self) -> bytes:
        """As it came, chunks included, which are sent on under the same headers."""
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while True:
            line = self.rfile.readline()
            size = int(line.split(b";")[0], 16)
            parts += [line, self.rfile.read(size + 2)]
            if size == 0:
                return b"".join(parts)

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes, *, share: float = 1.0) -> None:
        self.send_response(status)
        length = None
        for name, value in headers:
            if name.lower() == "content-length":
                length = value  # of what GET would bring, where this is a HEAD
            elif name.lower() not in _HOP_BY_HOP:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)) if self.command != "HEAD" or length is None else length)
        self.end_headers()
        self.wfile.write(body[: int(len(body) * share)])

    def _answer_error(self, status: int, code: str) -> None:
        condition = "<Condition>If-None-Match</Condition>" if status == 412 else ""
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>injected</Message>{condition}</Error>".encode()
        self._answer(status, [("Content-Type", "application/xml")], b"" if self.command == "HEAD" else body)

    def _reset(self) -> None:
        """Breaks the connection, so that the client sees a reset and not an end."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
