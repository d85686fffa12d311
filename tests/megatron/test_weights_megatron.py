"""Weights in and out of the Megatron engine, bit by bit; its updates, its checkpoints, and mistakes in its names."""

from __future__ import annotations

import re
import shutil
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from cases import EXPERTS, MODELS, SIZES, Case, differences, engine, share
from forked import run
from megatron_engines import FOUR, FOUR_EXPERTS, LAYOUTS, built, folder, options_of
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from verl.errors import Refused
from verl.model_engine import megatron_model, megatron_names
from verl.model_engine.base import WeightPart
from verl.model_engine.layout import Layout
from verl.model_engine.megatron_names import FAMILIES, Piece, rows_of, run_of_halves, run_of_rows
from verl.model_engine.megatron_options import MODEL_TYPES, Options
from verl.model_engine.optim import OptimSpec

with warnings.catch_warnings():  # that Transformer Engine and Apex are not here
    warnings.simplefilter("ignore")
    from mbridge import models as bridges

BRIDGES = {"llama": bridges.LLaMABridge, "qwen2": bridges.Qwen2Bridge}
BRIDGES |= {"qwen3": bridges.Qwen3Bridge, "qwen3_moe": bridges.Qwen3MoEBridge}
TIED, BIASES = "qwen3, tied", "llama, biases"
BIASED, PLAIN = "qwen2, biased", "llama, plain"
MODELS[BIASED] = lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES))
MODELS[PLAIN] = lambda: LlamaForCausalLM(LlamaConfig(**SIZES))
SPEC = OptimSpec(lr=1e-2, eps=1e-2, weight_decay=0.1)  # so large an eps that the noise of a gradient of 0 is no step


def assembled(parts: list[list[tuple[str, tuple[int, ...], Any, Tensor | None]]]) -> dict[str, Tensor]:
    """The tensors that the parts of all ranks make together; each element is in one part."""
    whole: dict[str, Tensor] = {}
    for of_rank in parts:
        orders = [dict.fromkeys(name for name, *_ in of).keys() for of in (of_rank, parts[0])]
        assert [*orders[0]] == [*orders[1]], "one order on all ranks"
        for name, shape, index, mine in of_rank:
            into = whole.setdefault(name, torch.full(shape, torch.nan))
            if mine is not None:
                assert into[index].isnan().all(), f"{name} is in two parts"
                into[index] = mine
    return whole


def described(part: WeightPart) -> tuple[str, tuple[int, ...], Any, Tensor | None]:
    return part.name, part.shape, part.index, None if part.mine is None else part.flat(part.mine()).clone()


@pytest.mark.parametrize(
    "layout, name",
    [
        *(("TP", BIASES), ("PP", TIED), ("PP x VP", FOUR)),
        *(("TP x DP", TIED), ("TP x EP", EXPERTS), ("PP x EP", EXPERTS), ("TP x EP x ETP", EXPERTS)),
        *(("EP over TP", EXPERTS), ("EP over TP x DP", EXPERTS)),
    ],
)
def test_weights_come_out_as_they_went_in(layout, name):
    """By parts, as a publish sends them, and whole, as they are exported; the log-probs of both ways agree."""
    expected = dict(engine(name, "actor", None).weights())
    folder(name)

    def on(rank: int) -> tuple[Any, Any, float]:
        e = built(name, "actor", LAYOUTS[layout], options=options_of(layout))
        parts = [described(part) for part in e.weight_parts()]
        exported = {n: t.clone() for n, t in e.exported()}
        return parts, exported, e.check_packing(share_prefix=False)

    found = run(LAYOUTS[layout].world_size, on)
    published = assembled([parts for parts, _, _ in found])
    for of in (published, *(exported for _, exported, _ in found)):
        assert of.keys() == expected.keys()
        assert all(torch.equal(of[n], t) for n, t in expected.items())
    assert max(off for *_, off in found) < 1e-4


def updated(e: Any, case: Case, rank: int | None, steps: int) -> list[float]:
    """Do optimizer steps, each with its gradient; return the norms."""
    _, whole, terms = case.batch()
    _, batch, count = share(case, rank) if rank is not None else (None, whole, 0)
    norms = []
    for _ in range(steps):
        e.forward_backward(batch, terms, count)
        norms.append(e.optim_step()["grad_norm"].total)
    return norms


@pytest.mark.parametrize(
    "layout, name, distributed",
    [
        ("TP", TIED, False),
        ("TP x DP", TIED, True),
        ("PP x DP", TIED, True),
        ("PP x VP", FOUR, False),
        ("PP x VP x DP", FOUR_EXPERTS, True),
        ("DP", BIASES, True),
        ("EP", EXPERTS, True),
        ("TP x EP", EXPERTS, True),
        ("TP x ETP", EXPERTS, False),
        ("TP x EP x ETP", EXPERTS, True),
        ("EP over TP", EXPERTS, False),
        ("EP over TP x DP", EXPERTS, True),
    ],
)
def test_three_updates_are_those_of_one_process_and_continue_elsewhere(layout, name, distributed, tmp_path):
    """Weights and norms after three steps; then a checkpoint of two steps, of which one process does the third."""
    case = Case(LAYOUTS[layout], model=name)
    one = engine(name, "actor", None, optim=SPEC)
    norms = updated(one, case, None, 3)
    folder(name)

    def on(rank: int) -> tuple[dict[str, Tensor], list[float]]:
        e = built(name, "actor", case.layout, options=options_of(layout, distributed=distributed), optim=SPEC)
        found = updated(e, case, rank, 2)
        snapshot = e.snapshot()
        found += updated(e, case, rank, 1)
        snapshot.save(tmp_path / "two")
        e.save(tmp_path / "three")
        return {n: t.clone() for n, t in e.exported()}, found

    for weights, found in run(case.layout.world_size, on):
        np.testing.assert_allclose(found, norms, rtol=1e-5)
        assert not (wrong := differences(weights, dict(one.weights()), rtol=1e-5)), wrong
    again = engine(name, "actor", None, optim=SPEC)
    again.load(tmp_path / "two")
    assert again.optimizer_step == 2
    updated(again, case, None, 1)
    assert not (wrong := differences(dict(again.weights()), dict(one.weights()), rtol=1e-5)), wrong
    again.load(tmp_path / "three")
    assert again.optimizer_step == 3
    assert not (wrong := differences(dict(again.weights()), dict(one.weights()), rtol=1e-5)), wrong


@pytest.mark.parametrize(
    "layout, name", [("PP x DP", TIED), ("PP x VP", FOUR), ("TP x EP x ETP", EXPERTS), ("EP over TP", EXPERTS)]
)
def test_a_checkpoint_of_one_process_continues_on_megatron(layout, name, tmp_path):
    case = Case(LAYOUTS[layout], model=name)
    one = engine(name, "actor", None, optim=SPEC)
    updated(one, case, None, 2)
    one.save(tmp_path / "two")
    updated(one, case, None, 1)
    folder(name)

    def on(rank: int) -> tuple[dict[str, Tensor], int]:
        e = built(name, "actor", case.layout, options=options_of(layout, distributed=True), optim=SPEC)
        e.load(tmp_path / "two")
        updated(e, case, rank, 1)
        return {n: t.clone() for n, t in e.exported()}, e.optimizer_step

    for weights, steps in run(case.layout.world_size, on):
        assert steps == 3
        assert not (wrong := differences(weights, dict(one.weights()), rtol=1e-5)), wrong


def state_bytes(e: Any) -> int:
    """The bytes of weights, optimizer states and gradients on the device."""
    buffers = [buffer for c in e.updates.wrapped for buffer in (*c.buffers, *c.expert_parallel_buffers)]
    tensors = [*e.local.tensors(), *e.updates.tensors(), *(buffer.grad_data for buffer in buffers)]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def while_still(found: list[bool], offload: Any, read: Any, *args: Any) -> Any:
    """What `read` returns; appends whether no part can be moved meanwhile."""
    found.append(offload._lock.locked())
    return read(*args)


@pytest.mark.parametrize(
    "layout, name, head",
    [("PP x VP", FOUR, "lm"), ("DP x ETP", EXPERTS, "lm"), ("TP", BIASES, "value"), ("TP", BIASES, "score")],
)
def test_a_state_that_leaves_the_device_is_the_state_that_stays(layout, name, head, tmp_path):
    """Bitwise: steps, what is saved and loaded, what is published; and nothing comes back to be saved."""
    role, output = ("actor", "logprobs") if head == "lm" else ("critic", "values")
    case = Case(LAYOUTS[layout], role, model=name)
    folder(name, scored=head != "lm")

    def on(rank: int) -> tuple[int, int]:
        at = options_of(layout, distributed=True)
        ways = (replace(at, offload_weights=away, offload_optimizer=away) for away in (False, True))
        stays, goes = (built(name, role, case.layout, options=way, optim=SPEC, head=head) for way in ways)
        for e, file in ((stays, "stays"), (goes, "goes")):
            updated(e, case, rank, 2)
            before, still = state_bytes(e), []
            e._state.now = partial(while_still, still, e.offload, e._state.now)
            e.save(tmp_path / file)
            e.snapshot().save(tmp_path / f"{file} kept")
            assert state_bytes(e) == before, "it came back"
            assert still == [True, True], "it could be moved while it is read"
            e.load(tmp_path / f"{file} kept")
            updated(e, case, rank, 1)
        _, batch, _ = share(case, rank)
        assert torch.equal(*(e.infer(batch, (output,))[output] for e in (stays, goes)))
        for of in ("weights", "exported"):
            for (n, w), (m, v) in zip(getattr(stays, of)(), [*getattr(goes, of)()], strict=True):
                assert n == m and torch.equal(w, v), (of, n)
        for one, other in zip(stays.weight_parts(), goes.weight_parts(), strict=True):
            (n, _, _, w), (m, _, _, v) = described(one), described(other)
            assert n == m and (w is v is None or torch.equal(w, v)), n
        return state_bytes(stays), state_bytes(goes)

    for there, away in run(2, on):
        assert there > 0 == away
    for one in tmp_path.glob("stays*/*.safetensors"):
        same = load_file(str(one).replace("stays", "goes"))
        assert all(torch.equal(same[n], t) for n, t in load_file(one).items()), one.name


def test_a_gradient_that_is_not_finite_changes_nothing():
    case = Case(LAYOUTS["TP"])
    folder(case.model)

    def on(rank: int) -> tuple[bool, float, float]:
        e = built(case.model, "actor", case.layout, options=Options())
        before = [p.detach().clone() for p in e.local.parameters.values()]
        _, batch, count = share(case, rank)
        e.forward_backward(batch, case.batch()[2], count)
        if rank == 1:
            next(iter(e.local.parameters.values())).main_grad[0] = torch.nan
        skipped = e.optim_step()["skipped_updates"].total
        same = all(torch.equal(a, b) for a, b in zip(before, e.local.parameters.values(), strict=True))
        e.forward_backward(batch, case.batch()[2], count)
        return same, skipped, e.optim_step()["grad_norm"].total

    norm = updated(engine(case.model, "actor", None), case, None, 1)[0]
    for same, skipped, after in run(2, on):
        assert same and skipped == 1
        np.testing.assert_allclose(after, norm, rtol=1e-4)


def heads_first(way: Any, config: Any, made: Any) -> Any:
    """All queries, then all keys, then all values, in place of group after group."""
    width, queries, keys = 8, config.num_attention_heads, config.num_key_value_heads
    ends = {"q": (0, queries), "k": (queries, queries + keys), "v": (queries + keys, queries + 2 * keys)}
    if way not in ends:
        return made(way, config)
    start, end = ends[way]
    return lambda t: t.view(-1, width, *t.shape[1:])[start:end]


MISTAKES = {
    "heads that are not by group": heads_first,
    "keys and values swapped": lambda way, config, made: made({"k": "v", "v": "k"}.get(way, way), config),
    "gate and up swapped": lambda way, config, made: made({"gate": "up", "up": "gate"}.get(way, way), config),
}


def start_fails(layout: str, name: str) -> list[str]:
    """The messages of the check at start, which every run makes, of each rank; empty where it found nothing."""
    folder(name)

    def on(_: int) -> str:
        try:
            built(name, "actor", LAYOUTS[layout], options=options_of(layout)).check_packing(share_prefix=False)
        except ValueError as e:
            return str(e)
        return ""

    return run(LAYOUTS[layout].world_size, on)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_names_is_seen_at_the_start(mistake, monkeypatch):
    """A round trip does not see it, since what reads also writes."""
    views, made = MISTAKES[mistake], megatron_names._pick_of
    monkeypatch.setattr(megatron_names, "_pick_of", lambda way, config: views(way, config, made))
    assert all(start_fails("one", BIASES)), "a model whose weights are elsewhere was trained"


def test_chunks_in_another_order_are_seen_at_the_start(monkeypatch):
    """Both chunks of a stage next to each other, in place of one of every stage after the other."""

    def beside(layers: int, layout: Layout, stage: int, virtual_stages: int) -> list[range]:
        each = layers // (layout.pipeline * virtual_stages)
        firsts = [(stage * virtual_stages + chunk) * each for chunk in range(virtual_stages)]
        return [range(first, first + each) for first in firsts]

    monkeypatch.setattr(megatron_model, "layers_of_chunks", beside)
    assert all(start_fails("PP x VP", FOUR))


def test_shares_of_experts_in_another_order_are_seen(monkeypatch):
    """Each rank has the rows of gate and up of the other one, and its own columns of the last product. A round trip
    does not see it."""
    monkeypatch.setattr(megatron_model, "run_of_halves", lambda parts, at: run_of_halves(parts, 1 - at))
    monkeypatch.setattr(megatron_model, "run_of_rows", lambda parts, at: run_of_rows(parts[::-1], at))
    assert all(start_fails("TP x ETP", EXPERTS))


def test_two_heads_swapped_are_seen_at_the_start(monkeypatch):
    def first_two(part: Tensor) -> Tensor:
        heads = part.reshape(-1, 8, *part.shape[1:])
        return torch.cat([heads[1:2], heads[:1], heads[2:]]).reshape(part.shape)

    read, write = Piece.read, Piece.write
    monkeypatch.setattr(Piece, "read", lambda p, ts: first_two(read(p, ts)) if "q_proj" in p.name else read(p, ts))
    monkeypatch.setattr(Piece, "write", lambda p, ts, x: write(p, ts, first_two(x) if "q_proj" in p.name else x))
    assert all(start_fails("one", BIASES))


def test_a_wrong_split_dimension_is_seen(monkeypatch):
    """Rows of the output projection of attention, in place of its columns: a square matrix has both."""
    made = megatron_names._piece

    def planted(name: str, shape: Any, row: Any, *given: Any) -> Any:
        return made(name, shape, row._replace(way="rows") if name.endswith("o_proj.weight") else row, *given)

    monkeypatch.setattr(megatron_names, "_piece", planted)
    with pytest.raises(RuntimeError, match="o_proj.weight: .* is not"):
        start_fails("TP", BIASES)


def test_a_tied_head_that_is_sent_twice_is_refused(monkeypatch):
    """The copy of the embeddings on the last stage is delivered by the first stage alone."""
    made = megatron_names._piece

    def planted(*given: Any) -> Any:
        return made(*given[:-1], True)

    monkeypatch.setattr(megatron_names, "_piece", planted)
    folder(TIED)

    def on(_: int) -> str:
        with pytest.raises(Refused) as caught:
            built(TIED, "actor", LAYOUTS["PP"])
        return str(caught.value)

    assert {*run(2, on)} == {
        "model.engine=megatron: model.embed_tokens.weight would be delivered by 2 stages, and only one may: use "
        "model.engine=sharded"
    }


@pytest.mark.parametrize("layout, names", [("TP", (BIASED, PLAIN, EXPERTS, TIED)), ("TP x ETP", (EXPERTS,))])
def test_mbridge_has_the_same_values_in_the_same_parameters(layout, names):
    """A second opinion on the table, by code of other authors: what a tensor rank has of each of its parameters is what
    mbridge makes for it of the tensors in the folder."""
    for name in names:
        folder(name)

    def on(rank: int) -> tuple[int, list[str]]:
        compared, wrong = 0, []
        for name in names:  # mbridge ties the heads of all families from its first tied model on
            e = built(name, "actor", LAYOUTS[layout], options=options_of(layout))
            stored = load_file(folder(name) / "model.safetensors")
            bridge = BRIDGES[e.model.config.model_type](e.model.config, torch.float32)
            for mine, p in e.local.parameters.items():
                theirs = name_in_mbridge(mine, of_experts=name == EXPERTS)
                sources = [stored[source] for source in bridge._weight_name_mapping_mcore_to_hf(theirs)]
                whole = bridge._weight_to_mcore_format(theirs, sources)
                ranks = e.local.options.expert_tensor if ".experts." in mine else 2
                part = bridge._weight_split_across_tp(theirs, whole, p, ranks)[rank % ranks]
                compared += 1
                if not torch.equal(part, p):
                    wrong.append(f"{name}: {mine}")
        return compared, wrong

    for compared, wrong in run(2, on):
        assert compared > 30 and not wrong, wrong


def name_in_mbridge(name: str, *, of_experts: bool) -> str:
    """The name of the same parameter in a model with layers of Transformer Engine, which mbridge knows: norms are part
    of the projection behind them, and experts are numbered weights."""
    name = re.sub(r"local_experts\.(\d+)\.(linear_fc[12])\.weight", r"\2.weight\1", name)
    name = name.replace("layers.0.input_layernorm.weight", "layers.0.self_attention.linear_qkv.layer_norm_weight")
    name = name.replace("layers.1.input_layernorm.weight", "layers.1.self_attention.linear_qkv.layer_norm_weight")
    return name if of_experts else name.replace("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")


TABLE_LACKS = "model.layers.0.self_attn.q_norm.weight is not in the table of names of qwen3 models"
FOLDERS = {  # what is wrong, and the words of the line
    "a weight is not there": "1 weights of the model are not there.*model.layers.1.mlp.up_proj.weight",
    "a tensor of another model": "1 tensors in its weights are none of the model.*model.layers.0.mlp.bias",
    "another shape": r"model.norm.weight is \[16\] in the weights and \[32\] by config.json",
    "a tensor that the table lacks": f"{TABLE_LACKS}: use model.engine=sharded",
    "a parameter that the table lacks": "the folder has no tensor for decoder.final_layernorm.weight: use .*sharded",
}


@pytest.mark.parametrize("fault", FOLDERS)
def test_a_folder_that_does_not_match_the_table_is_refused_with_the_tensor(fault, tmp_path, monkeypatch):
    shutil.copytree(folder(TIED), tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors, norm = load_file(file), "model.norm.weight"
    if fault == "a weight is not there":
        del tensors["model.layers.1.mlp.up_proj.weight"]
    elif fault == "a tensor of another model":
        tensors["model.layers.0.mlp.bias"] = torch.zeros(4)
    elif fault == "another shape":
        tensors[norm] = tensors[norm][:16].clone()
    elif fault == "a tensor that the table lacks":
        monkeypatch.setattr(megatron_names, "FAMILIES", {"qwen3": FAMILIES["llama"]})
    else:
        made = megatron_model.pieces_of
        monkeypatch.setattr(megatron_model, "pieces_of", lambda *args: [p for p in made(*args) if p.name != norm])
    save_file(tensors, file, metadata={"format": "pt"})

    def on(_: int) -> str:
        with pytest.raises(Refused) as caught:
            built(TIED, "actor", LAYOUTS["one"], folder=tmp_path / "model")
        return str(caught.value)

    (line,) = run(1, on)
    assert re.search(FOLDERS[fault], line) and "\n" not in line, line


REFUSED = {
    "parallel.tensor=3": (Layout(world_size=3, tensor=3), "8 attention heads"),
    "parallel.context=2": (Layout(world_size=2, context=2), "Transformer Engine"),
    "parallel.expert=2": (Layout(world_size=2, expert=2), "0 experts"),
}


@pytest.mark.parametrize("key", REFUSED)
def test_layouts_that_cannot_be_are_refused_with_their_divisor(key):
    layout, why = REFUSED[key]
    folder(TIED)

    def on(_: int) -> str:
        with pytest.raises(Refused) as caught:
            built(TIED, "actor", layout)
        return str(caught.value)

    found = run(layout.world_size, on)
    assert all(line.startswith(key) and why in line for line in found), found[0]


def test_every_family_has_names_and_is_known_to_configuration():
    assert tuple(sorted(FAMILIES)) == tuple(sorted(MODEL_TYPES))
    with pytest.raises(Refused, match="no names of gemma3 models.*sharded"):
        rows_of("gemma3")
