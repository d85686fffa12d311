"""The optimizer of an engine: its state, its steps and their counters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from verl.batch import Batch
from verl.model_engine.dump import dump_batch
from verl.model_engine.local_model import LocalModel
from verl.model_engine.optim import copy_anew, learning_rate, step
from verl.model_engine.optimizers import Optimizer, make_optimizer
from verl.types import Metric, Metrics


class Updates:
    """The optimizer steps of a model. A non-finite gradient changes nothing; too many in a row stop the run."""

    def __init__(self, local: LocalModel) -> None:
        self._local, self._dump_dir = local, local.settings.dump_dir
        self.spec = local.settings.optim
        self.optimizer: Optimizer | None = None
        if self.spec is not None:
            text = local.model.config.get_text_config()
            self.optimizer = make_optimizer(local.trained(), self.spec, text, local.one_mesh_each, local.part_of)
        self.steps = self.skipped = 0
        self.copied = 0  # the version of the lagging copy

    def step(self, last: tuple[Batch, Sequence[str]] | None) -> Metrics:
        """Clip the gradient and do an optimizer step. last: the batch of the gradient and the names of its terms; the
        batch is written to disk if the gradient is not finite."""
        assert self.optimizer is not None and self.spec is not None
        norm, params = self._local.grad_norm(), self._local.trained_parts()
        lr = learning_rate(self.spec, self.steps)
        finite = bool(torch.isfinite(norm))
        if finite:
            if self.spec.clip_grad_norm > 0:
                torch.nn.utils.clip_grads_with_norm_(params, self.spec.clip_grad_norm, norm)
            for group in self.optimizer.param_groups:
                group["lr"] = lr * group["lr_scale"]
            step(self.optimizer, self.spec.average)
            self.steps += 1
            self.skipped = 0
        else:
            self._refuse(float(norm), last)
        self.optimizer.zero_grad(set_to_none=True)
        return {
            "grad_norm": Metric(float(norm) if finite else 0.0, 1, "update"),
            "lr": Metric(lr, 1, "update", "last"),
            "skipped_updates": Metric(0.0 if finite else 1.0, 1, "update", "sum"),
        }

    def _refuse(self, norm: float, last: tuple[Batch, Sequence[str]] | None) -> None:
        """Skip the update of a non-finite gradient and write its batch to disk. Raise FloatingPointError after too many
        in a row."""
        assert self.optimizer is not None and self.spec is not None
        self.skipped += 1
        where = "nowhere (no dump directory)"
        if self._dump_dir is not None and last is not None:
            name = f"nonfinite_update_{self.steps}_{self.skipped}{self._local.suffix}.pt"
            where = dump_batch(self._dump_dir / name, *last, norm)
        if self.skipped > self.spec.max_skipped_updates:
            self.optimizer.zero_grad(set_to_none=True)
            raise FloatingPointError(
                f"gradient norm is {norm} for the {self.skipped}th update in a row "
                f"(limit model.engine_options.max_skipped_updates={self.spec.max_skipped_updates}); "
                f"the weights are unchanged, the last batch is in {where}"
            )

    def copies(self, version: int) -> bool:
        """Return True if the lagging copy of the weights is due at this version."""
        return bool(self.spec and (lag := self.spec.average) > 1 and version % lag == 0 and version > self.copied)

    def copy(self, version: int) -> None:
        """Replace the lagging copy by the present weights, as of this version."""
        copy_anew(self.optimizer)
        self.copied = version

    def tensors(self) -> list[Tensor]:
        """Return this process's storage of all states."""
        states = self.optimizer.state.values() if self.optimizer is not None else ()
        return [self._local.local(t) for state in states for t in state.values() if t.ndim]
