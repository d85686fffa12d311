"""Losses as Terms: functions that return per-token (or per-sequence) values and never sum, never scale.

The division is done once, by the weight columns of `weights.py`; a term cannot see how a batch was split
(algorithms.md sections 2 and 3; pitfalls 3). Inputs outside the mask are already 0 when a term is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from verl.batch import Columns
from verl.types import Kind

LOG_RATIO_BOUND = 20.0  # log-ratios are clamped here before exp; no gradient outside (section 0)


@dataclass(frozen=True, slots=True)
class TermValue:
    """values [L] (unit token) or [S] (unit sequence); metrics name -> (values of the same unit, kind of reduction)."""

    values: Tensor
    metrics: Mapping[str, tuple[Tensor, Kind]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One additive part of a loss: sum over its unit of weight x value.

    outputs: what of the model it needs (logprobs, entropy, values) · inputs: stored columns it needs ·
    over: a sequence column of bool that restricts it (None: all) · two_pass: its values depend on statistics over the
    whole optimizer step, so the engine evaluates it on all log-probs first and back-propagates dL/dlogp ·
    corrected: its weights are multiplied by the column `is_weights` when there is one.
    """

    name: str
    fn: Callable[[Columns], TermValue]
    coef: float = 1.0
    unit: Literal["token", "sequence"] = "token"
    aggregate: str = "token-mean"
    horizon_tokens: int | None = None
    over: str | None = None
    outputs: tuple[str, ...] = ("logprobs",)
    inputs: tuple[str, ...] = ()
    two_pass: bool = False
    corrected: bool = False


def log_ratio(new: Tensor, old: Tensor) -> Tensor:
    """new - old in at least float32, clamped to +-20."""
    return (new - old.to(new.dtype)).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def old_logprobs(columns: Columns) -> Tensor:
    """The proximal policy. Without the column the policy has not moved since the step began: the current one, detached."""
    return columns["old_logprobs"] if "old_logprobs" in columns else columns["logprobs"].detach()


def ppo_clip(columns: Columns, *, clip_low: float = 0.2, clip_high: float = 0.2, clip_dual: float | None = None) -> TermValue:
    """PPO clip, clip-higher and dual clip (2.1; 1707.06347, 2503.14476, 1912.09729).

    max(-A r, -A clip(r, 1-low, 1+high)); with dual clip c > 1 and A < 0 at most -c A.
    """
    a = columns["advantages"].to(columns["logprobs"].dtype)
    d = log_ratio(columns["logprobs"], old_logprobs(columns))
    r = d.exp()
    plain, clipped = -a * r, -a * r.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(plain, clipped)
    metrics: dict[str, tuple[Tensor, Kind]] = {
        "pg_clipfrac": ((clipped > plain).to(a.dtype), "mean"),
        "ppo_kl": (-d.detach(), "mean"),
    }
    if clip_dual is not None:
        bound = -clip_dual * a
        metrics["pg_clipfrac_lower"] = (((loss > bound) & (a < 0)).to(a.dtype), "mean")
        loss = torch.where(a < 0, torch.minimum(loss, bound), loss)
    return TermValue(loss, metrics)


def reinforce(columns: Columns) -> TermValue:
    """-A log pi (2.9)."""
    return TermValue(-columns["advantages"].to(columns["logprobs"].dtype) * columns["logprobs"])


KL_FORMS = ("k1", "abs", "k2", "k3")
KL_ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


def kl_form(name: str) -> str:
    """Canonical name of a KL form (verl's names accepted), with its + suffix."""
    base, plus = name.removesuffix("+"), "+" if name.endswith("+") else ""
    base = KL_ALIASES.get(base, base)
    if base not in KL_FORMS:
        raise ValueError(f"KL form {name!r} is unknown; known: {', '.join(KL_FORMS)} (+ for the k2 gradient)")
    return base + plus


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, form: str, *, value_bound: float | None = None) -> Tensor:
    """Per-token KL(pi || ref) from a sample of pi (3.1). `+`: value of the form, gradient of k2 (straight-through).

    The log-ratio of k3 is clamped to +-20. `value_bound`=10 is verl's clamp of the value, which takes the pull away from
    the tokens that drifted most (quirk Q10); off by default.
    """
    form = kl_form(form)
    x = logprobs - ref_logprobs.to(logprobs.dtype)
    base = form.removesuffix("+")
    if base == "k1":
        value = x
    elif base == "abs":
        value = x.abs()
    elif base == "k2":
        value = 0.5 * x * x
    else:
        y = (-x).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        value = y.exp() - y - 1
        if value_bound is not None:
            value = value.clamp(-value_bound, value_bound)
    if form.endswith("+"):
        gradient = 0.5 * x * x
        return gradient - gradient.detach() + value.detach()
    return value


def kl_loss(columns: Columns, *, form: str = "k3") -> TermValue:
    """KL to the reference as a loss (3.3)."""
    value = kl_estimate(columns["logprobs"], columns["ref_logprobs"], form)
    return TermValue(value, {"kl_loss": (value.detach(), "mean")})


def entropy_bonus(columns: Columns) -> TermValue:
    """-H: a positive coefficient raises the entropy (2.12)."""
    return TermValue(-columns["entropy"])


def nll(columns: Columns) -> TermValue:
    """-log pi: supervised fine-tuning (section 4), and the positive-example term of VAPO with `over`."""
    return TermValue(-columns["logprobs"])
