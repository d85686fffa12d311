"""The sections of the configuration that algorithms bring: critic, teacher, and preference training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any
from urllib.parse import unquote, urlsplit

from verl.algorithms.presets import PREFERENCES
from verl.bounds import NonNegative, NonNegativeInt, Positive, PositiveInt, Share, adjustable, one_of

TEACHER = "teacher"
POLICY = "policy"
"""The value of `teacher.path` with which the policy teaches itself."""


def is_url(path: str) -> bool:
    return path.startswith(("http://", "https://"))


def split_key(path: str) -> tuple[str, str]:
    """Return a URL without its key, and the key of its server ("" without one). In http://:KEY@HOST:PORT the key is
    taken as it is, whatever characters it has; in http://USER:KEY@HOST:PORT %XX is a character. Folders are returned as
    they are."""
    scheme, _, rest = path.partition("://")
    if is_url(path) and rest.startswith(":") and "@" in rest:
        key, _, host = rest[1:].rpartition("@")
        return f"{scheme}://{host}", key
    parts = urlsplit(path)
    if not is_url(path) or "@" not in parts.netloc:
        return path, ""
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl(), unquote(parts.password or "")


@dataclass(frozen=True)
class CriticConfig:
    path: str | None = None
    """A Hugging Face folder for the value model. Null: model.path. A value head that it lacks starts at 0."""
    lr: Positive = adjustable(1e-5)
    weight_decay: NonNegative = 0.01
    clip_grad_norm: Positive = 1.0
    warmup_steps: NonNegativeInt = adjustable(0)  # Optimizer steps of the learning rate's warm-up.
    warmup_ratio: Share = adjustable(0.0)  # Share of all its optimizer steps that warms up, where `warmup_steps` is 0.


@dataclass(frozen=True)
class TeacherConfig:
    """The teachers of opd, gkd and gkd_topk: frozen models beside the policy (the role `teacher`), or the policy itself
    with a context that it does not have when it answers."""

    path: str | None = None
    """Its Hugging Face folder, that of a LoRA adapter, or the URL of a server (http://:${oc.env:KEY}@HOST:PORT, with a
    key); it reads the policy's tokens. `policy`: the policy as it is."""
    paths: dict[str, str] = field(default_factory=dict)  # Several, by their names; each is a role, `teacher_NAME`.
    pick: Annotated[str, one_of("task|best|mix")] = "task"
    """The use of several. task: the one that the row's column `teacher` names, else its data_source · best: for each
    answer, the one that finds it likeliest · mix: their mixture (opd)."""
    weights: dict[str, float] = field(default_factory=dict)  # pick=mix: shares by name. Empty: equal ones.
    hint_key: str | None = None
    """A column that the teacher reads and the policy does not: text is appended to the last user message, messages
    are the whole prompt. `attempt.feedback`: the feedback of the reward function or the environment on the attempt
    itself."""
    ema: NonNegative = 0.0
    """With path=policy the teacher is the average of its weights, with this decay per optimizer step; from 2 on, a copy
    which is taken anew after so many publishes. 0: the weights as they are."""
    temperature: Positive | None = None  # Of the teacher. Null: that of the sample, as the policy's.
    top_k: PositiveInt = 64  # gkd_topk: its likeliest tokens; all others are one more outcome.

    def roles(self) -> dict[str, str]:
        """The folder or URL of each role that is a teacher with workers of its own."""
        if self.paths:
            return {f"{TEACHER}_{name}": path for name, path in self.paths.items()}
        return {TEACHER: self.path} if self.path is not None and self.path != POLICY else {}

    def folders(self) -> dict[str, str]:
        """Return the folder of each role with a model that is computed in this run."""
        return {role: path for role, path in self.roles().items() if not is_url(path)}

    def shares(self) -> dict[str, float]:
        """Return the shares of a mixture, by name; they sum to 1."""
        given = self.weights or dict.fromkeys(self.paths, 1.0)
        return {name: given[name] / sum(given.values()) for name in self.paths}


@dataclass(frozen=True)
class PreferenceConfig:
    loss: Annotated[str, one_of("|".join(PREFERENCES))] = "dpo"  # Of `verl dpo`.
    beta: Positive | None = None  # Null: the loss's own (0.1 for most).
    options: dict[str, Any] = field(default_factory=dict)
    """Options that only some losses have: label_smoothing, alpha, gamma, eta, average, normalization, ..."""
    center_coef: NonNegative = 0.0  # verl rm: weight of (r_chosen + r_rejected)^2, to keep scores around 0 (0.01).
    use_margin: bool = False  # verl rm: subtract the rows' margin (or their scores' difference) inside the sigmoid.
