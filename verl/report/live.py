"""`verl show --live RUN`: the report over loopback HTTP, following the run while it goes on."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

from verl.report.data import RunReader
from verl.report.page import json_in_script, render_page

_HOST = "127.0.0.1"
_SOCKET_TIMEOUT_S = 30.0


def serve(run_dir: Path, port: int = 0, poll_s: float = 2.0, announce: Callable[[str], None] = print) -> None:
    """Serve the report of `run_dir` on 127.0.0.1 until Ctrl-C. Port 0: any free one; `announce` is told the address."""
    with LiveServer(run_dir, port, poll_s) as server:
        announce(f"{server.url}  (Ctrl-C to stop)")
        try:
            server.wait()
        except KeyboardInterrupt:
            announce("stopped")


class LiveServer:
    """The server in a thread of its own: a context manager, so that it never outlives its owner."""

    def __init__(self, run_dir: Path, port: int = 0, poll_s: float = 2.0) -> None:
        if poll_s <= 0:
            raise ValueError(f"poll_s={poll_s}: must be above 0")
        page = _LivePage(RunReader(run_dir), poll_s)
        try:
            self._server = _Server((_HOST, port), _Handler)
        except OSError as fault:
            raise ValueError(f"cannot listen on {_HOST}:{port}: {fault.strerror}; port 0 takes a free one") from fault
        self._server.page = page
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="live-report", daemon=True)

    @property
    def url(self) -> str:
        return f"http://{_HOST}:{self._server.server_port}/"

    def wait(self) -> None:
        """Until the server's thread ends, which only `__exit__` brings about; wakes often enough to see Ctrl-C."""
        while self._thread.is_alive():
            self._thread.join(timeout=0.5)

    def __enter__(self) -> LiveServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5.0)


class _LivePage:
    """Renders at most once per version of the run directory, whoever asks."""

    def __init__(self, reader: RunReader, poll_s: float) -> None:
        self._reader = reader
        self._poll_s = poll_s
        self._lock = threading.Lock()
        self._version = ""
        self._payload: dict[str, Any] = {}
        self._data = ""

    def version(self) -> bytes:
        with self._lock:
            return json.dumps({"version": self._reader.version()}).encode()

    def data(self) -> bytes:
        with self._lock:
            self._read()
            return f'{{"version":"{self._version}","payload":{self._data}}}'.encode("utf-8", "replace")

    def page(self) -> bytes:
        with self._lock:
            payload = self._read()
            live = {"version": self._version, "poll_s": self._poll_s}
            return render_page(payload, live=live).encode("utf-8", "replace")

    def _read(self) -> dict[str, Any]:
        version = self._reader.version()  # taken before reading: what is written meanwhile shows at the next poll
        if version != self._version:
            self._payload = self._reader.payload()
            self._data = json_in_script(self._payload)
            self._version = version
        return self._payload


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    page: _LivePage


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _SOCKET_TIMEOUT_S
    server_version = "verl"
    sys_version = ""

    def do_GET(self) -> None:
        page = self.server.page
        routes = {
            "/": ("text/html; charset=utf-8", page.page),
            "/version.json": ("application/json", page.version),
            "/data.json": ("application/json; charset=utf-8", page.data),
        }
        route = routes.get(self.path) if self._asked_by_name() else None
        if route is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        kind, answer = route
        try:
            body = answer()
        except (OSError, ValueError) as fault:
            self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR, explain=str(fault))
            return
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        try:
            self.wfile.write(body)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the page was closed meanwhile

    def _asked_by_name(self) -> bool:
        """Loopback only, also against a foreign page whose host name was pointed at 127.0.0.1."""
        port = self.server.server_port
        return self.headers.get("Host", "") in (f"{_HOST}:{port}", f"localhost:{port}")

    def log_message(self, format: str, *args: object) -> None:
        """Quiet: a poll every two seconds is no news."""
