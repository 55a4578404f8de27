"""The page over HTTP: the standard library's server, a thread for each connection, strangers refused."""

import ipaddress
import json
import re
import shutil
import socket
import sys
import traceback
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from tcore.demo.engine import Engine
from tcore.demo.session import AwayError
from tcore.demo.site import Answer, Limits, Request, Site, respond
from tcore.demo.trainer import Trainer
from tcore.errors import InputError

MOST_JSON = 32 * 10**6  # bytes of a request that is no upload
MOST_DRAINED = 64 << 20
GUARD = "X-Tcore-Demo"
"""A header that other sites cannot send: browsers ask us first, and we never allow it."""
SAFE = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' blob: data:; frame-ancestors 'none'; "
    "base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class TooLargeError(InputError):
    """A request with more bytes than are allowed."""


class StrangerError(Exception):
    """A request from another site, or through a name that is not ours."""


class Demo(ThreadingHTTPServer):
    """The server of one site."""

    daemon_threads = True

    def __init__(
        self,
        engine: Engine | None,
        trainer: Trainer,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        limits: Limits | None = None,
    ) -> None:
        if ":" in host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((host, port), Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"cannot listen on {host}:{port}: {reason}; try another --port.") from error
        self.host = host
        self.site = Site(engine, trainer, limits or Limits())

    @property
    def url(self) -> str:
        """Where the page is."""
        anywhere = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}
        host = anywhere.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.server_address[1]}/"

    def server_close(self) -> None:
        """Stop listening, and everything that was started."""
        super().server_close()
        if hasattr(self, "site"):  # not where the port was taken
            self.site.close()

    def allows(self, host: str) -> bool:
        """Whether a Host header is ours: an address or our own name; rebinding needs another name."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
            if name and name in ("localhost", self.host.lower(), socket.gethostname().lower()):
                return True
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: Demo
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "tcore", ""
    timeout = 60

    def do_GET(self) -> None:
        """Answer a question."""
        self._serve("GET")

    def do_POST(self) -> None:
        """Do something."""
        self._serve("POST")

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not worth a line."""

    def _serve(self, method: str) -> None:
        self._unread = self._length()
        try:
            self._check(method)
            url = urlsplit(self.path)
            query = dict(parse_qsl(url.query))
            answer = respond(self.server.site, Request(method, url.path, query, self._json, self._save))
            if answer is None:
                self._fail(HTTPStatus.NOT_FOUND, "there is no such page.")
            else:
                self._send(answer)
        except AwayError as error:
            self._fail(HTTPStatus.GONE, str(error))
        except TooLargeError as error:
            self._fail(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, str(error))
        except StrangerError as error:
            self._fail(HTTPStatus.FORBIDDEN, str(error))
        except InputError as error:
            self._fail(HTTPStatus.BAD_REQUEST, str(error))
        except (ConnectionError, TimeoutError):  # the visitor has gone
            self.close_connection = True
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            self._fail(HTTPStatus.INTERNAL_SERVER_ERROR, f"the program failed: {error!r}; see its terminal.")

    def _check(self, method: str) -> None:
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        if not self.server.allows(host):
            raise StrangerError(f"this program does not answer to the name {host!r}: open {self.server.url}")
        if origin is not None and origin != f"http://{host}":
            raise StrangerError(f"requests from {origin} are refused.")
        if method == "POST" and self.headers.get(GUARD) is None:
            raise StrangerError(f"the header {GUARD} is missing.")

    def _length(self) -> int:
        length = self.headers.get("Content-Length", "0")
        return int(length) if re.fullmatch("[0-9]{1,15}", length) else 0

    def _read(self, size: int) -> bytes:
        data = self.rfile.read(min(size, self._unread))
        if not data and self._unread:
            raise ConnectionError("the sender stopped")
        self._unread -= len(data)
        return data

    def _refuse_more_than(self, most: int) -> None:
        if self._unread > most:
            raise TooLargeError(
                f"this has {self._unread / 1e6:.1f} MB: at most {most / 1e6:.0f} MB are allowed."
            )

    def _save(self, path: Path, most: int) -> None:
        self._refuse_more_than(most)
        if not self._unread:
            raise InputError("this file is empty.")
        with path.open("wb") as file:
            while self._unread:
                file.write(self._read(1 << 20))

    def _json(self) -> dict[str, Any]:
        self._refuse_more_than(MOST_JSON)
        try:
            data = json.loads(self._read(MOST_JSON) or b"{}")
        except (ValueError, RecursionError) as error:
            raise InputError("the request is not JSON.") from error
        if not isinstance(data, dict):
            raise InputError("the request is not a JSON object.")
        return data

    def _fail(self, status: HTTPStatus, sentence: str) -> None:
        # A browser reads no answer before it has sent everything; a body far too long is cut off.
        try:
            if self._unread <= MOST_DRAINED:
                while self._unread:
                    self._read(1 << 20)
        except (ConnectionError, TimeoutError):
            pass
        self.close_connection = self.close_connection or self._unread > 0
        text = sentence[:1].upper() + sentence[1:]
        self._send(Answer(json.dumps({"error": text}).encode(), "application/json"), status)

    def _send(self, answer: Answer, status: HTTPStatus = HTTPStatus.OK) -> None:
        body = answer.body
        length = body.stat().st_size if isinstance(body, Path) else len(body)
        headers = SAFE | {
            "Content-Type": answer.kind,
            "Content-Length": str(length),
            "Cache-Control": "private, max-age=3600" if answer.lasts else "no-store",
        }
        if answer.name:
            headers["Content-Disposition"] = f'attachment; filename="{answer.name}"'
        if self.close_connection or self._unread:
            headers["Connection"] = "close"
        try:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if isinstance(body, Path):
                with body.open("rb") as file:
                    shutil.copyfileobj(file, self.wfile)
            else:
                self.wfile.write(body)
        except (ConnectionError, TimeoutError):
            self.close_connection = True
