"""The peers' own numbers. VERL_GOLDEN_DIR may name any other directory of the same format (manifest.json + npz)."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from each import check_each

sys.path.insert(0, str(Path(__file__).parent))
from golden_adapters import ADAPTERS as POLICY
from golden_adapters import Read, case_metrics
from golden_preference import ADAPTERS as PREFERENCE

GOLDEN = Path(os.environ.get("VERL_GOLDEN_DIR", Path(__file__).parent / "golden"))
ADAPTERS = {**POLICY, **PREFERENCE}
MANIFEST = json.loads((GOLDEN / "manifest.json").read_text())
CASES = MANIFEST["cases"]


def golden(case):
    arrays = Read(dict(np.load(GOLDEN / case["file"], allow_pickle=True)))
    given = Read(case["hyperparameters"])
    got = ADAPTERS[case["function"]](arrays, given)
    assert not arrays.unread(), f"{case['file']}: inputs that no adapter reads: {arrays.unread()}"
    assert not given.ignored(), f"{case['file']}: hyper-parameters that no adapter understands: {given.ignored()}"
    assert got, "an adapter that compares nothing proves nothing"
    rtol = 1e-5 if "float32" in (case.get("notes") or "") else 1e-6
    for name, value in got.items():
        expected = case_metrics(arrays)[name.removeprefix("metric:")] if name.startswith("metric:") else arrays[name]
        np.testing.assert_allclose(value, expected, rtol=rtol, atol=1e-9, err_msg=f"{case['file']}: {name}")


def test_golden():
    check_each([c for c in CASES if c["function"] in ADAPTERS], golden, lambda c: c["file"].removesuffix(".npz"))
    if strange := {c["function"] for c in CASES} - set(ADAPTERS):
        pytest.skip(f"no row of the table computes {', '.join(sorted(strange))} yet")


def test_the_algorithms_of_this_version_are_covered():
    assert all(c["function"] in ADAPTERS for c in CASES) or "VERL_GOLDEN_DIR" in os.environ


def test_an_option_that_no_adapter_understands_is_refused():
    """Also a value of a known one that the adapter does not read, and one inside another."""
    seen = {"low": 0.2, "use_cispo": True, "garbage_padding": True, "nested": {"a": 1, "b": 2}}
    given = Read(seen)
    assert given["low"] and given["nested"]["a"]
    assert given.ignored() == {"use_cispo": True, "nested": {"b": 2}}
