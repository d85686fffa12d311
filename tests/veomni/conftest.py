"""The tests of this folder need VeOmni, and so another transformers: `make test-veomni` makes their environment."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("distributed", "numerics", ".")]
collect_ignore = [] if find_spec("veomni") else ["test_veomni.py"]
