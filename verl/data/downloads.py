"""Media that rows name by a URL: downloaded once, from hosts that the configuration allows."""

from __future__ import annotations

import hashlib
import http.client
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote, urlsplit

from verl.config.tree import text_of
from verl.data.media_items import published
from verl.errors import Refused

KEY = "data.media_hosts"
TRIES, PAUSE_S, TIMEOUT_S = 3, 1.0, 60.0
"""A server that is busy or does not answer is tried again. The timeout is that of each read."""
TOTAL_S = 240.0
"""The deadline of all tries of a URL, below the one of a worker without progress (WORKER_TIMEOUT_S)."""
MAX_BYTES = 1 << 28
_CHUNK = 1 << 20
_AGAIN = (408, 425, 429, 500, 502, 503, 504)
_AS_WRITTEN = "%/:=&?~#+!$,;'@()*[]"
"""Characters of a URL that are not quoted, beside letters and digits: it may be quoted as it is."""


def downloaded(
    url: str, hosts: Collection[str], folder: Path, where: str, check: Callable[[BinaryIO, str], object]
) -> Path:
    """Return the file with the content of a URL, which is downloaded if no run has done it before. hosts: those that
    are allowed, for redirections too · folder: of such files · check: raises Refused for a content, with the name that
    it is called with; such a content is not kept. Raise Refused, with `where`, also for another host, an answer that is
    an error, a file that is too large, and one that takes too long."""
    _refuse_host(url, hosts, where)
    path = folder / "urls" / hashlib.blake2b(url.encode(), digest_size=16).hexdigest()
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    coming = path.with_suffix(f".{uuid.uuid4().hex}")
    try:
        _written(url, coming, hosts, where)
        with coming.open("rb") as stream:
            check(stream, f"{where} ({url[:120]})")
        published(coming, path)
    finally:
        coming.unlink(missing_ok=True)
    return path


def _written(url: str, path: Path, hosts: Collection[str], where: str) -> None:
    """Write the content of a URL to a file, in several tries."""
    end = time.monotonic() + TOTAL_S
    for left in reversed(range(TRIES)):
        try:
            return _write(url, path, hosts, where, end)
        except Refused:
            raise
        except urllib.error.HTTPError as e:
            if not left or e.code not in _AGAIN:
                raise _failed(url, where, f"the server answers {e.code} {e.reason}") from e
        except (OSError, http.client.HTTPException) as e:
            if not left:
                raise _failed(url, where, getattr(e, "reason", None) or e) from e
        except ValueError as e:  # of the URL, or of the answer's headers
            raise _failed(url, where, e) from e
        time.sleep(PAUSE_S)


def _write(url: str, path: Path, hosts: Collection[str], where: str, end: float) -> None:
    """Write the content of a URL to a file. end: the time of `time.monotonic` at which Refused is raised"""
    opener = urllib.request.build_opener(_AllowedRedirects(hosts, where))
    parts = urlsplit(url)
    quoted = parts._replace(path=quote(parts.path, _AS_WRITTEN), query=quote(parts.query, _AS_WRITTEN))
    wanted = urllib.request.Request(quoted.geturl(), headers={"User-Agent": "verl"})
    timeout_s = min(TIMEOUT_S, _left_s(url, where, end))
    with opener.open(wanted, timeout=timeout_s) as answer, path.open("wb") as out:
        left = MAX_BYTES
        while chunk := answer.read1(_CHUNK):  # what has arrived: `read` waits for the whole chunk
            left -= len(chunk)
            if left < 0:
                raise Refused(f"{where}: {url[:120]}: more than {MAX_BYTES} bytes. Fix: a smaller file")
            out.write(chunk)
            _left_s(url, where, end)
        announced = answer.headers.get("Content-Length")
        if announced is not None and not announced.isdecimal():
            raise ValueError(f"the server answers Content-Length: {announced[:40]}")
        if announced is not None and int(announced) != MAX_BYTES - left:
            raise http.client.IncompleteRead(b"", int(announced))


def _left_s(url: str, where: str, end: float) -> float:
    """Return the seconds until `end`. Raise Refused if there are none."""
    if (left := end - time.monotonic()) > 0:
        return left
    fix = "a host that is faster, or a path of a file"
    raise Refused(f"{where}: {url[:120]} is not downloaded after {TOTAL_S:g} s. Fix: {fix}")


class _AllowedRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirections to hosts that are allowed."""

    def __init__(self, hosts: Collection[str], where: str) -> None:
        self._hosts, self._where = hosts, where

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        _refuse_host(newurl, self._hosts, f"{self._where}: {req.full_url[:120]} is redirected")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _refuse_host(url: str, hosts: Collection[str], where: str) -> None:
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port
    except ValueError as e:  # a bracket without the other one, or a port that is no number
        raise Refused(f"{where}: {url[:120]}: {e}. Fix: the URL, or a path of a file") from e
    if host not in hosts:
        allowed = f"{_setting(hosts)}: another host" if hosts else "media are downloaded from no host"
        fix = f"download the files, and name their paths; or {_setting([*hosts, host])}"
        raise Refused(f"{where}: {url[:120]}: {allowed}. Fix: {fix}")


def _setting(hosts: Collection[str]) -> str:
    """Return the key with these hosts as a command line has it."""
    return f"{KEY}=[{','.join(map(text_of, hosts))}]"


def _failed(url: str, where: str, why: object) -> Refused:
    return Refused(f"{where}: {url[:120]} cannot be downloaded: {why}. Fix: the URL, or a path of a file")
