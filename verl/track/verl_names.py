"""The metrics of a step under the names that verl writes, for existing dashboards. verl's entry points use it."""

from __future__ import annotations

from collections.abc import Mapping

SAME: Mapping[str, str] = {
    "timing_s/gen": "timing_s/rollout",
    "timing_s/reward": "timing_s/reward_model",
    "timing_s/old_log_prob": "timing_s/old_logprobs",
    "timing_s/ref": "timing_s/reference",
    "timing_s/adv": "timing_s/advantages",
    "timing_s/update_actor": "timing_s/update",
    "timing_s/update_weights": "timing_s/publish",
    "timing_s/testing": "timing_s/evaluate",
    "timing_s/save_checkpoint": "timing_s/checkpoint",
    "timing_s/step": "perf/time_per_step",
    "rollout_corr/kl": "mismatch/k1",
    "rollout_corr/k3_kl": "mismatch/k3",
    **{f"response_length_non_aborted/{how}": f"response_length/{how}" for how in ("mean", "max", "min", "clip_ratio")},
    **{f"global_seqlen/{how}": "perf/total_num_tokens" for how in ("min", "max", "mean")},
    **{f"global_seqlen/balanced_{how}": "perf/total_num_tokens" for how in ("min", "max")},
}
"""verl's name -> our name. global_seqlen is counted per data-parallel rank, of which there is one. Answers without a
token are invalid and never trained here, so that no trained answer counts as aborted."""
PER_TOKEN = ("gen", "ref", "values", "adv", "update_critic", "update_actor")
"""Phases of which verl also reports ms per token: per token of answers for gen, per token of all sequences for the
others."""


def verl_names(values: Mapping[str, float], answer_tokens: float) -> dict[str, float]:
    """Return the further numbers that verl would write for `values`, the metrics of one step."""
    out = {theirs: values[ours] for theirs, ours in SAME.items() if ours in values and theirs not in values}
    if "global_seqlen/min" in out:
        out["global_seqlen/minmax_diff"] = out["global_seqlen/max"] - out["global_seqlen/min"]
    if "timing_s/gen" in out:
        out.setdefault("timing_s/reward", 0.0)  # functions score beside the rollout, within its time
    if "response_length/mean" in values:
        out["response/aborted_ratio"] = 0.0
    every = {**values, **out}
    for phase in PER_TOKEN:
        tokens = answer_tokens if phase == "gen" else values.get("perf/total_num_tokens", 0.0)
        if f"timing_s/{phase}" in every and tokens:
            out[f"timing_per_token_ms/{phase}"] = 1000 * every[f"timing_s/{phase}"] / tokens
    return out
