"""The peers' own numbers. VERL_GOLDEN_DIR may name any other directory of the same format (manifest.json + npz)."""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from each import check_each

sys.path.insert(0, str(Path(__file__).parent))
from golden_adapters import ADAPTERS as POLICY
from golden_adapters import case_metrics
from golden_preference import ADAPTERS as PREFERENCE

GOLDEN = Path(os.environ.get("VERL_GOLDEN_DIR", Path(__file__).parent / "golden"))
ADAPTERS = {**POLICY, **PREFERENCE}
MANIFEST = json.loads((GOLDEN / "manifest.json").read_text())
CASES = MANIFEST["cases"]


NEUTRAL = {
    "garbage_padding": (False, True),  # what the case's inputs hold
    "loss_agg_mode": ("token-mean",),  # verl's GMPO reads none
    "clip_ratio_low": (0.2,),
    "clip_ratio_high": (0.2,),
    "clip_ratio_c": (3.0,),
    "bypass_mode": (False,),
    "_target_": ("",),
    "label_smoothing": (0.0,),
    "simpo_gamma": (0.5,),
    "delta": (None,),
    "use_bias_correction_kl": (False,),
    "importance_sampling_level": ("token",),
    "multi_objective_aggregation": ("sum_then_normalize",),
    "atol": (1e-6,),
    "replacement": (True,),
    "use_kl_in_reward": (False,),
    "use_on_policy_kl_approximation": (False,),
    "reference_policy_kl_type": ("k3",),
    "kl_input_clamp_value": (20.0,),
    "kl_output_clamp_value": (10.0,),
    "ratio_clip_c": (None,),
    **dict.fromkeys(("truncated_importance_sampling_type", "truncated_importance_sampling_ratio"), (None,)),
    "truncated_importance_sampling_ratio_min": (None,),
}
"""Values that say nothing where no adapter asks for them; any other value of these is refused."""
IDLE = ("clip_ratio", "loss_mode", "discopop_tau", "num_samples")
"""Given beside what counts: verl's dead key, and the function's own name."""
RESTATED = (
    *(f"in_{ref}{side}_logps" for ref in ("", "ref_") for side in ("chosen", "rejected")),
    *("in_chosen_len", "in_rejected_len", "in_logps"),
)
"""Inputs that are sums of others, which the adapter reads."""


class Read(Mapping):
    """Hyper-parameters or arrays of a case, with those that an adapter looked at."""

    def __init__(self, values):
        self._values = {k: Read(v) if isinstance(v, dict) else v for k, v in values.items()}
        self._seen = set()

    def __contains__(self, key):
        return key in self._values

    def __getitem__(self, key):
        self._seen.add(key)
        return self._values[key]

    def __iter__(self):
        return iter(self._values)

    def __len__(self):
        return len(self._values)

    def unread(self) -> list[str]:
        """Inputs that no adapter looked at."""
        return [k for k in self._values if k.startswith("in_") and k not in (*self._seen, *RESTATED)]

    def ignored(self) -> dict:
        """What no adapter asked for, and what is not known to say nothing."""
        unasked = {k: v for k, v in self._values.items() if k not in (*self._seen, *IDLE)}
        out = {k: v for k, v in unasked.items() if v not in NEUTRAL.get(k, ())}
        for k, v in self._values.items():
            if isinstance(v, Read) and k in self._seen and v.ignored():
                out[k] = v.ignored()
        return out


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
