"""Optimizers: each equals its reference implementation, and its states have the promised size."""

import dataclasses
import math

import pytest
import torch
from causal_models import build
from torch import nn

from verl.accel.devices import DEVICES
from verl.config.schema import Config
from verl.config.tree import changed
from verl.model_engine import optimizer_table, update_rules
from verl.model_engine.lora_spec import LoraSpec
from verl.model_engine.optim import OptimSpec
from verl.model_engine.optimizer_table import BLOCK, OPTIMIZERS, faults
from verl.model_engine.optimizers import make_optimizer, role_of
from verl.model_engine.settings import EngineSettings
from verl.model_engine.torch_engine import TorchEngine
from verl.model_engine.update_rules import ByRule, from_codes, to_codes
from verl.nn.quant import code_values
from verl.planner.updates import update_text

STEPS = 20
WIDE, HEADS = 64, 4
CONFIG = type("Config", (), {"hidden_size": WIDE, "num_attention_heads": HEADS, "head_dim": WIDE // HEADS})()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(WIDE, WIDE)
        self.k_proj = nn.Linear(WIDE, WIDE // 2, bias=False)
        self.v_proj = nn.Linear(WIDE, WIDE // 2, bias=False)
        self.o_proj = nn.Linear(WIDE, WIDE, bias=False)


class Toy(nn.Module):
    """A model with parameters of every role."""

    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(96, WIDE)
        self.self_attn = Attention()
        self.mlp = nn.ModuleDict({"up_proj": nn.Linear(WIDE, 3 * WIDE), "gate": nn.Linear(WIDE, 8, bias=False)})
        self.input_norm = nn.Parameter(torch.ones(WIDE))
        self.lm_head = nn.Linear(WIDE, 96, bias=False)


def toy(seed=0):
    torch.manual_seed(seed)
    return Toy()


def gradients(model, step):
    """Set gradients that depend on the step only, of very different sizes."""
    for i, p in enumerate(model.parameters()):
        drawn = torch.randn(p.shape, generator=torch.Generator().manual_seed(1000 * step + i))
        p.grad = drawn * 10 ** (i % 5 - 3) * (1 + step)


def trained(name, *, options=None, model=None, lr=1e-3, **more):
    model = model or toy()
    spec = OptimSpec(lr=lr, weight_decay=0.1, name=name, options=options or {}, **more)
    optimizer = make_optimizer(model, spec, CONFIG)
    for step in range(STEPS):
        gradients(model, step)
        optimizer.step()
    return model, optimizer


def groups_of(model, **more):
    """The weight decay of the house: none for vectors."""
    every = list(model.parameters())
    chosen = [[p for p in every if p.ndim > 1], [p for p in every if p.ndim <= 1]]
    return [{"params": params, "weight_decay": decay, **more} for params, decay in zip(chosen, (0.1, 0.0), strict=True)]


def follow(model, optimizer):
    for step in range(STEPS):
        gradients(model, step)
        optimizer.step()
    return model


def close(ours, theirs, names=None, atol=1e-6):
    expected = dict(theirs.named_parameters())
    for name, p in ours.named_parameters():
        if names is None or name in names:
            torch.testing.assert_close(p, expected[name], rtol=1e-5, atol=atol, msg=lambda m, name=name: f"{name}: {m}")


def test_adamw_and_sgd_are_those_of_torch():
    model = toy()
    close(trained("adamw")[0], follow(model, torch.optim.AdamW(groups_of(model), lr=1e-3)))
    model = toy()
    ours, _ = trained("sgd", options={"momentum": 0.9, "nesterov": True})
    close(ours, follow(model, torch.optim.SGD(groups_of(model), lr=1e-3, momentum=0.9, nesterov=True)))


def test_muon_is_that_of_torch_for_the_matrices_of_layers_and_adamw_for_the_rest():
    ours, _ = trained("muon")
    model = toy()
    matrices = [p for name, p in model.named_parameters() if "proj.weight" in name]
    close(
        ours, follow(model, torch.optim.Muon(matrices, lr=1e-3, adjust_lr_fn="match_rms_adamw")), ids(matrices, model)
    )
    model = toy()
    rest = {name for name, _ in model.named_parameters() if "proj.weight" not in name}
    close(ours, follow(model, torch.optim.AdamW(groups_of(model), lr=1e-3)), rest)
    assert len(matrices) == 5 and "mlp.gate.weight" in rest, "a router is no hidden matrix"


def ids(params, model):
    return {name for name, p in model.named_parameters() if any(p is one for one in params)}


def test_adam_mini_is_that_of_its_authors(reference):
    package = reference("adam_mini")
    ours, _ = trained("adam_mini", eps=1e-8)
    model = toy()
    theirs = package.Adam_mini(
        model.named_parameters(), lr=1e-3, weight_decay=0.1, dim=WIDE, n_heads=HEADS, verbose=False
    )
    theirs.mlp_names.add("mlp.gate")
    close(ours, follow(model, theirs))


@pytest.mark.parametrize("name", ["apollo", "apollo_mini"])
def test_apollo_is_that_of_its_authors_with_the_same_projections(name, reference):
    package = reference("apollo_torch.apollo")
    options = {"renew_every": 7} | ({"rank": 5} if name == "apollo" else {})
    settings = optimizer_table.settings_of(name, options)
    ours, optimizer = trained(name, options=options, eps=1e-6)
    model = toy()
    names = {p: n for n, p in model.named_parameters()}
    rule = update_rules.ApolloRule(settings, names)
    matrices = [p for n, p in model.named_parameters() if "proj.weight" in n]

    class Same:
        def __init__(self, p):
            self.p = p

        def project(self, grad, step):
            return rule.projected(grad, self.p, step)

    low_rank = {"rank": settings.rank, "proj": "random", "scale": settings.scale, "weight_decay": 0.1}
    low_rank |= {"scale_type": "channel" if name == "apollo" else "tensor", "update_proj_gap": 7, "proj_type": "std"}
    theirs = package.AdamW([{"params": matrices, **low_rank}], lr=1e-3, eps=1e-6)
    for p in matrices:
        theirs.state[p]["projector"] = Same(p)
    close(ours, follow(model, theirs), ids(matrices, model))
    wide, tall = ours.self_attn.k_proj.weight, ours.mlp["up_proj"].weight
    assert optimizer.state[wide]["exp_avg"].shape == (settings.rank, WIDE)
    assert optimizer.state[tall]["exp_avg"].shape == (3 * WIDE, settings.rank)
    first, second = (rule.projection(matrices[0], step, (2, WIDE)) for step in (6, 7))
    assert not torch.equal(first, second), "a projection is renewed"


def test_the_projection_of_apollo_keeps_lengths():
    """Johnson and Lindenstrauss: a random projection changes the expected square of a length by no factor."""
    p = nn.Parameter(torch.zeros(512, 256))
    rule = update_rules.ApolloRule(optimizer_table.Apollo(rank=64), {p: "p"})
    grad = torch.randn(512, 256, generator=torch.Generator().manual_seed(0))
    ratio = rule.projected(grad, p, 0).square().sum() / grad.square().sum()
    assert 0.9 < float(ratio) < 1.1


def test_the_codes_of_eight_bits_are_those_of_torchao(reference):
    torchao, subclass = reference("torchao.optim.quant_utils"), reference("torchao.optim.subclass_8bit")
    for signed in (True, False):
        theirs = torch.tensor(torchao.create_dynamic_map(signed))
        assert torch.equal(code_values(signed=signed), theirs)
        values = torch.randn(16, 2 * BLOCK, generator=torch.Generator().manual_seed(1))
        values = values if signed else values.square()
        codes, scale = to_codes(values, signed=signed)
        zeros = subclass.OptimState8bit.zeros(values.shape, signed=signed)
        zeros.copy_(values)
        assert torch.equal(codes, zeros.codes) and torch.equal(scale.flatten(), zeros.scale)
        assert torch.equal(from_codes(codes, scale, signed=signed), zeros.dequantize())


def test_eight_bit_adamw_follows_the_same_formula_as_torchao(reference):
    """20 steps of its own function for one parameter, over its own 8-bit states."""
    adam = reference("torchao.optim.adam")
    state = reference("torchao.optim.subclass_8bit").OptimState8bit
    ours, theirs = (nn.Linear(2 * BLOCK, 48, bias=False) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    optimizer = make_optimizer(ours, OptimSpec(lr=1e-3, weight_decay=0.1, name="adamw_8bit"))
    moments = [state.zeros(theirs.weight.shape, signed=signed) for signed in (True, False)]
    for step in range(STEPS):
        for model in (ours, theirs):
            gradients(model, step)
        optimizer.step()
        with torch.no_grad():
            count = torch.tensor(step + 1.0)
            adam.single_param_adam(
                theirs.weight, theirs.weight.grad, count, *moments, None, torch.tensor(1e-3), 0.9, 0.999, 0.1, 1e-8,
                True, False,
            )  # fmt: skip
    close(ours, theirs)
    assert optimizer.state[ours.weight]["exp_avg"].dtype == torch.uint8


def test_rows_that_are_no_multiple_of_a_block_keep_their_values():
    values = torch.randn(3, 5, 300, generator=torch.Generator().manual_seed(2))
    codes, scale = to_codes(values, signed=True)
    assert codes.shape == values.shape and scale.shape == (3, 5, 2)
    back = from_codes(codes, scale, signed=True)
    blocks = (values[..., :256], values[..., 256:])
    for mine, block in zip((back[..., :256], back[..., 256:]), blocks, strict=True):
        assert (mine - block).abs().max() <= 0.04 * block.abs().max()
    again, _ = to_codes(values[:, :, :256].contiguous(), signed=True)
    assert torch.equal(again, codes[..., :256]), "a block does not depend on the others"


@pytest.mark.parametrize("signed", [True, False])
def test_the_code_of_a_value_is_the_nearest_one_also_beside_each_limit(signed):
    """Compared with a search among the values halfway between two codes, at each of them and one bit beside it."""
    values = code_values(signed=signed)
    limits = (values[:-1] + values[1:]) / 2
    drawn = torch.randn(5000, generator=torch.Generator().manual_seed(3)).mul(8).sub(8).exp()
    near = [
        limits,
        values,
        torch.nextafter(limits, limits - 1),
        torch.nextafter(limits, limits + 1),
        drawn.clamp(max=1),
    ]
    every = torch.cat([*near, *(-x for x in near if signed), torch.zeros(1)])
    every = every[(every >= values[0] - 1e-9) & (every <= 1)]
    blocks = torch.nn.functional.pad(every, (0, -len(every) % (BLOCK - 1))).view(-1, BLOCK - 1)
    blocks = torch.nn.functional.pad(blocks, (0, 1), value=1.0)  # of scale 1
    codes, scale = to_codes(blocks, signed=signed)
    assert bool((scale == 1).all())
    assert torch.equal(codes.int(), torch.bucketize(blocks, limits, right=True, out_int32=True))
    assert torch.equal(from_codes(codes, scale, signed=signed), values[codes.int()])


def test_eight_bit_states_do_not_depend_on_the_rows_that_are_updated_at_once(monkeypatch):
    def run(at_once):
        few = dataclasses.replace(DEVICES["cpu"], moment_values=at_once)
        monkeypatch.setattr(update_rules, "device_facts", lambda kind: few)
        model = nn.ParameterList([torch.ones(40, 300), torch.ones(3, 20, 257), torch.ones(70)])
        optimizer = make_optimizer(model, OptimSpec(lr=1e-3, name="adamw_8bit"))
        for step in range(3):
            gradients(model, step)
            optimizer.step()
        return [*model, *(t for p in model for t in optimizer.state[p].values())]

    for whole, rows in zip(run(1 << 20), run(700), strict=True):
        assert torch.equal(whole, rows) and whole.dtype == rows.dtype


def bytes_of(optimizer, p):
    return sum(t.nbytes for t in optimizer.state[p].values() if t.ndim)


@pytest.mark.parametrize(
    ("name", "at_most"),
    [
        ("adamw", 8),
        ("adamw_8bit", 2.3),
        ("adam_mini", 4.2),
        ("muon", 4.2),
        ("apollo_mini", 0.2),
        ("apollo", 8),
        ("sgd", 0),
    ],
)
def test_the_states_of_a_matrix_are_as_small_as_the_plan_says(name, at_most):
    model = nn.Sequential(nn.Linear(512, 1024, bias=False))
    matrix = model[0].weight
    optimizer = make_optimizer(model, OptimSpec(lr=1e-3, name=name))
    matrix.grad = torch.ones_like(matrix)
    optimizer.step()
    per_value = bytes_of(optimizer, matrix) / matrix.numel()
    planned = optimizer_table.optimizer_bytes(name, {}, matrices=matrix.numel(), others=0, short_side=512)
    assert per_value <= at_most
    assert planned == pytest.approx(bytes_of(optimizer, matrix), rel=0.02, abs=8192)


def test_a_parameter_has_the_learning_rate_of_its_role():
    frozen = {role: 1e-12 for role in ("embedding", "head", "norm", "router")}
    model, before = toy(), toy()
    optimizer = make_optimizer(model, OptimSpec(lr=1e-2, name="sgd", weight_decay=0.0, options={"lr": frozen}))
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 * group["lr_scale"]
    gradients(model, 0)
    optimizer.step()
    expected = dict(before.named_parameters())
    moved = {name for name, p in model.named_parameters() if not torch.allclose(p, expected[name], rtol=0, atol=1e-9)}
    assert moved == {name for name in expected if "proj.weight" in name}


def test_roles():
    model = toy()
    named = dict(model.named_parameters())
    roles = {name: role_of(name, p, [model.embed_tokens.weight]) for name, p in named.items()}
    assert roles["embed_tokens.weight"] == "embedding" and roles["lm_head.weight"] == "head"
    assert roles["mlp.gate.weight"] == "router" and roles["mlp.up_proj.weight"] == "matrix"
    assert roles["input_norm"] == roles["self_attn.q_proj.bias"] == "norm"
    model.lm_head.weight = model.embed_tokens.weight
    assert role_of("lm_head.weight", model.lm_head.weight, [model.embed_tokens.weight]) == "embedding"
    assert role_of("layers.0.q_proj.lora_A.weight", named["mlp.up_proj.weight"], []) == "adapter"


@pytest.mark.parametrize(
    ("name", "options", "tensor", "line"),
    [
        ("muon", {"momentum": 0.9}, 1, ""),
        ("adamw", {"lr": {"head": 1e-5}}, 4, ""),
        ("muon", {"rank": 3}, 1, "no option of optim.name=muon; it has momentum, nesterov, iterations, scale, lr"),
        ("muon", {"momentm": 0.9}, 1, "muon; did you mean momentum? it has momentum"),
        ("apollo", {"rank": 0}, 1, "a whole number of at least 1"),
        ("apollo", {"rank": 2.5}, 1, "a whole number of at least 1"),
        ("sgd", {"momentum": "much"}, 1, "a number of at least 0"),
        ("muon", {"nesterov": 3}, 1, "true or false"),
        ("adamw", {"lr": {"heads": 1e-5}}, 1, "no role of a parameter; did you mean head? one of embedding"),
        ("adamw", {"lr": {"head": 0}}, 1, "above 0"),
        ("adamw", {"lr": 1e-5}, 1, "a learning rate per role"),
        ("adamw_8bit", {}, 2, "parallel.tensor=2: its states are of whole rows"),
    ],
)
def test_an_option_or_layout_that_an_optimizer_lacks_is_refused(name, options, tensor, line):
    found = list(faults(name, options, tensor))
    assert found == [] if not line else len(found) == 1 and line in found[0], found


def test_every_row_of_the_table_can_be_built_and_moves_every_parameter():
    for name, row in OPTIMIZERS.items():
        assert dataclasses.is_dataclass(row.settings)
        model, before = toy(), toy()
        optimizer = make_optimizer(model, OptimSpec(lr=1e-3, name=name), CONFIG)
        gradients(model, 0)
        optimizer.step()
        for (n, p), old in zip(model.named_parameters(), before.parameters(), strict=True):
            assert not torch.equal(p, old) and bool(torch.isfinite(p).all()), (name, n)
        for p in optimizer.parameters:  # what a checkpoint is loaded into is what a step makes
            fresh = {key: (t.shape, t.dtype) for key, t in optimizer.begin(p).items()}
            assert fresh == {key: (t.shape, t.dtype) for key, t in optimizer.state[p].items()}, name


@pytest.mark.parametrize("kind", ["qwen3", "qwen2_moe", "gpt2"])
def test_a_plan_counts_what_an_optimizer_updates_otherwise(kind, tmp_path):
    """Tensors with one dimension are not Muon's, and small ones have no moments in 8 bits: a line says how many."""
    model, few = build(kind), 0
    model.save_pretrained(tmp_path)
    model.requires_grad_()
    for name in ("muon", "apollo_mini", "adamw_8bit"):
        optimizer = make_optimizer(model, OptimSpec(lr=1e-3, name=name), model.config)
        by_rule = {
            p for part in optimizer._parts if isinstance(part, ByRule) for g in part.param_groups for p in g["params"]
        }
        text = update_text(changed(Config(), {"model.path": str(tmp_path), "optim.name": name}))
        total = sum(p.numel() for p in model.parameters())
        if name == "adamw_8bit":
            few = sum(p.numel() for p in by_rule if optimizer.begin(p)["exp_avg"].dtype == torch.float32)
            assert f"the moments of {few:,} of {total:,} values stay float32" in text, text
        else:
            own = sum(p.numel() for p in by_rule)
            assert f"{own:,} values; adamw for the other {total - own:,}" in text and 0 < own < total, text
    assert kind != "qwen2_moe" or 0 < few < total, "the experts of a layer are one tensor, of 4,096 values"
    ours = changed(Config(), {"model.path": str(tmp_path), "optim.name": "adamw_8bit", "model.lora": {"rank": 2}})
    engine = TorchEngine(model, EngineSettings(optim=OptimSpec(lr=1e-3), dtype="float32", lora=LoraSpec(rank=2)))
    factors = sum(p.numel() for p in engine.local.trained_parameters().values())
    assert f"of {factors:,} of {factors:,} values" in update_text(ours)


def test_the_norm_of_an_update_of_apollo_grows_slowly():
    model = nn.Sequential(nn.Linear(32, 32, bias=False))
    p = model[0].weight
    optimizer = make_optimizer(model, OptimSpec(lr=1e-3, name="apollo_mini", weight_decay=0.0))
    norms = []
    for step in range(3):
        p.grad = torch.ones_like(p) * 10**step
        optimizer.step()
        norms.append(float(optimizer.state[p]["norm"]))
    assert norms[1] <= 1.0101 * norms[0] and norms[2] <= 1.0101 * norms[1] and math.isfinite(norms[2])
