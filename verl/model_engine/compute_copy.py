"""The copy of the parameters that computes: in bfloat16, beside the float32 parameters (masters) that are trained.

Autocast casts every weight in every pass, and keeps the residual stream, queries and keys in float32. With a copy the
whole forward pass is in bfloat16, as in the rollout engine, and the cast is done once per optimizer step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn


class ComputeCopy:
    """A copy of the parameters of `module` in `dtype`. It is made when it is first used, and again after a master has
    changed. Parameters that the model's class keeps in float32 are not copied. keeps: the copy stays in memory between
    passes; otherwise it is made and freed by each context.

    A change of a master is found by torch's version counter of the tensor, which `optim.step` increments."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, *, keeps: bool) -> None:
        self._module, self._dtype, self._keeps = module, dtype, keeps
        self.lender: ComputeCopy | None = None  # of a module with the same frozen parameters, whose copies are used
        self._copies: dict[nn.Parameter, nn.Parameter] = {}
        self._versions: list[int] = []

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside the context the module has the copy in place of its parameters. The gradients of the copy are
        accumulated in the dtype of the masters, into the gradients of the masters."""
        self._refresh()
        masters = {copy: master for master, copy in self._copies.items()}
        for copy, master in masters.items():
            copy.grad = master.grad
        self._put(self._copies)
        try:
            yield
        finally:
            self._put(masters)
            for copy, master in masters.items():
                master.grad, copy.grad = copy.grad, None
            if not self._keeps:
                self._copies.clear()

    def frozen(self) -> dict[nn.Parameter, nn.Parameter]:
        """Return the copies of the parameters that are not trained."""
        self._refresh()
        return {master: copy for master, copy in self._copies.items() if not master.requires_grad}

    def _put(self, instead: dict[nn.Parameter, nn.Parameter]) -> None:
        """Replace parameters of the module. Tied parameters stay one."""
        for module in self._module.modules():
            for name, p in module._parameters.items():
                if p is not None and p in instead:
                    module._parameters[name] = instead[p]

    @torch.no_grad()
    def _refresh(self) -> None:
        every = copied_parameters(self._module)
        versions = [p._version for p in every]
        if self._copies.keys() == {*every}:
            for p, before, now in zip(every, self._versions, versions, strict=True):
                if before != now:
                    self._copies[p].copy_(p)
        else:
            lent = {} if self.lender is None else self.lender.frozen()
            self._copies = {p: lent[p] if p in lent else _leaf(p, self._dtype) for p in every}
        self._versions = versions


def copied_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that have a copy: all but those that the model's class keeps in float32."""
    exact: Sequence[str] = getattr(module, "_keep_in_fp32_modules_strict", None) or ()
    named = module.named_parameters()
    return [p for name, p in named if p.is_floating_point() and not {*exact} & {*name.split(".")}]


def _leaf(master: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    copy = nn.Parameter(master.detach().to(dtype), master.requires_grad)
    copy.grad_dtype = master.dtype
    return copy
