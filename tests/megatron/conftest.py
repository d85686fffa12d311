"""What is here runs in an environment with Megatron-Core (`make test-megatron`), and is left out elsewhere."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "distributed"), str(TESTS / "numerics"), str(TESTS)]
collect_ignore_glob = [] if importlib.util.find_spec("megatron") else ["test_*.py"]
