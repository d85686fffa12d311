"""Modules that are trained whole beside the factors of LoRA: outputs and gradients are PEFT's, the reference and the
roles on the base have the values of the start, and what is written loads elsewhere."""

import warnings
from dataclasses import replace

import pytest
import torch
from each import each
from test_engine import NLL, batch_of, engine, make, params, samples
from test_lora_training import padded, peft_values, trained
from transformers import AutoModelForCausalLM

from verl.batch import pack
from verl.checkpoint.hf import HfExport
from verl.errors import Refused
from verl.model_engine.base import EngineContext
from verl.model_engine.lora import is_factor
from verl.model_engine.lora_spec import LoraSpec
from verl.model_engine.merging import write_merged
from verl.model_engine.optim import OptimSpec
from verl.model_engine.options import Options
from verl.model_engine.sibling import build_sibling
from verl.model_engine.torch_engine import build as build_engine
from verl.objective import Term, TermValue

SPEC = LoraSpec(rank=4, alpha=8.0, modules_to_save=["embed_tokens", "lm_head", "model.norm"])
WHOLE = {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"}
PROBE = [torch.arange(1, 12).numpy()]


@pytest.fixture
def peft(reference):
    """The PEFT library of `make reference-packages`."""
    return reference("peft")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    make(tied=False).save_pretrained(folder)
    return folder


def built(base, lora=SPEC, **more):
    context = EngineContext(folder=base, lora=lora, optim=OptimSpec(lr=1e-2), dtype="float32", **more)
    return build_engine(Options(), context)


def update(e, count=2):
    for _ in range(count):
        e.forward_backward(batch_of(samples()), NLL)
        e.optim_step()


def as_peft(peft, base, spec):
    config = peft.LoraConfig(
        r=spec.rank, lora_alpha=spec.alpha, target_modules=["q_proj"], modules_to_save=spec.modules_to_save
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).eval()


def logprobs_of(model):
    ids = torch.from_numpy(PROBE[0])
    found = torch.log_softmax(model(input_ids=ids[None]).logits[0].detach(), -1)
    return found[:-1].gather(-1, ids[1:, None])[:, 0]


@each("saved", (["embed_tokens", "lm_head"], ["norm"], ["layers.1.mlp", "lm_head"]))
def test_outputs_and_gradients_are_those_of_peft(peft, base, saved):
    """Packed with shared prompts, packed alone and padded, in float32."""
    spec, rows = replace(SPEC, targets=["q_proj"], modules_to_save=saved), samples()
    model = AutoModelForCausalLM.from_pretrained(base)
    theirs, (ids, labels) = as_peft(peft, base, spec), padded(rows)
    for mode, share in (("auto", True), ("auto", False), ("padded", False)):
        ours = trained(model, spec, attention_mode=mode, dtype="float32")
        given = dict(peft_values(ours))
        theirs.zero_grad()
        with torch.no_grad():
            for name, p in theirs.named_parameters():
                if ".lora_" in name:
                    p.copy_(given.pop(name.replace(".default.weight", ".weight")))
        logits = theirs(input_ids=ids).logits[:, :-1]
        torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels[:, 1:]).backward()
        batch = pack(rows, share_prefix=share).with_columns(batch_of(rows).columns)
        found = ours.infer(batch, ("logprobs",))["logprobs"]
        every = torch.log_softmax(logits, -1)
        wanted = [every[i, t, labels[i, t + 1]] for i, t in (labels[:, 1:] != -100).nonzero().tolist()]
        torch.testing.assert_close(found, torch.stack(wanted), rtol=1e-6, atol=2e-6)
        ours.forward_backward(batch, NLL)
        got = {n: p.grad for n, p in ours.model.named_parameters() if p.grad is not None}
        expected = {
            n.removeprefix("base_model.model.").replace(".default", "").replace(".modules_to_save", ""): p.grad
            for n, p in theirs.named_parameters()
            if p.grad is not None
        }
        expected = {
            n.replace("lora_A.weight", "lora_A").replace("lora_B.weight", "lora_B"): g for n, g in expected.items()
        }
        assert got.keys() == expected.keys() and any(not is_factor(n) for n in got)
        for name, grad in expected.items():
            torch.testing.assert_close(got[name], grad, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_an_update_changes_the_factors_and_these_modules_and_nothing_else(base):
    rates = {"lr": {"embedding": 1e-3, "head": 2e-3}}
    ours = engine(
        AutoModelForCausalLM.from_pretrained(base), lora=SPEC, dtype="float32", optim=OptimSpec(lr=1e-2, options=rates)
    )
    before = params(ours)
    update(ours)
    changed = {name for name, p in params(ours).items() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if is_factor(name)} | WHOLE
    rate = {id(p): group["lr"] for group in ours.optimizer.param_groups for p in group["params"]}
    named = dict(ours.model.named_parameters())
    assert rate.keys() == {id(named[n]) for n in changed}
    found = {round(rate[id(named[n])], 6) for n in ("model.embed_tokens.weight",)}
    assert found == {1e-3} and round(rate[id(named["lm_head.weight"])], 6) == 2e-3


def test_the_reference_has_the_values_of_the_start(base):
    """Also in bfloat16: its copies of the weights are made again when a weight has changed."""
    for dtype in ("float32", "bfloat16"):
        ours = engine(AutoModelForCausalLM.from_pretrained(base), lora=SPEC, dtype=dtype)
        batch = batch_of(samples())
        start = ours.infer(batch, ("logprobs",))["logprobs"]
        update(ours)
        after = ours.infer(batch, ("logprobs",))["logprobs"]
        kept = params(ours)
        assert torch.equal(ours.infer(batch, ("logprobs",), start=True)["logprobs"], start)
        assert torch.equal(ours.infer(batch, ("logprobs",))["logprobs"], after) and not torch.equal(after, start)
        assert all(torch.equal(p, kept[name]) for name, p in params(ours).items())
        update(ours, 1)
        assert torch.equal(ours.infer(batch, ("logprobs",), start=True)["logprobs"], start)


def test_published_weights_are_what_the_trainer_computes_with(base):
    ours = engine(AutoModelForCausalLM.from_pretrained(base), lora=SPEC, dtype="float32")
    update(ours)
    plain = engine(AutoModelForCausalLM.from_pretrained(base), optim=None, dtype="float32")
    with torch.no_grad():
        for name, weight in ours.weights():
            plain.model.get_parameter(name).copy_(weight)
    found = [e.infer(batch_of(samples()), ("logprobs",))["logprobs"] for e in (ours, plain)]
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
    parts = {part.name: part.mine() for part in ours.weight_parts()}
    assert all(torch.equal(parts[name], weight) for name, weight in ours.weights())
    own, theirs = (e.own_logprobs(PROBE, "float32")[0] for e in (ours, plain))
    assert abs(own - theirs).max() < 1e-5


def test_a_checkpoint_continues_bitwise(base, tmp_path):
    ours = built(base)
    update(ours)
    ours.save(tmp_path / "state")
    again = built(base, replace(SPEC, seed=9))
    again.load(tmp_path / "state")
    for e in (ours, again):
        update(e)
    assert all(torch.equal(p, params(again)[n]) for n, p in params(ours).items())
    batch = batch_of(samples())
    starts = [e.infer(batch, ("logprobs",), start=True)["logprobs"] for e in (again, built(base))]
    assert torch.equal(*starts), "the base is that of the folder"
    with pytest.raises(Refused, match="the checkpoint is of another model"):
        built(base, replace(SPEC, modules_to_save=["lm_head"])).load(tmp_path / "state")


def test_the_exported_folder_is_peft_s_and_ours_and_merges(peft, base, tmp_path):
    ours = built(base)
    update(ours)
    want = torch.from_numpy(ours.own_logprobs(PROBE, "float32")[0])
    HfExport(base).write(tmp_path / "hf", ours.snapshot().weights(), ours.exported_set)
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "hf")
    assert (logprobs_of(theirs) - want).abs().max() < 1e-5
    theirs.save_pretrained(tmp_path / "peft")
    (tmp_path / "hf" / "tokenizer_config.json").write_text("{}")
    write_merged(tmp_path / "hf", tmp_path / "merged", "float32")
    assert (logprobs_of(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")) - want).abs().max() < 1e-5
    batch = batch_of(samples())
    for folder in ("hf", "peft"):
        again = built(base, LoraSpec(path=str(tmp_path / folder)))
        assert (torch.from_numpy(again.own_logprobs(PROBE, "float32")[0]) - want).abs().max() < 1e-5, folder
        assert {n for n, _ in again.exported()} == {n for n, _ in ours.exported()}
        before, kept = again.infer(batch, ("logprobs",))["logprobs"], params(again)
        update(again)
        assert {n for n, p in params(again).items() if not torch.equal(p, kept[n])} >= WHOLE
        assert torch.equal(again.infer(batch, ("logprobs",), start=True)["logprobs"], before), "with the adapter"


@each("path", (False, True))
def test_roles_on_the_base_have_its_own_values(base, tmp_path, path):
    """A critic, and a teacher that is an adapter, beside a policy that starts from an adapter or from the base."""
    spec, batch = SPEC, batch_of(samples())
    if path:
        first = built(base)
        update(first)
        HfExport(base).write(tmp_path / "first", first.snapshot().weights(), first.exported_set)
        spec = LoraSpec(path=str(tmp_path / "first"))
    made = trained(AutoModelForCausalLM.from_pretrained(base), replace(SPEC, modules_to_save=[]), dtype="float32")
    HfExport(base).write(tmp_path / "teacher", made.exported(), made.exported_set)
    policy = built(base, spec)
    update(policy)
    frozen = EngineContext(folder=base, lora=LoraSpec(path=str(tmp_path / "teacher")), dtype="float32")
    teacher = build_sibling(policy, Options(), frozen)
    given = {"folder": base, "lora": spec, "optim": OptimSpec(lr=1e-2), "dtype": "float32", "head": "value"}
    critic, alone = build_sibling(policy, Options(), EngineContext(**given)), built(base, spec, head="value")
    terms = (Term(name="loss", fn=lambda c: TermValue((c["values"] - 1) ** 2), outputs=("values",)),)
    expected = made.infer(batch, ("logprobs",))["logprobs"]
    for _ in range(2):
        before = params(policy)
        for e in (critic, alone):
            e.forward_backward(batch, terms)
            e.optim_step()
        assert all(torch.equal(p, before[n]) for n, p in params(policy).items())
        update(policy, 1)
        values = [e.infer(batch, ("values",))["values"] for e in (critic, alone)]
        assert torch.equal(*values) and values[0].abs().max() > 0
        torch.testing.assert_close(teacher.infer(batch, ("logprobs",))["logprobs"], expected, rtol=1e-5, atol=1e-5)
    ours, theirs = ({n: p.data_ptr() for n, p in e.model.named_parameters()} for e in (critic, policy))
    same = {n for n in ours if ours[n] == theirs[n]}
    assert same == {n for n in ours if not is_factor(n)} - (WHOLE - {"lm_head.weight"}), "one base, but for these"
    assert critic.local.lora.parameters.replaced and "lm_head.weight" not in dict(critic.local.trained_parameters())


def test_embedding_and_head_on_a_quantised_base(base, tmp_path):
    context = EngineContext(folder=base, lora=SPEC, optim=OptimSpec(lr=1e-2), dtype="float32", quantisation="int8")
    ours = build_engine(Options(), context)
    batch = batch_of(samples())
    start = ours.infer(batch, ("logprobs",))["logprobs"]
    before = params(ours)
    update(ours)
    assert {n for n, p in params(ours).items() if not torch.equal(p, before[n])} >= WHOLE
    assert torch.equal(ours.infer(batch, ("logprobs",), start=True)["logprobs"], start)
    spec = replace(SPEC, targets=["q_proj"], modules_to_save=["o_proj"])
    with pytest.raises(Refused, match="self_attn.o_proj of Qwen3ForCausalLM: its weights are quantised"):
        build_engine(Options(), replace(context, lora=spec))


@each(
    "saved,text",
    (
        (["embed_tokens"], "model.embed_tokens of Qwen3ForCausalLM: the embedding and the output head are one tied"),
        (["lm_head"], "lm_head of Qwen3ForCausalLM: the embedding and the output head are one tied tensor"),
        (["lm_haed"], "modules_to_save=lm_haed: no module of Qwen3ForCausalLM with weights has a name that ends so"),
        (["rotary_emb"], "modules_to_save=rotary_emb: no module of Qwen3ForCausalLM with weights"),
        (["q_proj"], "layers.0.self_attn.q_proj of Qwen3ForCausalLM: it has factors, and would be trained twice"),
    ),
)
def test_what_cannot_be_trained_whole_is_one_line(saved, text):
    with pytest.raises(Refused) as found:
        engine(make(tied=True), lora=replace(SPEC, modules_to_save=saved))
    assert text in str(found.value) and "\n" not in str(found.value)
