"""Router replay (R3, arXiv 2510.11370): a packed pass computes each token with the experts that the rollout chose.

Rounding lets the routers of trainer and rollout choose different experts for the same token, and then its log-probs
differ by more than rounding. Here the choice is the rollout's; the weights of the experts are the live router's own
probabilities of them, with their gradient. A layer that is computed again in the backward pass gets the same routes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from verl.accel.families import ROUTED_TYPES
from verl.accel.transfer import to_device
from verl.errors import Refused

ARGUMENT = "verl_routes"
"""The keyword argument of the decoder with the routes [layers, k, T], passed on to its layers."""


class RouterReplay:
    """Makes the routers of a decoder take recorded routes. Raise Refused for a model of a type whose routers were
    not compared with transformers' own under the same routes."""

    def __init__(self, decoder: Any) -> None:
        config = decoder.config.get_text_config()
        if config.model_type not in ROUTED_TYPES:
            able = ", ".join(ROUTED_TYPES)
            raise Refused(f"router replay of a {config.model_type}: its routers are not known; they are of {able}")
        self.experts, self.chosen = int(config.num_experts), int(config.num_experts_per_tok)
        self.layers = self._replayed = 0
        for layer in decoder.layers:
            for router in routers_of(layer):
                # a layer passes its arguments on to its mixer, also where it is computed again in the backward pass
                for part in layer.children():
                    part.register_forward_pre_hook(partial(_hand_over, router, self.layers), with_kwargs=True)
                router.register_forward_hook(self._replay)
                self.layers += 1
        if not self.layers:
            raise Refused(f"router replay: {type(decoder).__name__} has no routers that are known here")

    def arguments(self, routes: Tensor, device: torch.device) -> dict[str, Tensor]:
        """Return the arguments of the decoder with which it computes these routes [layers, k, T]. Raise ValueError for
        routes of another model."""
        check_routes(routes, layers=self.layers, chosen=self.chosen, experts=self.experts)
        self._replayed = 0
        return {ARGUMENT: to_device(routes, device)}

    def check(self) -> None:
        """Raise AssertionError if a router did not get the routes of the last pass."""
        assert self._replayed == self.layers, f"{self._replayed} of {self.layers} routers got their routes"

    def _replay(self, router: Any, args: Any, out: tuple[Tensor, Tensor, Tensor]) -> Any:
        """Return the output of a router (logits [T, E], weights [T, k], experts [T, k]) for the routes that it was
        given. Tokens without a route keep the router's own choice."""
        routes = router.__dict__.pop(ARGUMENT, None)
        if routes is None:
            return None
        logits, own_weights, own = out
        experts = torch.where(routes >= 0, routes.to(own.dtype), own)
        weights = torch.softmax(logits, -1, dtype=torch.float).gather(-1, experts)
        if getattr(router, "norm_topk_prob", True):
            weights = weights / weights.sum(-1, keepdim=True)
        self._replayed += 1
        return logits, weights.to(own_weights.dtype), experts


def check_routes(routes: Tensor, *, layers: int, chosen: int, experts: int) -> None:
    """Raise ValueError if routes [layers, k, T] are not of a model with so many layers with experts, and so many chosen
    ones of all experts."""
    if routes.shape[:2] != (layers, chosen) or int(routes.max()) >= experts:
        given = f"{routes.shape[0]} layers x {routes.shape[1]} experts, the highest number {int(routes.max())}"
        here = f"{layers} layers x {chosen} of {experts} experts"
        raise ValueError(f"the routes of these rows are of another model: {given}; this one has {here}")


def routers_of(layer: nn.Module) -> list[nn.Module]:
    """Return the routers of a decoder layer, or of several, in their order."""
    return [module for module in layer.modules() if type(module).__name__.endswith("TopKRouter")]


def _hand_over(router: nn.Module, number: int, part: nn.Module, args: Any, given: Mapping[str, Any]) -> None:
    """Give a router its routes [T, k] if the part of its layer that is called before it has them."""
    if ARGUMENT in given:
        router.__dict__[ARGUMENT] = given[ARGUMENT][number].t()
