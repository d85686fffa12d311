"""`verl show --live RUN`: the report over loopback HTTP, updated while the run continues."""

from __future__ import annotations

import json
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from verl.errors import Refused
from verl.report.data import RunReader
from verl.report.page import json_in_script, render_page

_HOST = "127.0.0.1"


def serve_page(run_dir: Path, port: int = 0) -> None:
    """Serve the report of `run_dir` on 127.0.0.1 until Ctrl-C. Port 0: any free one."""
    with LiveServer(run_dir, port) as server:
        print(f"{server.url}  (Ctrl-C to stop)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("stopped")


class LiveServer(ThreadingHTTPServer):
    """A server of the report of one run directory. It reads each version of the directory at most once, for all clients
    together."""

    daemon_threads = True

    def __init__(self, run_dir: Path, port: int = 0, poll_s: float = 2.0) -> None:
        self._reader, self._poll_s = RunReader(run_dir), poll_s
        self._reading = threading.Lock()
        self._version, self._payload = "", dict[str, Any]()
        try:
            super().__init__((_HOST, port), _Handler)
        except OSError as fault:
            raise Refused(f"cannot listen on {_HOST}:{port}: {fault.strerror}; port 0 takes a free one") from fault
        self.hosts = (f"{_HOST}:{self.server_port}", f"localhost:{self.server_port}")

    @property
    def url(self) -> str:
        return f"http://{self.hosts[0]}/"

    def answer(self, path: str) -> tuple[str, str] | None:
        """Return (content type, text) of a path; None if there is no such page."""
        if path not in ("/", "/version.json", "/data.json"):
            return None
        with self._reading:
            version = self._reader.version()  # taken before reading: later writes appear at the next poll
            if path == "/version.json":
                return "application/json", json.dumps({"version": version})
            if version != self._version:
                self._payload, self._version = self._reader.payload(), version
            if path == "/data.json":
                return "application/json", f'{{"version":"{version}","payload":{json_in_script(self._payload)}}}'
            return "text/html", render_page(self._payload, live={"version": version, "poll_s": self._poll_s})


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer
    timeout = 30.0  # seconds, for the socket
    server_version = "verl"
    sys_version = ""

    def do_GET(self) -> None:
        # Loopback only: this also refuses a foreign page with a host name that resolves to 127.0.0.1.
        known = self.headers.get("Host", "") in self.server.hosts
        try:
            answer = self.server.answer(self.path) if known else None
        except (OSError, ValueError) as fault:
            return self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR, explain=str(fault))
        if answer is None:
            return self.send_error(HTTPStatus.NOT_FOUND)
        kind, body = answer[0], answer[1].encode("utf-8", "replace")
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        try:
            self.wfile.write(body)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the page was closed meanwhile

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the page polls every two seconds."""
