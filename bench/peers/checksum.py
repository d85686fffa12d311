"""A reward for answers without sense: one bit of their text's checksum, the same in every arm and cheap."""

from __future__ import annotations

import zlib


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    return float(zlib.crc32(solution_str.encode("utf-8", "replace")) & 1)
