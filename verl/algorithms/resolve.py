"""From a preset and a user's settings to what runs: the advantage function and the terms. All of it can be pickled."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from verl.algorithms import estimators, losses, specs
from verl.algorithms.presets import Preset, settled
from verl.algorithms.settings import MEANT
from verl.algorithms.specs import function, short
from verl.batch import Columns
from verl.errors import Refused
from verl.names import did_you_mean
from verl.objective import Term, TermValue
from verl.types import Metric


@dataclass(frozen=True, kw_only=True)
class Algorithm(Preset):
    """A settled preset with its functions. `figures`: metrics of what the loss recorded · `value_terms`: the
    critic's."""

    advantage: Callable[[Columns], Mapping[str, Tensor]]
    figures: Callable[[Columns], Mapping[str, Metric]] | None
    terms: tuple[Term, ...]
    value_terms: tuple[Term, ...]

    def at(self, step: int) -> tuple[Algorithm, dict[str, float]]:
        """With the coefficients of this step, the first of which is 1, and those that have a schedule by their keys."""
        settings, factors = self.settings(), self.loss.factors(step)
        now = {key: settings[key] * factor for key, factor in factors.items()}
        terms = tuple(replace(t, coef=now.get(COEFFICIENTS.get(t.name, ""), t.coef)) for t in self.terms)
        advantage = self.advantage
        if isinstance(advantage, partial):
            own = {key: value for key, value in now.items() if key in advantage.keywords}
            advantage = partial(advantage, **own)
        return replace(self, terms=terms, advantage=advantage), now


COEFFICIENTS = {
    "kl_loss": "kl_loss_coef",
    "divergence_loss": "divergence_coef",
    "entropy_loss": "entropy_coef",
    "positive_nll": "positive_nll_coef",
    "observation_loss": "observation_coef",
}
"""Term -> the setting that is its coefficient."""


def resolve(name: str, given: Mapping[str, Any] | None = None) -> Algorithm:
    """The algorithm `name` with the given settings in place of the preset's. None means: the preset's value. `loss` and
    `advantage` may be a user's own `module:function` (or such a function itself): fn(Columns) -> TermValue or [L]
    values, and fn(Columns) -> {"advantages": [L]}. They must be importable, since every worker imports them."""
    settings = {k: _path(v, f"algorithm.{k}") if callable(v) else v for k, v in (given or {}).items()}
    preset = settled(name, settings)
    estimate = _importable(preset.estimator.fn, "algorithm.advantage")
    parts, arguments = {f.name: getattr(preset, f.name) for f in fields(Preset)}, preset.estimator.settings()
    advantage = partial(estimate, **arguments) if arguments else estimate
    judged = "teacher_logprobs" in preset.estimator.inputs
    if judged and not isinstance(preset.estimator, specs.OPD):
        advantage = partial(estimators.with_teacher, inner=advantage)
    found = [partial(estimators.of_teacher, name=f"train_{name}") for name in preset.loss.recorded if not judged]
    return Algorithm(
        **parts,
        advantage=advantage,
        figures=found[0] if found else None,
        terms=_terms(preset),
        value_terms=_value_terms(preset),
    )


def _terms(preset: Preset) -> tuple[Term, ...]:
    spec, correction = preset.loss, preset.correction
    fn: Callable[[Columns], TermValue] = _importable(spec.fn, "algorithm.loss")
    inputs, outputs = spec.inputs, spec.outputs
    if spec.arguments():
        fn = partial(fn, **spec.arguments())
    if ":" in short(spec.fn):  # a user's own
        _try(fn, spec.fn, preset)
        fn = partial(own_loss, fn=fn)
    scaled = "advantages" if short(spec.fn) in losses.SCALED_BY_ADVANTAGE else None
    own: dict[str, Any] = {"corrected": spec.corrected, "two_pass": spec.two_pass, "scaled_by": scaled}
    bypass = correction is not None and correction.bypass
    if bypass or spec.corrected == "own":
        own["corrected"] = "no"
    if correction is not None and bypass and short(spec.fn) == "reinforce":
        # weights of the current policy, on the mask before rejection
        kept = ("keep",) if correction.of_step or (preset.truncation and preset.truncation.mask_truncated) else ()
        fn, inputs = partial(losses.bypass_reinforce, correction=correction), (*inputs, "rollout_logprobs", *kept)
        own["sees_rejected"] = True
    elif correction is not None and correction.form is not None and spec.corrected == "own":
        level: Mapping[str, Any] = {"weighed": correction.level}
        fn, inputs = partial(fn, **level), (*inputs, "is_weights")
    if spec.off_policy_delta is not None:
        fn = partial(losses.off_policy_sequence_mask, inner=fn, delta=spec.off_policy_delta)
        inputs = tuple(dict.fromkeys((*inputs, "advantages", "rollout_logprobs")))
        outputs = tuple(dict.fromkeys((*outputs, "logprobs")))
    if spec.top_entropy_quantile is not None:
        fn = partial(losses.high_entropy, inner=fn, share=spec.top_entropy_quantile)
        outputs, own["two_pass"] = tuple(dict.fromkeys((*outputs, "entropy"))), True
    own["outputs"] = outputs
    common: dict[str, Any] = {
        "aggregate": spec.aggregation,
        "horizon_tokens": spec.horizon_tokens,
        "denominator": correction.denominator if correction else "after_rejection",
    }
    out = [Term(name="pg_loss", fn=fn, inputs=inputs, **own, **common)]
    if kl := preset.kl_loss:
        term = partial(losses.kl_loss, form=kl.form, ratio_corrected=kl.ratio_corrected)
        out.append(Term(name="kl_loss", fn=term, coef=kl.coef, inputs=("ref_logprobs",), **common))
    if d := preset.divergence:
        own = {"inputs": specs.GKDTopK.inputs, "outputs": specs.GKDTopK.outputs, **common}
        fn = partial(losses.gkd_topk, beta=d.beta, clamp=d.clamp, floor=d.floor)
        out.append(Term(name="divergence_loss", fn=fn, coef=d.coef, **own))
    if spec.entropy_coef:
        entropy = {"coef": spec.entropy_coef, "outputs": ("entropy",), **common}
        out.append(Term(name="entropy_loss", fn=losses.entropy_bonus, **entropy))
    if spec.positive_nll_coef:
        out.append(Term(name="positive_nll", fn=losses.nll, coef=spec.positive_nll_coef, over="positive"))
    if spec.observation_coef:
        out.append(Term(name="observation_loss", fn=losses.observation, coef=spec.observation_coef, unit="observation"))
    return tuple(out)


def _value_terms(preset: Preset) -> tuple[Term, ...]:
    if preset.critic is None:
        return ()
    fn = partial(losses.value_clip, clip=preset.critic.value_clip)
    return (Term(name="vf_loss", fn=fn, outputs=("values",), inputs=("returns", "old_values")),)


def own_loss(columns: Columns, *, fn: Callable[[Columns], Any]) -> TermValue:
    """A user's loss, which may return bare values."""
    found = fn(columns)
    return found if isinstance(found, TermValue) else TermValue(found)


def _path(fn: Callable[..., Any], key: str) -> str:
    """`module:function` of a function, where it can be imported by that name."""
    name = f"{getattr(fn, '__module__', None)}:{getattr(fn, '__qualname__', None)}"
    try:
        pickle.dumps(fn)
    except (pickle.PicklingError, AttributeError, TypeError):
        fix = f"define it with `def` at the top level of a module and give {key}=module:function"
        raise Refused(f"{key}={name} must be importable: {fix}") from None
    return name


def _importable(path: str, key: str) -> Callable[..., Any]:
    """The function at `module:name`, which every worker will import by its own name."""
    fn = function(path, key)
    if not callable(fn):
        raise Refused(f"{key}={path} is a {type(fn).__name__}, not a function of columns")
    _path(fn, key)
    return fn


class _MissingColumn(dict[str, Tensor]):
    """Columns that record the first missing name that is read."""

    missing: str | None = None

    def __missing__(self, name: str) -> Tensor:
        self.missing = self.missing or name
        raise KeyError(name)


def _try(fn: Callable[[Columns], Any], path: str, preset: Preset) -> None:
    """Refuse a loss that reads a missing column, by calling it on two tokens before a model is loaded."""
    names = ("logprobs", "entropy", *preset.columns())
    token = _MissingColumn({name: torch.full((2,), -0.5, dtype=torch.float64) for name in names})
    one = torch.zeros(2, dtype=torch.int64)
    token["mask"] = one == 0
    columns = Columns(token=token, sequence={}, sequence_of=one, num_sequences=1, mask=token["mask"])
    try:
        fn(columns)
    except Exception:  # user code on made-up numbers: only the name of a column that is not there is surely wrong
        if token.missing is not None:
            hint = did_you_mean(token.missing, names, form=MEANT)
            need = " (a KL term has it made: set algorithm.kl_loss_coef)" if token.missing == "ref_logprobs" else ""
            prefix = f"algorithm.loss={path} reads the column {token.missing!r}, which nobody writes"
            raise Refused(f"{prefix}{need}{hint}; there are: {', '.join(names)}") from None
