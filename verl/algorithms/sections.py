"""The sections of the configuration that algorithms bring: critic, teacher, and preference training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from verl.algorithms.presets import PREFERENCES
from verl.bounds import NonNegative, NonNegativeInt, Positive, PositiveInt, words


@dataclass
class CriticConfig:
    path: str | None = None
    """A Hugging Face folder for the value model. Null: model.path. A value head that it lacks starts at 0."""
    lr: Positive = 1e-5
    weight_decay: NonNegative = 0.01
    clip_grad_norm: Positive = 1.0
    warmup_steps: NonNegativeInt = 0  # Optimizer steps of the learning rate's warm-up.


@dataclass
class TeacherConfig:
    """Whom opd, gkd and gkd_topk learn from: a frozen model beside the policy, the role `teacher`."""

    path: str | None = None  # Its Hugging Face folder; it reads the policy's tokens.
    temperature: Positive | None = None  # Of the teacher. Null: that of the sample, as the policy's.
    top_k: PositiveInt = 64  # gkd_topk: its likeliest tokens; all others are one more outcome.


@dataclass
class PreferenceConfig:
    loss: Annotated[str, words("|".join(PREFERENCES))] = "dpo"  # Of `verl dpo`.
    beta: Positive | None = None  # Null: the loss's own (0.1 for most).
    options: dict[str, Any] = field(default_factory=dict)
    """What only some losses have: label_smoothing, alpha, gamma, eta, average, normalization, ..."""
    center_coef: NonNegative = 0.0  # verl rm: weight of (r_chosen + r_rejected)^2, to keep scores around 0 (0.01).
    use_margin: bool = False  # verl rm: subtract the rows' margin (or their scores' difference) inside the sigmoid.
