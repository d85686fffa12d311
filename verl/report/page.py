"""`report.html`: a self-contained page about a run. It loads nothing else; its data are embedded as JSON."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from verl.report.data import RunReader
from verl.track.files import write_atomic
from verl.track.log import Note, logger

REPORT_FILE = "report.html"
_SCRIPTS = ("charts.js", "samples.js", "report.js")
_SLOT = re.compile(r"\{\{(\w+)\}\}")
_UNSAFE = {ord(char): f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"}


def write_report(run_dir: Path, note: Note = logger.warning) -> Path:
    """Write `report.html` of a run directory, finished or not, and return its path. `note` is called with a line about
    each damaged file, which is left out."""
    path = run_dir / REPORT_FILE
    page = render_page(RunReader(run_dir, note).payload())
    write_atomic(path, page.encode("utf-8", "replace"))
    return path


def render_page(payload: Mapping[str, Any], *, live: Mapping[str, Any] | None = None) -> str:
    """Return the HTML page with its data.

    live: {version, poll_s} if a server answers the page's polls
    """
    room = files("verl.report")
    scripts = "\n".join((room / name).read_text("utf-8") for name in _SCRIPTS)
    assert "</script" not in scripts, "the page's own scripts may not close their tag"
    parts = {
        "title": html.escape(f"{payload['run']['name']} · verl"),
        "style": (room / "report.css").read_text("utf-8"),
        "script": scripts,
        "data": json_in_script(payload),
        "live": json_in_script(live),
        "connect": "'self'" if live is not None else "'none'",
    }
    template = (room / "report.html").read_text("utf-8")
    return _SLOT.sub(lambda slot: parts[slot[1]], template)


def json_in_script(value: Any) -> str:
    """Return a value as JSON without character sequences that would end the script element around it."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.translate(_UNSAFE)
