"""Router replay of the Megatron engine: with the routes of the rollout, loss, outputs and all gradients are those of
one process with the same routes, in every layout."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import EXPERTS, SIZES, Case, differences, one_process, together
from forked import run
from megatron_engines import FOUR_EXPERTS, LAYOUTS, built, folder, on_rank, options_of

from verl.batch import unshare
from verl.errors import Refused
from verl.model_engine.megatron_routes import MegatronRoutes
from verl.types import NO_ROUTE

GRID = [  # layout, model, a shared prompt, a rank without rows, checkpointed layers
    ("one", EXPERTS, True, False, "none"),
    ("one", EXPERTS, True, False, "full"),
    ("TP", EXPERTS, True, False, "none"),
    ("EP", EXPERTS, True, False, "selective"),
    ("PP", EXPERTS, True, False, "full"),
    ("TP x EP", EXPERTS, True, True, "full"),
    ("PP x EP", FOUR_EXPERTS, False, False, "none"),
    ("EP over TP", EXPERTS, False, False, "none"),
    ("DP x ETP", EXPERTS, True, True, "none"),
    ("PP x VP", FOUR_EXPERTS, True, False, "full"),
    ("PP x VP x DP", FOUR_EXPERTS, True, False, "none"),
]


def routed(case, monkeypatch, layers=None):
    """Give the rows of a case random routes; each seventh token has none."""
    refs, batch, terms = case.batch()
    layers = layers or SIZES["num_hidden_layers"] * (2 if case.model == FOUR_EXPERTS else 1)
    choices = np.random.default_rng(0).random((layers, batch.num_tokens, 8)).argsort(-1)[..., :2]
    choices[:, ::7] = NO_ROUTE
    given = replace(batch, routes=torch.from_numpy(choices).transpose(1, 2).to(torch.int8))
    monkeypatch.setattr(Case, "batch", lambda self: (refs, given if self.shared else unshare(given), terms))


@pytest.mark.parametrize("layout, model, shared, idle, how", GRID)
def test_routes_of_the_rollout_are_replayed_as_in_one_process(layout, model, shared, idle, how, monkeypatch):
    at = LAYOUTS[layout]
    case = Case(at, shared=shared, idle=idle, model=model)
    routed(case, monkeypatch)
    expected, own = one_process(case, replays_routes=True), one_process(case)
    assert float((expected["loss"] - own["loss"]).abs()) > 1e-4
    folder(model)
    given = {"options": options_of(layout), "gradient_checkpointing": how, "replays_routes": True}
    ranks = run(at.world_size, lambda rank: on_rank(case, rank, **given))
    assert not (wrong := differences(together(case, ranks), expected)), wrong
    shares = [of["metrics"]["replayed_routes"] for of in ranks]
    assert all(0.7 < share.total / share.count < 0.95 for share in shares), shares


def of_next_layer(self, chunk, part, place):
    rolled = replace(part, routes=part.routes.roll(-1, 0))
    return RIGHT(self, chunk, rolled, place)


def of_next_token(self, chunk, part, place):
    rolled = replace(part, routes=part.routes.roll(1, -1))
    return RIGHT(self, chunk, rolled, place)


def row_after_row(self, chunk, part, place):
    width = place.shape[1] // self._local.layout.tensor
    return [r.view(width, len(place), -1).transpose(0, 1).flatten(0, 1) for r in RIGHT(self, chunk, part, place)]


def of_first_rank(self, chunk, part, place):
    here = self._local.place
    self._local.place = replace(here, tensor=0)
    try:
        return RIGHT(self, chunk, part, place)
    finally:
        self._local.place = here


RIGHT = MegatronRoutes._routes
MUTANTS = [("PP", of_next_layer), ("EP", of_next_token), ("TP", row_after_row), ("TP", of_first_rank)]


@pytest.mark.parametrize("layout, wrong", MUTANTS, ids=lambda of: of if isinstance(of, str) else of.__name__)
def test_routes_of_other_tokens_or_layers_are_noticed(layout, wrong, monkeypatch):
    """What the gate above compares is far off if the routes are given in another order."""
    at = LAYOUTS[layout]
    case = Case(at, model=EXPERTS)
    routed(case, monkeypatch)
    expected = one_process(case, replays_routes=True)
    folder(EXPERTS)
    monkeypatch.setattr(MegatronRoutes, "_routes", wrong)
    found = together(case, run(at.world_size, lambda rank: on_rank(case, rank, replays_routes=True)))
    assert differences(found, expected, rtol=1e-3)


def test_old_logprobs_are_those_of_the_routes_and_other_weights_choose_themselves(monkeypatch):
    case = Case(LAYOUTS["TP"], model=EXPERTS)
    routed(case, monkeypatch)
    _, batch, _ = case.batch()
    folder(EXPERTS)

    def on(_):
        plain, e = (built(EXPERTS, "actor", case.layout, replays_routes=on) for on in (False, True))
        assert e.capabilities.replays_routes and not plain.capabilities.replays_routes
        without = replace(batch, routes=None)
        every = (e.infer(batch, ("logprobs",)), e.infer(without, ("logprobs",)), plain.infer(batch, ("logprobs",)))
        return [found["logprobs"] for found in every]

    for replayed, own, plain in run(2, on):
        assert torch.equal(own, plain) and float((replayed - own).abs().max()) > 0.05


def test_routes_of_another_model_and_models_without_experts_are_refused(monkeypatch):
    case = Case(LAYOUTS["PP"], model=EXPERTS)
    routed(case, monkeypatch, layers=3)
    _, batch, _ = case.batch()
    dense = "qwen3, tied"
    folder(EXPERTS), folder(dense)

    def on(_):
        with pytest.raises(ValueError, match="3 layers x 2 experts, the highest number 7; this one has 2 layers x 2"):
            built(EXPERTS, "actor", case.layout, replays_routes=True).infer(batch, ("logprobs",))
        with pytest.raises(Refused, match="the qwen3 has no experts; leave replay_routes out"):
            built(dense, "actor", case.layout, replays_routes=True)

    run(2, on)
