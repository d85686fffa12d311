"""The peers' own numbers. VERL_GOLDEN_DIR may name any other directory of the same format (manifest.json + npz)."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from golden_adapters import ADAPTERS as POLICY
from golden_adapters import case_metrics
from golden_preference import ADAPTERS as PREFERENCE

GOLDEN = Path(os.environ.get("VERL_GOLDEN_DIR", Path(__file__).parent / "golden"))
ADAPTERS = {**POLICY, **PREFERENCE}
MANIFEST = json.loads((GOLDEN / "manifest.json").read_text())
CASES = MANIFEST["cases"]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["file"].removesuffix(".npz"))
def test_golden(case):
    adapter = ADAPTERS.get(case["function"])
    if adapter is None:
        pytest.skip(f"no row of the table computes {case['function']!r} yet")
    arrays = dict(np.load(GOLDEN / case["file"], allow_pickle=True))
    got = adapter(arrays, case["hyperparameters"])
    assert got, "an adapter that compares nothing proves nothing"
    rtol = 1e-5 if "float32" in (case.get("notes") or "") else 1e-6
    for name, value in got.items():
        expected = case_metrics(arrays)[name.removeprefix("metric:")] if name.startswith("metric:") else arrays[name]
        np.testing.assert_allclose(value, expected, rtol=rtol, atol=1e-9, err_msg=f"{case['file']}: {name}")


def test_the_algorithms_of_this_version_are_covered():
    assert all(c["function"] in ADAPTERS for c in CASES) or "VERL_GOLDEN_DIR" in os.environ
