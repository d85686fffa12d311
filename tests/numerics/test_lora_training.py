"""LoRA in the trainer: outputs and gradients are PEFT's, nothing else changes, and what is written loads elsewhere."""

import copy
import itertools
import json
import warnings
from dataclasses import replace

import pytest
import torch
from causal_models import OWN, build
from each import each
from safetensors.torch import load_file
from test_engine import NLL, batch_of, engine, make, params, samples
from transformers import AutoModelForCausalLM

from verl.batch import pack
from verl.checkpoint.adapter_export import write_adapter
from verl.checkpoint.hf import HfExport
from verl.checkpoint.shards import tensor_names
from verl.config.lora_layers import trained_factors
from verl.config.model_files import describe_model
from verl.config.schema import Config
from verl.config.tree import changed
from verl.errors import Refused
from verl.model_engine.base import EngineContext, OneRank
from verl.model_engine.layout import Layout
from verl.model_engine.lora import A, B, is_factor, own_names
from verl.model_engine.lora_spec import LoraSpec, lora_faults
from verl.model_engine.memory import RankWork, memory
from verl.model_engine.optim import OptimSpec
from verl.model_engine.options import EXPERT_FACTORS, Options
from verl.model_engine.passes import ReplicaWeights
from verl.model_engine.sibling import build_sibling
from verl.model_engine.torch_engine import build as build_engine
from verl.nn import joint
from verl.nn.expert_lora import has_factors
from verl.nn.lora import LowRank, with_low_ranks, with_product
from verl.objective import Term, TermValue
from verl.parameter_set import ParameterSet, is_experts
from verl.rollout.native.architecture import ARCHITECTURES
from verl.transfer_queue.memory import MemoryQueue
from verl.workers.role import RoleSpec, build_roles

SPEC = LoraSpec(rank=4, alpha=8.0)
FAMILIES = (
    *("llama", "qwen2", "qwen3", "qwen3_5_text", "gemma2", "gemma3_text", "mistral", "olmo2", "phi3", "gpt2"),
    *EXPERT_FACTORS,
)


@pytest.fixture
def peft(reference):
    """The PEFT library of `make reference-packages`."""
    return reference("peft")


def trained(model, spec=SPEC, **options):
    """An engine with factors A and B that are not zero."""
    found = engine(model, lora=spec, **options)
    with torch.no_grad():
        for name, p in found.model.named_parameters():
            if name.endswith(B):
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))) * 0.2)
    return found


def as_peft(peft, ours, model, spec=SPEC):
    """The same model and factors in PEFT."""
    given = dict(peft_values(ours))
    targets = list(ours.local.lora.parameters.targets)
    experts = [name for name in targets if is_experts(name)]
    config = peft.LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,
        use_rslora=spec.rslora,
        target_modules=[name for name in targets if name not in experts],
        target_parameters=experts or None,
        lora_dropout=0.0,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peft.get_peft_model(copy.deepcopy(model).double(), config).double()
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            if ".lora_" in name:
                p.copy_(given.pop(name.replace(".default.weight", ".weight")))
    assert not given, "all of our factors are in PEFT's model"
    return theirs.eval()


def peft_values(e, of=lambda p: p):
    """(PEFT's name, a factor or `of` it in PEFT's form) of all factors of an engine."""
    named = {n: of(p) for n, p in e.model.named_parameters() if is_factor(n)}
    for name, value in e.local.lora.tensors(named):
        if value is not None and value.dim() == 3:
            columns = (column for j in range(value.shape[2]) for column in value[:, :, j])
            value = torch.cat([*value]) if "lora_A" in name else torch.stack([*columns], dim=1)
        yield name, value


def gradients(e, batch):
    e.forward_backward(batch, NLL)
    assert {n for n, p in e.model.named_parameters() if p.grad is not None} == {*e.local.lora.names}
    found = {n: g.cpu().clone() for n, g in peft_values(e, lambda p: p.grad)}
    e.optimizer.zero_grad()
    return found


def padded(rows):
    """ids, labels [n, t] of samples, for a plain model."""
    ids = torch.zeros(len(rows), max(s.total_tokens for s in rows), dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for i, s in enumerate(rows):
        flat, start = torch.cat([torch.from_numpy(x.ids) for x in s.segments]), len(s.segments[0].ids)
        ids[i, : len(flat)], labels[i, start : len(flat)] = flat, flat[start:]
    return ids, labels


@each("family", FAMILIES)
def test_outputs_and_gradients_are_those_of_peft(peft, family, monkeypatch):
    """Packed with shared prompts, packed alone and padded. In float64, but for the norms of transformers and for fused
    experts."""
    states = OWN["qwen3_next"] if family == "qwen3_5_text" else {}  # a layer of each kind
    rows, spec, exact = samples(), SPEC, family not in (*EXPERT_FACTORS, "qwen3_5_text")
    model, dtype = build(family, **states), "float64" if exact else "float32"
    if family in EXPERT_FACTORS:  # a rank of 3 is multiplied expert by expert
        spec = replace(SPEC, targets=["all-linear", "experts"], rank=3 if family == "mixtral" else 4)
        if family == "qwen3_next":  # PEFT takes layers of the shared expert for those of experts
            spec = replace(spec, exclude=[f"shared_expert.{name}_proj" for name in ("gate", "up", "down")])
    for mode, share in (("auto", True), ("auto", False), ("padded", False)):
        monkeypatch.setattr(joint, "_WORTH", 4 if share else 0)  # factors are added to outputs, and to weights
        ours = trained(model, spec, attention_mode=mode, dtype=dtype)
        theirs, (ids, labels) = as_peft(peft, ours, model, spec).to(getattr(torch, dtype)), padded(rows)
        logits = theirs(input_ids=ids).logits[:, :-1]
        logprobs = torch.log_softmax(logits, -1)
        loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels[:, 1:])
        loss.backward()
        batch = pack(rows, share_prefix=share)
        batch = batch.with_columns(batch_of(rows).columns)
        found = ours.infer(batch, ("logprobs",))["logprobs"]
        wanted = [logprobs[i, t, labels[i, t + 1]] for i, t in (labels[:, 1:] != -100).nonzero().tolist()]
        torch.testing.assert_close(found, torch.stack(wanted).to(found), rtol=1e-6, atol=2e-6)
        got = gradients(ours, batch)
        expected = {
            n.replace(".default.weight", ".weight"): p.grad for n, p in theirs.named_parameters() if p.grad is not None
        }
        assert got.keys() == expected.keys() and got, "the factors alone have gradients"
        for name, grad in expected.items():
            atol = 4e-6 if "linear_attn" in name else 1e-6  # the norm on a delta net's output amplifies
            torch.testing.assert_close(got[name], grad, rtol=1e-4, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def test_each_family_of_the_native_engine_is_compared_with_peft():
    """Those that read images are in test_vision_lora.py."""
    read_text = {name for name, one in ARCHITECTURES.items() if one.axes == "one" or one.delta != "none"}
    assert read_text <= {*FAMILIES}


def test_rank_stabilised_scale(peft):
    model, spec = make(), LoraSpec(rank=4, alpha=8.0, rslora=True)
    ours = trained(model, spec)
    theirs = as_peft(peft, ours, model, spec)
    (own,) = ours.passes.models_own([torch.arange(1, 9)], ReplicaWeights(dtype=torch.float64))
    logits = torch.log_softmax(theirs(input_ids=torch.arange(1, 9)[None]).logits[0], -1)
    torch.testing.assert_close(own, logits[:-1].gather(-1, torch.arange(2, 9)[:, None])[:, 0])


@each("experts", (False, True))
def test_an_update_changes_the_factors_and_nothing_else(experts):
    model = build("qwen2_moe") if experts else make()
    ours = engine(model, lora=replace(SPEC, targets=["all-linear", *["experts"] * experts]), dtype="float32")
    before = params(ours)
    for _ in range(2):
        ours.forward_backward(batch_of(samples()), NLL)
        ours.optim_step()
    changed = {name for name, p in params(ours).items() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if is_factor(name)}
    assert {p for p in ours.optimizer.parameters} == {p for n, p in ours.model.named_parameters() if is_factor(n)}


def test_factors_are_added_over_the_output_of_a_layer():
    """Its results and gradients are those of the plain sum; a layer whose results are kept for the backward pass has a
    new tensor."""
    draw = torch.Generator().manual_seed(0)
    given = [torch.randn(size, generator=draw).requires_grad_() for size in ((2, 7, 16), (24, 16), (4, 16), (24, 4))]
    x, weight, a, b = given
    found = []
    for over in (False, True):
        output = torch.nn.functional.linear(x, weight)
        y = with_product(output, x, a, b, 0.5, over=over)
        assert (y.data_ptr() == output.data_ptr()) == over
        found.append((y, *torch.autograd.grad(y.square().sum(), given)))
    for plain, written in zip(*found, strict=True):
        torch.testing.assert_close(written, plain, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        frozen = with_product(torch.nn.functional.linear(x, weight), x, a, b, 0.5, over=True)
    assert torch.equal(frozen, found[1][0])


@each("dtype", (torch.float32, torch.bfloat16))
def test_the_gradient_through_a_frozen_layer_and_its_factors_is_one_sum(dtype):
    """In bfloat16 of autocast the outputs have the bits of the plain sum, which rounds both products."""
    draw = torch.Generator().manual_seed(0)
    given = [torch.randn(size, generator=draw) for size in ((2, 7, 16), (4, 16), (24, 4), (24, 16))]
    (x, a, b), layer = (t.requires_grad_() for t in given[:3]), torch.nn.Parameter(given[3], requires_grad=False)
    found, close = [], 1e-5 if dtype == torch.float32 else 2e-2
    for more in ({}, {"over": True, "weight": layer}):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype != torch.float32, cache_enabled=False):
            y = with_product(torch.nn.functional.linear(x, layer), x, a, b, 0.5, **more)
        assert y.dtype == dtype and not (more and y.grad_fn.next_functions[0][0]), "the layer's product has no gradient"
        found.append((y, *torch.autograd.grad(y.square().sum(), (x, a, b))))
    for i, (plain, one) in enumerate(zip(*found, strict=True)):
        assert plain.dtype == one.dtype and (dtype == torch.float32 or i or torch.equal(plain, one))
        torch.testing.assert_close(one / plain.abs().max(), plain / plain.abs().max(), rtol=0, atol=close)


def test_a_bias_beside_a_frozen_weight_keeps_its_gradient():
    ours = engine(make(), lora=SPEC)
    layer = next(m for m in ours.model.modules() if type(m) is torch.nn.Linear and hasattr(m, "lora_A"))
    layer.bias = torch.nn.Parameter(layer.weight.new_zeros(layer.out_features))
    layer(layer.weight.new_ones(3, layer.in_features)).sum().backward()
    assert torch.equal(layer.bias.grad, torch.full_like(layer.bias, 3.0))


@each("how", ("selective", "full"))
def test_checkpointed_layers_have_the_gradients_of_those_that_are_kept(how):
    model = make()
    wanted, found = (
        gradients(trained(model, gradient_checkpointing=one), batch_of(samples())) for one in ("none", how)
    )
    for name, grad in wanted.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-5, atol=1e-6)


def test_training_starts_at_the_base():
    model = make()
    ours, plain = engine(model, lora=SPEC), engine(model)
    batch = batch_of(samples())
    assert torch.equal(ours.infer(batch, ("logprobs",))["logprobs"], plain.infer(batch, ("logprobs",))["logprobs"])
    drawn = {n: p for n, p in ours.model.named_parameters() if n.endswith(A)}
    other = {n: p for n, p in engine(model, lora=replace(SPEC, seed=1)).model.named_parameters() if n.endswith(A)}
    assert all(p.std() > 0 and not torch.equal(p, other[n]) for n, p in drawn.items())


@each("family", ("qwen3", "gpt2", "mixtral"))
def test_published_weights_are_the_base_with_the_product_of_the_factors(family):
    model = build(family)
    ours = trained(
        model, replace(SPEC, targets=["all-linear", *["experts"] * (family in EXPERT_FACTORS)]), dtype="float32"
    )
    plain = engine(model, optim=None, dtype="float32")
    with torch.no_grad():
        for name, weight in ours.weights():
            plain.model.get_parameter(name).copy_(weight)
    batch = batch_of(samples())
    found = [e.infer(batch, ("logprobs",))["logprobs"] for e in (ours, plain, engine(model, dtype="float32"))]
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)
    assert (found[0] - found[2]).abs().max() > 0.05, "the factors matter"
    parts = {part.name: part.mine() for part in ours.weight_parts()}
    assert all(torch.equal(parts[name], weight) for name, weight in ours.weights())
    probes = [torch.arange(1, 12).numpy()]
    own, theirs = (e.own_logprobs(probes, "float32")[0] for e in (ours, plain))
    assert abs(own - theirs).max() < 1e-5


@each("family", ("qwen3", "gpt2"))
def test_a_part_of_a_merged_weight_has_the_bits_of_the_whole(family):
    """The bits of a product of matrices depend on their sizes."""
    lora = trained(build(family), replace(SPEC, rank=5)).local.lora
    draw = torch.Generator().manual_seed(0)
    for name in (f"{module}.weight" for module in lora.parameters.targets):
        a, b = torch.randn(5, 33, generator=draw), torch.randn(70, 5, generator=draw)
        weight = torch.randn((33, 70) if family == "gpt2" else (70, 33), generator=draw)
        whole = lora.merged(name, weight, lambda factor, a=a, b=b: a if factor.endswith(A) else b)
        product = lora.parameters.scale * (b @ a)
        torch.testing.assert_close(whole - weight, product.T if family == "gpt2" else product, rtol=1e-5, atol=1e-5)
        for ranks, axis in itertools.product((2, 3, 4), (0, 1)):
            for place in torch.arange(weight.shape[axis]).chunk(ranks):
                index = [slice(None), slice(None)]
                index[axis] = slice(int(place[0]), int(place[-1]) + 1)
                part = weight[tuple(index)]
                found = lora.merged(name, part, lambda factor, a=a, b=b: a if factor.endswith(A) else b, tuple(index))
                assert torch.equal(found, whole[tuple(index)])


def test_the_state_of_a_checkpoint_is_factors_and_moments(tmp_path):
    model, rows = make(), samples()
    ours = engine(model, lora=SPEC)
    for _ in range(2):
        ours.forward_backward(batch_of(rows), NLL)
        ours.optim_step()
    ours.save(tmp_path / "state")
    saved = {name.rpartition(".")[2] for name in tensor_names(tmp_path / "state")}
    assert saved == {A, B}, "no weight of the base"
    again = engine(model, lora=replace(SPEC, seed=9))
    again.load(tmp_path / "state")
    for e in (ours, again):
        e.forward_backward(batch_of(rows), NLL)
        e.optim_step()
    assert all(torch.equal(p, params(again)[n]) for n, p in params(ours).items())
    for spec in (replace(SPEC, rank=2), None):
        with pytest.raises(Refused, match="the checkpoint is of another model"):
            engine(model, lora=spec).load(tmp_path / "state")


@each("targets", (["all-linear"], ["q_proj", "experts"], ["experts.down_proj"]))
def test_the_exported_folder_is_an_adapter_that_peft_and_training_load(peft, tmp_path, targets):
    base = tmp_path / "base"
    (make() if targets == ["all-linear"] else build("qwen3_moe")).save_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base)
    ours = trained(model, replace(SPEC, targets=targets), dtype="float32")
    snapshot = ours.snapshot()
    want = ours.own_logprobs([torch.arange(1, 12).numpy()], "float32")[0]
    with torch.no_grad():  # training continues while the snapshot is written
        for name, p in ours.model.named_parameters():
            p.mul_(2.0 if is_factor(name) else 1.0)
    HfExport(base).write(tmp_path / "hf", snapshot.weights(), ours.exported_set)
    assert sorted(p.name for p in (tmp_path / "hf").iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert json.loads((tmp_path / "hf" / "adapter_config.json").read_text())["r"] == SPEC.rank
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "hf")
    logits = torch.log_softmax(theirs(input_ids=torch.arange(1, 12)[None]).logits[0], -1)
    got = logits[:-1].gather(-1, torch.arange(2, 12)[:, None])[:, 0]
    assert (got - torch.from_numpy(want)).abs().max() < 1e-5
    again = engine(model, lora=LoraSpec(path=str(tmp_path / "hf")), base=base, dtype="float32")
    assert {n for n, _ in again.exported()} == {n for n, _ in ours.exported()}
    assert again.local.lora.parameters.rank == SPEC.rank
    assert abs(again.own_logprobs([torch.arange(1, 12).numpy()], "float32")[0] - want).max() < 1e-5
    with torch.no_grad(), again.local.lora.off():
        batch = batch_of(samples())
        plain = engine(model, dtype="float32").infer(batch, ("logprobs",))["logprobs"]
        assert torch.equal(again.infer(batch, ("logprobs",))["logprobs"], plain), "the adapter is switched off"


@each(
    "targets, exclude, found",
    [
        (["q_proj", "v_proj"], [], {"q_proj", "v_proj"}),
        (["all-linear"], ["talker.*", "o_proj"], {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"}),
        (["all-linear"], [r".*\.mlp\..*"], {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ([r"model\.layers\.1\..*q_proj"], [], {"q_proj"}),
    ],
)
def test_targets(targets, exclude, found):
    names = engine(make(), lora=replace(SPEC, targets=targets, exclude=exclude)).local.lora.parameters.targets
    assert {name.rpartition(".")[2] for name in names} == found
    assert len(names) == len(found) * (1 if "1" in targets[0] else 2)


@each(
    "spec, text",
    [
        (replace(SPEC, targets=["w_proj"]), "model.lora.targets=w_proj: no linear layer of Qwen3ForCausalLM"),
        (replace(SPEC, targets=["lm_head"]), "model.lora.targets=lm_head: embeddings and the output head"),
        (replace(SPEC, rank=17), "model.lora.rank=17: model.layers.0.self_attn.q_proj"),
    ],
)
def test_what_cannot_be_trained_is_refused(spec, text):
    with pytest.raises(Refused, match=text):
        engine(make(), lora=spec)


@each(
    "given, text",
    [
        ({"alpha": 16.0}, "model.lora.alpha without a rank does nothing"),
        ({"rank": 8, "seed": 3}, "model.lora.seed=3: factors are drawn from run.seed"),
        ({"rank": 8, "path": "/"}, "model.lora.rank=8 beside model.lora.path"),
        ({"path": "/no/such"}, "model.lora.path=/no/such: no such folder"),
        ({"rank": 8, "targets": []}, "name layers"),
        ({"rank": 0}, None),
        ({"rank": 8}, None),
    ],
)
def test_faults_of_options(given, text):
    found = [*lora_faults(given)]
    assert (not found) if text is None else (text in found[0])


@each("family", FAMILIES)
def test_the_headers_of_a_folder_have_the_layers_of_the_model(tmp_path, family):
    model = build(family)
    model.save_pretrained(tmp_path)
    for targets in (["all-linear"], ["all-linear", "experts"], [r".*1\.mlp\.experts\.down_proj"]):
        config = changed(Config(), {"model.path": str(tmp_path), "model.lora": {"rank": 4, "targets": targets}})
        if len(targets) > 1 and family not in EXPERT_FACTORS:
            with pytest.raises(Refused, match=f"targets=experts: {type(model).__name__} has no experts with this name"):
                trained_factors(config)
            return
        found, ours = trained_factors(config), engine(model, lora=replace(SPEC, targets=targets))
        assert {*found.layers} == {*ours.local.lora.parameters.targets}
        assert found.parameters == sum(p.numel() for n, p in ours.model.named_parameters() if is_factor(n))
        assert found.of_experts == sum(p.numel() for n, p in ours.model.named_parameters() if "_proj_lora_" in n)
        assert ("experts" in str(targets)) == (found.of_experts > 0), "all-linear are linear layers, as in PEFT"


def test_planned_gradients_and_states_are_those_of_an_update(tmp_path):
    model, rows = make(), samples()
    ours = engine(model, lora=SPEC, dtype="float32")
    ours.forward_backward(batch_of(rows), NLL)
    grads = sum(p.grad.nbytes for p in ours.model.parameters() if p.grad is not None)
    ours.optim_step()
    states = sum(t.nbytes for state in ours.optimizer.state.values() for t in state.values() if t.dim())
    factors = sum(p.numel() for n, p in ours.model.named_parameters() if is_factor(n))
    base = tmp_path / "base"
    model.save_pretrained(base)
    items = memory(describe_model(str(base)), Layout(), RankWork(tokens=8, factors=factors, factors_rank=4))
    assert items["gradients"] == grads and items["optimizer states"] == states


def test_averages_are_of_the_factors():
    model, rows = make(), samples()
    ours = engine(model, lora=SPEC, optim=OptimSpec(lr=0.1, average=0.5))
    plain = {n: p.detach().clone() for n, p in ours.model.named_parameters() if is_factor(n)}
    for _ in range(3):
        ours.forward_backward(batch_of(rows), NLL)
        ours.optim_step()
        now = {n: p for n, p in ours.model.named_parameters() if is_factor(n)}
        plain = {n: 0.5 * p + 0.5 * now[n].detach() for n, p in plain.items()}
    got = ours.infer(batch_of(rows), ("logprobs",), average=True)["logprobs"]
    with torch.no_grad():
        for n, p in now.items():
            p.copy_(plain[n])
    torch.testing.assert_close(ours.infer(batch_of(rows), ("logprobs",))["logprobs"], got)
    assert {*ours.optimizer.state} == {*now.values()}


def test_an_adapter_with_values_that_are_not_finite_is_refused(tmp_path):
    base = tmp_path / "base"
    make().save_pretrained(base)
    for factor, value in ((A, float("nan")), (B, 1e300)):  # the second is infinite in float32
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32 if factor == A else torch.float64)
        ours = trained(model, dtype="float32" if factor == A else "float64")
        with torch.no_grad():
            next(p for n, p in ours.model.named_parameters() if n.endswith(factor))[0, 0] = value
        HfExport(base).write(tmp_path / factor, ours.exported(), ours.exported_set)
        with pytest.raises(Refused, match=rf"{factor}.weight has values that are not finite; take an earlier"):
            engine(model, lora=LoraSpec(path=str(tmp_path / factor)), base=base)


def test_an_adapter_is_one_file_however_many_factors_it_has(tmp_path, monkeypatch):
    """The header of 80 layers is longer than that of a part of a model, and PEFT reads one file."""
    monkeypatch.setattr("verl.checkpoint.safetensors_file.MAX_SHARD_BYTES", 64)
    targets = tuple(f"model.layers.{k}.self_attn.with_a_long_name_{n}_proj" for k in range(80) for n in range(9))
    parameters = ParameterSet(id="lora", kind="lora", base="", rank=1, targets=targets)
    named = {name: torch.full((1, 2), float(k)) for k, m in enumerate(targets) for name in parameters.factors(m)}
    write_adapter(tmp_path, parameters, tmp_path, named.items())
    read = load_file(tmp_path / "adapter_model.safetensors")
    assert read.keys() == named.keys() and all(torch.equal(read[name], tensor) for name, tensor in named.items())


def test_a_set_beside_trained_factors_of_experts_does_not_replace_them():
    ours = engine(build("qwen3_moe"), lora=replace(SPEC, targets=["experts"]))
    target = ours.local.lora.parameters.targets[0]
    other = LowRank(*(ours.model.get_parameter(name) for name in own_names(target)))
    module = ours.model.get_submodule(target.rpartition(".")[0])
    before = module.forward
    with pytest.raises(AssertionError, match=r"layers\.0\.mlp\.experts has factors, which these would replace"):
        with with_low_ranks(ours.model, {target: other}, 1.0):
            pass
    assert module.forward is before and has_factors(module)


@each("experts", (False, True))
def test_a_sibling_computes_as_an_engine_with_a_base_of_its_own(tmp_path, experts):
    """A critic on the policy's base; its updates and those of the policy alternate."""
    (build("qwen3_moe") if experts else make()).save_pretrained(tmp_path)
    spec = replace(SPEC, targets=["q_proj", "experts"]) if experts else SPEC
    given = {"folder": tmp_path, "lora": spec, "optim": OptimSpec(lr=1e-2), "dtype": "float32"}
    policy = build_engine(Options(), EngineContext(**given))
    context = EngineContext(**given, head="value")
    critic, alone = build_sibling(policy, Options(), context), build_engine(Options(), context)
    terms = (Term(name="loss", fn=lambda c: TermValue((c["values"] - 1) ** 2), outputs=("values",)),)
    batch = batch_of(samples())
    before = params(policy)
    for _ in range(3):
        for e in (critic, alone):
            e.forward_backward(batch, terms)
            e.optim_step()
        policy.forward_backward(batch, NLL)
        policy.optim_step()
        found = [e.infer(batch, ("values",))["values"] for e in (critic, alone)]
        assert torch.equal(*found) and found[0].abs().max() > 0
    assert all(torch.equal(p, params(alone)[n]) for n, p in params(critic).items())
    theirs = {n: p.data_ptr() for n, p in policy.model.named_parameters() if not is_factor(n)}
    ours = {n: p.data_ptr() for n, p in critic.model.named_parameters() if not is_factor(n)}
    assert ours == theirs, "one base"
    changed = {n for n, p in params(policy).items() if not torch.equal(p, before[n])}
    assert changed == {n for n in before if is_factor(n)}
    assert policy.check_packing(share_prefix=True) < 1e-3 > critic.check_packing(share_prefix=True)


def test_an_adapter_on_the_policys_base_computes_as_one_in_a_model_of_its_own(tmp_path):
    """A teacher and a reward model, while the policy is trained; they change with no update and save nothing."""
    base, batch = tmp_path / "base", batch_of(samples())
    model = make()
    model.save_pretrained(base)
    policy = build_engine(Options(), EngineContext(folder=base, lora=SPEC, optim=OptimSpec(lr=1e-2), dtype="float32"))
    start = policy.infer(batch, ("logprobs",))["logprobs"]
    for head, output in (("lm", "logprobs"), ("score", "scores")):
        score = torch.ones(1, 16) if head == "score" else None
        made = trained(model, head=head, score=score, dtype="float32")
        HfExport(base).write(tmp_path / head, made.exported(), made.exported_set)
        frozen = EngineContext(folder=base, lora=LoraSpec(path=str(tmp_path / head)), head=head, dtype="float32")
        ours = build_sibling(policy, Options(offload_frozen=True), frozen)
        expected = made.infer(batch, (output,))[output]
        policy.forward_backward(batch, NLL)
        policy.optim_step()
        torch.testing.assert_close(ours.infer(batch, (output,))[output], expected, rtol=1e-5, atol=1e-5)
        assert not ours.capabilities.trains and not any(p.requires_grad for p in ours.local.trained().parameters())
        held = {p.data_ptr() for n, p in policy.model.named_parameters() if not is_factor(n)}
        assert held == {p.data_ptr() for n, p in ours.model.named_parameters() if not is_factor(n)}, "one base"
        assert ours.check_packing(share_prefix=True) < 1e-3
        assert not ours.local.lora._start, "a frozen set is in memory once"
        found = [ours.infer(batch, (output,), start=start)[output] for start in (True, False)]
        assert torch.equal(*found)
        if head == "lm":
            assert (expected - start).abs().max() > 0.01
    with pytest.raises(Refused, match="lm: no score.weight in its weights: a language model"):
        build_sibling(policy, Options(), replace(frozen, lora=LoraSpec(path=str(tmp_path / "lm"))))


def all_weights(options, context):
    """A user's engine that does not read `context.lora`."""
    return engine(make())


def test_an_engine_that_would_train_all_weights_is_refused(tmp_path):
    context = EngineContext(folder=tmp_path, lora=SPEC, optim=OptimSpec(lr=1e-2))
    spec = RoleSpec(name="actor", queue=MemoryQueue(), engine=f"{__name__}:all_weights", options=None, context=context)
    with pytest.raises(Refused, match="model.lora: .*all_weights trains all weights"):
        build_roles(spec, ranks=[OneRank()])
    assert len(build_roles(replace(spec, context=replace(context, lora=None)), ranks=[OneRank()])) == 1
