"""Router replay on Megatron-Core: the routers of a rank compute its tokens with the experts that the rollout chose.

A router of Megatron calls `router_replay.get_replay_topk` for the experts of its tokens. The one that Megatron has for
this wants a route for each token, padding too, and one mode for all passes that are in flight. This one has neither
limit: the weights of the experts are the router's own, and tokens without a route keep its choice."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from verl.batch import Batch, unshare
from verl.errors import Refused
from verl.model_engine.megatron_model import MegatronModel
from verl.nn.router_replay import check_routes, routers_of
from verl.types import NO_ROUTE


class LayerRoutes:
    """The routes of one layer. recomputes: the layer is computed again in the backward pass"""

    def __init__(self, recomputes: bool) -> None:
        self._recomputes = recomputes
        self._again: deque[Tensor | None] = deque()
        """Those of passes before their backward pass: a schedule runs it in the order of the forward passes."""
        self._now: Tensor | None = None
        self.used = 0
        """How often the router read routes in a forward pass."""

    def give(self, routes: Tensor | None, *, trains: bool) -> None:
        """Set the routes [T, k] of the next pass; None: the router chooses."""
        self._now = routes
        if trains and self._recomputes:
            self._again.append(routes)

    @property
    def left(self) -> int:
        """The number of passes of which the routes wait for a backward pass."""
        return len(self._again)

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the scores [T, k] of the experts of these tokens, and the experts. Megatron's router calls this."""
        assert default_compute_topk is not None
        if self._recomputes and torch.is_grad_enabled():  # Megatron's forward pass of such a layer is without gradient
            routes = self._again.popleft()
        else:
            routes = self._now
            self.used += 1
        values, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if routes is None:
            return values, own
        experts = torch.where(routes >= 0, routes.to(own.dtype), own)
        return scores.gather(1, experts), experts


class MegatronRoutes:
    """The routers of a rank's chunks of layers, which take routes from now on. Raise Refused for a model without
    experts."""

    def __init__(self, local: MegatronModel) -> None:
        config = local.model.config.get_text_config()
        self._local, self._whole = local, config.num_hidden_layers
        if not getattr(config, "num_experts", None):
            raise Refused(f"router replay: the {config.model_type} has no experts; leave replay_routes out")
        self._experts, self._chosen = int(config.num_experts), int(config.num_experts_per_tok)
        recomputes = local.settings.gradient_checkpointing == "full"
        self._chunks: list[list[LayerRoutes]] = []
        for chunk, layers in zip(local.chunks, local.layers_of_chunks, strict=True):
            routers = routers_of(chunk)
            assert len(routers) == len(layers), f"{len(routers)} routers in {len(layers)} layers"
            here = [LayerRoutes(recomputes) for _ in routers]
            for router, routes in zip(routers, here):
                router.router_replay = routes  # type: ignore[assignment]
            self._chunks.append(here)

    def accept(self, batch: Batch) -> None:
        """Raise ValueError for the routes of another model: on all stages, before one of them waits for another."""
        if batch.routes is not None:
            check_routes(batch.routes, layers=self._whole, chosen=self._chosen, experts=self._experts)

    @contextmanager
    def replaying(self, chunk: int, part: Batch, place: Tensor, *, trains: bool) -> Iterator[None]:
        """Return a context in which a chunk computes a pass with the routes of its rows. place: the mask [B, W] of the
        tokens in the padded rows"""
        routers = self._chunks[chunk]
        given = [None] * len(routers) if part.routes is None else self._routes(chunk, part, place)
        for router, routes in zip(routers, given, strict=True):
            router.give(routes, trains=trains)
            router.used = 0
        yield
        used = [router.used for router in routers]
        assert used == [1] * len(routers), f"routers read their routes {used} times"

    def check(self) -> None:
        """Raise AssertionError if routes wait for a backward pass that did not come."""
        left = sum(router.left for here in self._chunks for router in here)
        assert not left, f"routes of {left} layers were not used in a backward pass"

    def _routes(self, chunk: int, part: Batch, place: Tensor) -> list[Tensor]:
        """Return the routes [T, k] of each layer of a chunk, for the tokens that its routers have on this rank."""
        flat, layers = unshare(part).routes, self._local.layers_of_chunks[chunk]
        assert flat is not None
        rows = torch.full((len(layers), self._chosen, *place.shape), NO_ROUTE, dtype=flat.dtype)
        rows[..., place.cpu()] = flat[layers.start : layers.stop]
        # a router reads position after position, and each tensor rank a run of the positions
        mine = rows.permute(0, 3, 2, 1).chunk(self._local.layout.tensor, 1)[self._local.place.tensor]
        return [*mine.flatten(1, 2).to(self._local.device)]
