"""Exploration noise of the rollout: its schedule from the options of the engine, and configurations that it does not
fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from verl.algorithms.filters import Correction
from verl.algorithms.presets import settled
from verl.config.backends import options_of
from verl.config.schema import Config
from verl.rollout.noise import NoiseSchedule

KEY = "rollout.engine_options.noise_"


@runtime_checkable
class HasNoise(Protocol):
    """The options of a rollout engine that has noise."""

    noise_sigma_start: float | None
    noise_sigma_end: float | None


def noise_of(config: Config) -> NoiseSchedule | None:
    """Return the schedule of the noise, or None for a rollout without noise. The configuration must be validated."""
    options = options_of(config, "rollout")
    if not isinstance(options, HasNoise) or options.noise_sigma_start is None:
        return None
    start, end = options.noise_sigma_start, options.noise_sigma_end
    assert config.run.total_steps is not None, "a fault of the configuration"
    return NoiseSchedule(
        seed=config.run.seed,
        sigma_start=start,
        sigma_end=start if end is None else end,
        steps=config.run.total_steps,
        sync_every=config.pipeline.sync_every,
    )


def corrects(correction: Correction | None) -> bool:
    """Return True if the loss accounts for a rollout that samples from another distribution than the trainer's: by
    importance weights, or by a ratio to the sampler's log-probs."""
    return correction is not None and (correction.form is not None or correction.bypass)


def noise_faults(config: Config) -> Iterator[str]:
    """Yield a line for each fault of the noise, or of a configuration that it does not fit."""
    options = options_of(config, "rollout")
    assert isinstance(options, HasNoise), "the faults of an engine with noise"
    start, end = options.noise_sigma_start, options.noise_sigma_end
    if start is None:
        if end is not None:
            yield f"{KEY}sigma_end={end:g} without noise does nothing: set {KEY}sigma_start, or leave it out"
        return
    if end is not None and end > start:
        yield f"{KEY}sigma_end={end:g} is above {KEY}sigma_start={start:g}: noise falls during a run; swap them"
    if config.run.total_steps is None:
        yield f"{KEY}sigma_start={start:g}: its stages are tenths of the run; set run.total_steps"
    given = config.algorithm.given()
    if not corrects(settled(config.algorithm.name, given).correction):
        why = "answers are sampled by other weights than the trainer's, and no correction of this algorithm weighs them"
        fix = "set algorithm.correction=truncate algorithm.options.correction_high=2, or leave the noise out"
        yield f"{KEY}sigma_start={start:g} with algorithm.name={config.algorithm.name}: {why}; {fix}"
