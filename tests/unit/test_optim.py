"""Learning-rate schedules, parameter groups, clipping."""

import pytest
import torch
from each import each
from torch import nn

from verl.model_engine.optim import SCHEDULES, OptimSpec, grad_norm, learning_rate
from verl.model_engine.optimizers import make_optimizer


def rates(n, **options):
    spec = OptimSpec(lr=1.0, **options)
    return [round(learning_rate(spec, i), 6) for i in range(n)]


def test_the_printed_table_of_each_schedule():
    assert rates(3) == [1, 1, 1]
    assert rates(6, warmup_steps=3) == [0.25, 0.5, 0.75, 1, 1, 1]
    assert rates(5, schedule="linear", total_steps=4) == [1, 0.75, 0.5, 0.25, 0]
    assert rates(5, schedule="linear", total_steps=4, min_lr_ratio=0.2) == [1, 0.8, 0.6, 0.4, 0.2]
    assert rates(5, schedule="cosine", total_steps=4) == [1, 0.853553, 0.5, 0.146447, 0]
    assert rates(6, schedule="linear", warmup_steps=2, total_steps=5) == [0.333333, 0.666667, 1, 0.666667, 0.333333, 0]
    assert rates(6, schedule="wsd", total_steps=5, decay_ratio=0.4) == [1, 1, 1, 1, 0.5, 0]


@each("schedule", SCHEDULES)
def test_the_first_update_moves_and_no_rate_is_negative_or_above_the_peak(schedule):
    for warmup in (0, 1, 5, 20):  # also a warm-up longer than the run
        found = rates(40, schedule=schedule, warmup_steps=warmup, total_steps=10, min_lr_ratio=0.1)
        assert found[0] > 0 and all(0.1 * (i >= warmup) <= r <= 1 for i, r in enumerate(found))
        assert all(b >= a for a, b in zip(found[:warmup], found[1 : warmup + 1])), "a warm-up only rises"


def test_user_faults_name_the_key():
    with pytest.raises(ValueError, match="optim.schedule='exponential': one of"):
        OptimSpec(lr=1.0, schedule="exponential")
    with pytest.raises(ValueError, match="set run.total_steps"):
        OptimSpec(lr=1.0, schedule="linear")


def test_norms_and_biases_are_not_decayed():
    model = nn.ModuleDict({"linear": nn.Linear(3, 2), "norm": nn.LayerNorm(3), "frozen": nn.Linear(2, 2)})
    model["frozen"].requires_grad_(False)
    for p in model.parameters():
        nn.init.ones_(p)
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    optimizer = make_optimizer(model, OptimSpec(lr=0.1, weight_decay=0.5))
    optimizer.step()
    assert torch.allclose(model["linear"].weight, torch.full((2, 3), 0.95))
    for p in (model["linear"].bias, *model["norm"].parameters(), *model["frozen"].parameters()):
        assert torch.equal(p, torch.ones_like(p))
    assert all(group["fused"] for group in optimizer.param_groups), "one kernel for all parameters"


def test_the_norm_is_over_all_gradients():
    a, b, none = (nn.Parameter(torch.zeros(n)) for n in (2, 1, 3))
    a.grad, b.grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
    assert float(grad_norm([a, b, none])) == 5.0
    assert float(grad_norm([none])) == 0.0
    b.grad[0] = float("nan")
    assert torch.isnan(grad_norm([a, b]))


def test_every_setting_of_adamw_reaches_the_weights():
    """Two steps by hand, with settings that are not defaults (1711.05101)."""
    model = torch.nn.Linear(1, 1).double()
    with torch.no_grad():
        model.weight.fill_(2.0)
    spec = OptimSpec(lr=0.1, weight_decay=0.5, betas=(0.6, 0.7), eps=0.3)
    optimizer = make_optimizer(model, spec)
    w, m, v = 2.0, 0.0, 0.0
    for t, g in ((1, 4.0), (2, -1.0)):
        model.weight.grad = torch.full((1, 1), g, dtype=torch.float64)
        optimizer.step()
        m, v = 0.6 * m + 0.4 * g, 0.7 * v + 0.3 * g * g
        w = w * (1 - 0.1 * 0.5) - 0.1 * (m / (1 - 0.6**t)) / ((v / (1 - 0.7**t)) ** 0.5 + 0.3)
        assert float(model.weight.detach()) == pytest.approx(w, rel=1e-9)
