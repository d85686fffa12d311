"""The optimizer of a model: each parameter belongs to a role, and the table's row says how a role is updated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from verl.model_engine.optim import OptimSpec
from verl.model_engine.optimizer_table import LR, role_by_name, settings_of, updates_by_rule
from verl.model_engine.update_rules import Adam8bitRule, AdamMiniRule, ApolloRule, ByRule, MuonRule, Rule

Groups = Sequence[dict[str, Any]]


class Optimizer:
    """Several optimizers that update different parameters, used as one. They share the mapping of states."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self._parts = parts
        self.state: dict[Tensor, dict[str, Any]] = defaultdict(dict)
        for part in parts:
            part.state = self.state
        self.param_groups: list[dict[str, Any]] = [group for part in parts for group in part.param_groups]

    def step(self) -> None:
        for part in self._parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self._parts:
            part.zero_grad(set_to_none)

    def begin(self, p: nn.Parameter) -> dict[str, Tensor]:
        """Return the states that a parameter has before its first update, as tensors to load others into."""
        for part in self._parts:
            if any(p is one for group in part.param_groups for one in group["params"]):
                return part.rule.begin(p) if isinstance(part, ByRule) else _begin(part, p)
        raise AssertionError("a parameter that is not trained")

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"]]


def _begin(part: torch.optim.Optimizer, p: nn.Parameter) -> dict[str, Tensor]:
    """Return the first states of torch's own optimizers."""
    if isinstance(part, torch.optim.SGD):
        return {"momentum_buffer": torch.zeros_like(p)} if part.defaults["momentum"] else {}
    step = torch.zeros((), device=p.device)
    return {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}


def role_of(name: str, p: Tensor, embeddings: Iterable[Tensor]) -> str:
    """Return the role of a parameter, one of `optimizer_table.ROLES`. A head that is tied to the embeddings is one."""
    return role_by_name(name, p.ndim, embedding=any(p is one for one in embeddings))


def make_optimizer(
    trained: nn.Module,
    spec: OptimSpec,
    config: Any = None,
    split: Callable[[Groups], Groups] = list,
    part_of: Callable[[str], str | None] = lambda name: None,
) -> Optimizer:
    """Build the optimizer of the trained parameters. One-dimensional tensors (norms, biases) have no weight decay.

    config: the model's configuration, for the size of its heads · split: makes groups of parameters that are spread
    over the same ranks · part_of: returns the part of a model that reads images to which a parameter belongs
    """
    named = {name: p for name, p in trained.named_parameters() if p.requires_grad}
    embeddings = [m.weight for m in trained.modules() if isinstance(m, nn.Embedding)]
    groups: dict[tuple[str, str, bool], list[nn.Parameter]] = defaultdict(list)
    rates = spec.options.get(LR, {})
    for name, p in named.items():
        role, part = role_of(name, p, embeddings), part_of(name)
        rated = part if part is not None and part in rates else role
        kind = spec.name if updates_by_rule(spec.name, role, p.ndim) else "adamw"
        groups[kind, rated, p.ndim > 1].append(p)
    parts: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for (kind, role, decayed), params in groups.items():
        group = {"params": params, "weight_decay": spec.weight_decay if decayed else 0.0}
        parts[kind].append(
            group | {"lr": spec.lr, "lr_scale": rates[role] / spec.lr if role in rates else 1.0, **_common(spec)}
        )
    return Optimizer([_part(kind, split(one), spec, named, config) for kind, one in parts.items()])


def _common(spec: OptimSpec) -> dict[str, Any]:
    return {"betas": spec.betas, "eps": spec.eps}


def _part(
    kind: str, groups: Groups, spec: OptimSpec, named: dict[str, nn.Parameter], config: Any
) -> torch.optim.Optimizer:
    if kind == "adamw":
        return torch.optim.AdamW(groups, lr=spec.lr, fused=True)
    settings = settings_of(spec.name, spec.options)
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=spec.lr, momentum=settings.momentum, nesterov=settings.nesterov)
    if kind == "muon":
        return ByRule(groups, MuonRule(settings))
    if kind == "adamw_8bit":
        return ByRule(groups, Adam8bitRule())
    if kind == "adam_mini":
        biases = frozenset(p for name, p in named.items() if name.endswith("bias"))
        return ByRule(groups, AdamMiniRule(_head_rows(named, config), biases))
    rule: Rule = ApolloRule(settings, {p: name for name, p in named.items()})
    return ByRule(groups, rule)


def _head_rows(named: dict[str, nn.Parameter], config: Any) -> dict[nn.Parameter, int]:
    """Return the rows of a head of each projection of queries or keys."""
    if config is None:
        return {}
    rows = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    found = {p: rows for name, p in named.items() if name.endswith(("q_proj.weight", "k_proj.weight"))}
    return {p: rows for p in found if len(p) % rows == 0}
