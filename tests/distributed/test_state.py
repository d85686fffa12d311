"""Weights, optimizer, precision and proofs of an engine over several ranks, against the engine of one process."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cases
import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases import EXPERTS, LORA, SIZES, Case, differences, engine, on_rank, one_process, share, together
from forked import run, tensor_bytes
from transformers import GPT2Config, GPT2LMHeadModel, Phi3Config, Phi3ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from verl.checkpoint.adapter_export import write_adapter
from verl.checkpoint.shards import tensor_names
from verl.model_engine.layout import Layout
from verl.model_engine.lora_spec import LoraSpec
from verl.model_engine.optim import OptimSpec
from verl.model_engine.settings import EngineSettings
from verl.model_engine.sharded import ShardedEngine
from verl.model_engine.snapshot import COUNTERS, Snapshot
from verl.nn import precision
from verl.weight_sync.sender import WeightSender
from verl.wire import FP8, FP8_INPUTS

ONE, TWO, FOUR = Layout(world_size=1), Layout(world_size=2), Layout(world_size=4, replicate=2)
FULL = bool(os.environ.get("FULL_GRID"))
MODELS = ("qwen3, tied", "llama, biases")
LAYOUTS = {
    "one": ONE,
    "two": TWO,
    "three": Layout(world_size=3),
    "copies": Layout(world_size=2, replicate=2),
    "four": FOUR,
    "slices": Layout(world_size=6, tensor=2),  # of sizes that three ranks cannot share equally
    "stages": Layout(world_size=2, pipeline=2),
    "stages of two": Layout(world_size=4, pipeline=2),
}
EXACT = {"dtype": "float64"}  # Adam makes steps of the noise in a gradient that is 0


def steps(case: Case, rank: int | None, number: int, e: Any) -> Any:
    """So many optimizer steps on the same rows, with a gradient that is clipped."""
    for _ in range(number):
        if rank is None:
            _, batch, terms = case.batch()
            e.forward_backward(batch, terms)
        else:
            _, batch, count = share(case, rank)
            e.forward_backward(batch, case.batch()[2], count)
        e.optim_step()
    return e


def weights(e: Any) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in e.weights()}


def exported(e: Any) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in e.exported()}


@pytest.mark.parametrize("kind", ["", LORA])
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_updates_agree_for_every_number_of_ranks(role, kind):
    """Under LoRA the weights have the factors merged."""
    for name in LAYOUTS if FULL or role == "actor" else ("two", "stages"):
        layout = LAYOUTS[name]
        case = Case(layout, role, model=("llama, biases" if name == "two" else "qwen3, tied") + kind)
        expected = weights(steps(case, None, 3, engine(case.model, role, None, **EXACT)))
        start = weights(engine(case.model, role, None, **EXACT))
        assert max(float((expected[n] - w).abs().max()) for n, w in start.items()) > 1e-3, "nothing was learned"
        found = run(
            layout.world_size, lambda rank: weights(steps(case, rank, 3, engine(case.model, role, layout, **EXACT)))
        )
        for theirs in found:
            assert not differences(theirs, expected, rtol=1e-9), name


def test_emulated_bfloat16_rounds_what_is_gathered():
    """The switch changes the numbers, exactly as in one process, and the masters stay as they are."""
    layouts = (ONE, TWO, FOUR, Layout(world_size=4, tensor=2), LAYOUTS["stages"])
    for layout, kind in [(layout, "") for layout in layouts] + [(FOUR, LORA), (LAYOUTS["stages"], LORA)]:
        case = Case(layout, model="qwen3, tied" + kind)
        given = {"dtype": "bfloat16", "emulate_bf16": True}

        def both(rank: int) -> Any:
            found = on_rank(case, rank, **given)
            e = engine(case.model, "actor", layout, **given)
            before = weights(e)
            e.infer(share(case, rank)[1], ("logprobs",))
            return found, before, weights(e)

        found = run(layout.world_size, both)
        got, exact = together(case, [f[0] for f in found]), one_process(case)
        assert not differences(got, one_process(case, **given), rtol=1e-5)
        assert max(float((got[n] - exact[n]).abs().max() / exact[n].abs().max()) for n in exact) > 1e-3
        for _, before, after in found:
            assert all(torch.equal(before[n], after[n]) for n in before)


def test_a_precision_that_does_nothing_is_seen(monkeypatch):
    monkeypatch.setattr(
        "verl.model_engine.sharded.rounded_in_place", lambda shards, dtype: precision.rounded([], dtype)
    )
    case, given = Case(TWO), {"dtype": "bfloat16", "emulate_bf16": True}
    found = run(2, lambda rank: on_rank(case, rank, **given))
    assert differences(together(case, found), one_process(case, **given), rtol=1e-3)


CONTINUED = {
    "actor": {
        "none": ("two", "four", "stages"),
        "two": ("none", "four"),
        "four": ("two", "stages of two"),
        "slices": ("none",),
        "stages": ("none", "stages"),
        "stages of two": ("two",),
    },
    "critic": {"none": ("two", "stages"), "two": ("none",), "stages": ("none", "stages of two")},
    # a head of one row, of which a rank has nothing
    LORA: {"two": ("none", "four"), "slices": ("stages",), "stages of two": ("two",), "none": ("slices",)},
}
"""By role, or of factors: the layout that wrote, and the layout that continues."""
if not FULL:  # every kind writes and is read
    CONTINUED = {
        "actor": {"none": ("four",), "four": ("stages of two",), "slices": ("none",), "stages of two": ("two",)},
        "critic": {"none": ("stages",), "stages": ("none",)},
        LORA: {"none": ("slices",), "two": ("none", "four"), "stages of two": ("two",)},
    }


@pytest.mark.parametrize("what", CONTINUED)
def test_a_checkpoint_of_any_world_continues_on_any_other(what, tmp_path):
    """Two steps, a checkpoint, two more steps: the weights are those of four steps in one process, for any layouts that
    write and read."""
    role, name = ("actor", "qwen3, tied" + LORA) if what == LORA else (what, "qwen3, tied")
    expected = weights(steps(Case(ONE, role), None, 4, engine(name, role, None, **EXACT)))
    for writer, readers in CONTINUED[what].items():
        written, layout = tmp_path / writer, LAYOUTS.get(writer)

        def write(rank: int | None) -> None:
            steps(Case(layout or ONE, role), rank, 2, engine(name, role, layout, **EXACT)).save(written)

        run(layout.world_size, write) if layout else write(None)
        assert len([*written.glob("*.safetensors")]) == (layout.world_size if layout else 1), "every rank writes"
        assert tensor_names(written) == tensor_names(tmp_path / "none")
        assert all((what == LORA) == ("lora_" in tensor) for tensor in tensor_names(written))
        for reader in readers:
            theirs = LAYOUTS.get(reader)

            def read(rank: int | None) -> Any:
                e = engine(name, role, theirs, **EXACT)
                e.load(written)
                assert e.optimizer_step == 2
                return weights(steps(Case(theirs or ONE, role), rank, 2, e))

            found = run(theirs.world_size, read)[-1] if theirs else read(None)
            assert not differences(found, expected, rtol=1e-9), (writer, reader)


KEPT = ("none", "two", "slices and experts", "stages of experts", "stages" + LORA, "slices" + LORA)


@pytest.mark.parametrize("name", (*KEPT, "slices of two", "experts", "stages") if FULL else KEPT)
def test_a_snapshot_is_written_while_training_goes_on(name, tmp_path):
    """The state at its moment, in a checkpoint and as the exported folder has it, under Hugging Face or PEFT's names;
    collectives of both do not mix."""
    layouts = {
        "slices of two": Layout(world_size=4, tensor=2),
        "experts": Layout(world_size=4, expert=2),
        "slices and experts": Layout(world_size=4, tensor=2, expert=2),
        "stages of experts": Layout(world_size=4, pipeline=2, expert=2),
        **LAYOUTS,
    }
    layout = layouts.get(name.removesuffix(LORA))
    built, given = ("qwen3, tied" + LORA * name.endswith(LORA), "actor"), EXACT
    if "experts" in name:
        built, given = (EXPERTS, "actor"), {}  # in float64 transformers cannot compute them
    case = Case(layout or ONE, model=built[0])

    def train(rank: int | None) -> Any:
        e = steps(case, rank, 2, engine(*built, layout, **given))
        for number in range(2):  # groups are made once
            kept, then = e.snapshot(), exported(e)
            with ThreadPoolExecutor(1) as pool:
                written = pool.submit(lambda: (kept.save(tmp_path / str(number)), dict(kept.weights()))[1])
                steps(case, rank, 2, e)
                found = written.result(60)
        return then, found, exported(e)

    for then, found, now in run(layout.world_size, train) if layout else [train(None)]:
        assert then.keys() == found.keys() and all(torch.equal(found[n], w) for n, w in then.items())
        assert not torch.equal(now[[*now][-1]], then[[*then][-1]])
    again = engine(*built, None, **given)
    again.load(tmp_path / "1")
    assert again.optimizer_step == 4 and not differences(exported(again), then, rtol=1e-12)
    assert not differences(exported(steps(case, None, 2, again)), now, rtol=1e-9 if given else 1e-3)


def test_what_one_rank_cannot_write_fails_on_all_and_the_next_save_works(tmp_path):
    """Else those that could write wait for it in their next exchange, and meet the next save there."""
    (tmp_path / "file").touch()
    (tmp_path / "counted" / COUNTERS).mkdir(parents=True)

    def write(rank: int) -> list[str]:
        host, said = dist.new_group([0, 1]), []
        held = Snapshot({f"model.{rank}": torch.ones(3)}, [], lambda name, t: t, {"n": 1} if rank == 0 else None, host)
        for path in (tmp_path / ("file" if rank == 1 else "good") / "x", tmp_path / "counted", tmp_path / "next"):
            try:
                held.save(path)
                said.append("written")
            except OSError as e:
                said.append(type(e).__name__)
        return said

    assert run(2, write, timeout_s=60) == [["NotADirectoryError", "IsADirectoryError", "written"]] * 2
    assert tensor_names(tmp_path / "next") == {"model.0", "model.1"}


def test_a_checkpoint_of_another_model_is_refused_on_every_rank(tmp_path):
    case = Case(TWO)
    run(2, lambda rank: engine(case.model, "actor", TWO).save(tmp_path / "c"))

    def refused(rank: int) -> str:
        with pytest.raises(ValueError) as e:
            engine("llama, biases", "actor", TWO).load(tmp_path / "c")
        return str(e.value)

    assert all("the checkpoint is of another model" in message for message in run(2, refused))


@pytest.mark.parametrize("role", ["actor", "critic", "reward_model"] if FULL else ["actor", "critic"])
def test_the_proof_at_start_and_the_models_own_pass_are_those_of_one_process(role):
    probes = [np.arange(2, 12), np.arange(5, 9)]
    layouts = (TWO, Layout(world_size=2, tensor=2), Layout(world_size=2, sequence=2), LAYOUTS["stages"])
    for i, layout in enumerate(layouts):
        every = (*MODELS, MODELS[1] + LORA)
        for model in every if FULL else [MODELS[(i + len(role)) % 2], *every[2:][: role == "actor"]]:
            alone = engine(model, role, None)

            def prove(rank: int, model: str = model, layout: Layout = layout) -> Any:
                e = engine(model, role, layout)
                worst = e.check_packing(share_prefix=True)
                own = {dtype: e.own_logprobs(probes, dtype) for dtype in ("float32", "bfloat16", FP8, FP8_INPUTS)}
                apart = e.own_logprobs(probes, "bfloat16", merged=False)
                again = e.infer(share(Case(layout, "reference", model=model), rank)[1], alone.capabilities.outputs[:1])
                return worst, own, weights(e), again, apart

            for worst, own, held, _, apart in run(layout.world_size, prove):
                for mine, theirs in zip(apart, alone.own_logprobs(probes, "bfloat16", merged=False), strict=True):
                    assert np.allclose(mine, theirs, atol=1e-5)
                assert 0 < worst < 1e-4
                for dtype, found in own.items():
                    for mine, theirs in zip(found, alone.own_logprobs(probes, dtype), strict=True):
                        assert np.allclose(mine, theirs, atol=1e-5)
                assert all(torch.equal(held[n], t) for n, t in alone.weights())


@pytest.mark.parametrize("layout", ["four", "stages", "slices of two"])
def test_under_lora_the_policy_as_of_its_start_is_that_of_one_process(layout):
    """After updates: the factors are switched off, and on again."""
    at = Layout(world_size=4, tensor=2) if layout == "slices of two" else LAYOUTS[layout]
    case = Case(at, model="qwen3, tied" + LORA)
    plain = engine("qwen3, tied", "reference", None)

    def compared(rank: int) -> float:
        e, batch = steps(case, rank, 1, engine(case.model, "actor", at)), share(case, rank)[1]
        now, start = (e.infer(batch, ("logprobs",), start=start)["logprobs"] for start in (False, True))
        assert torch.equal(now, e.infer(batch, ("logprobs",))["logprobs"])
        assert torch.allclose(start, plain.infer(batch, ("logprobs",))["logprobs"], atol=1e-5)
        return float((now - start).abs().max())

    assert min(run(at.world_size, compared)) > 0.01, "the factors matter"


@pytest.mark.parametrize("name", ["llama, biases", EXPERTS])
def test_the_start_of_an_adapter_is_that_of_one_process_where_ranks_cut_layers(name, tmp_path):
    """The reference of a policy that started from an adapter, after an update: ranks have slices of its factors, or
    those of their experts."""
    cases.model(name).save_pretrained(tmp_path / "base")
    made = engine(name + LORA, "actor", None)
    (tmp_path / "adapter").mkdir()
    write_adapter(tmp_path / "adapter", made.exported_set, tmp_path / "base", made.exported())
    given = {"lora": LoraSpec(path=str(tmp_path / "adapter")), "base": tmp_path / "base"}
    cut = (Layout(world_size=4, expert=2),) if name == EXPERTS else (Layout(world_size=4, tensor=2), LAYOUTS["stages"])
    for layout in cut:
        case = Case(layout, model=name + LORA)

        def compared(rank: int, case: Case = case) -> float:
            alone = engine(case.model, "actor", None, **given)
            e, batch = steps(case, rank, 1, engine(case.model, "actor", case.layout, **given)), share(case, rank)[1]
            expected, start = (one.infer(batch, ("logprobs",), start=True)["logprobs"] for one in (alone, e))
            now = e.infer(batch, ("logprobs",))["logprobs"]
            assert torch.allclose(start, expected, atol=1e-5)
            return float((now - start).abs().max())

        assert min(run(layout.world_size, compared)) > 1e-3, "training moved the factors"


def test_weights_leave_whole_under_their_own_names_and_ties_are_kept():
    """A publish sends the same from two ranks as from one; the rank that does not send makes the same calls."""
    probes = [np.arange(2, 12)]

    def publish(e: Any, rank: int) -> Any:
        sender = WeightSender(_Outlet(), verify_first=1)
        if rank:
            return sender.attend(e, 0, probes)
        sent = sender.send(e, 0, probes, copy=True)
        return sent.source.manifest, sent.num_bytes, sent.probed.logprobs

    for model in ("qwen3, tied", "llama, biases", "qwen3, tied" + LORA):
        expected = publish(engine(model, "actor", None), 0)
        for layout in (TWO, LAYOUTS["stages"]):
            made = lambda rank, layout=layout, model=model: engine(model, "actor", layout)  # noqa: E731
            found = run(2, lambda rank: publish(made(rank), rank))[0]
            assert found[:2] == expected[:2] and np.allclose(found[2], expected[2], atol=1e-5)
            assert [*found[0]] == [*expected[0]]
            assert (
                not model.startswith("qwen3, tied") or found[0]["lm_head.weight"].tied_to == "model.embed_tokens.weight"
            )


class _Outlet:
    transport = "nowhere:open"

    def stage(self, version: int, shapes: Any, tensors: Any) -> str:
        assert [name for name, _ in tensors] == list(shapes)
        return "nowhere"


@pytest.mark.parametrize("layout", ["two", "stages"])
def test_a_gradient_that_is_not_finite_on_one_rank_is_refused_by_all(layout, tmp_path):
    case = Case(LAYOUTS[layout])

    def spoiled(rank: int) -> Any:
        e = engine(case.model, "actor", case.layout, dump_dir=tmp_path, optim=OptimSpec(lr=1e-2, max_skipped_updates=1))
        before = weights(e)
        _, batch, count = share(case, rank)
        steps(case, rank, 1, e)
        moved = weights(e)
        for attempt in range(2):
            e.forward_backward(batch, case.batch()[2], count)
            if rank == 1:
                e.local.trained_parts()[-1].grad.fill_(float("nan"))
            if attempt:
                with pytest.raises(FloatingPointError):
                    e.optim_step()
            else:
                assert e.optim_step()["skipped_updates"].value == 1
        assert not any(p.grad is not None for p in e.local.trained().parameters())
        return (
            e.optimizer_step,
            all(torch.equal(moved[n], w) for n, w in e.weights()),
            torch.equal(before["model.norm.weight"], moved["model.norm.weight"]),
        )

    assert run(2, spoiled) == [(1, True, False)] * 2
    assert {p.name for p in tmp_path.iterdir()} >= {"nonfinite_update_1_1_rank0.pt", "nonfinite_update_1_1_rank1.pt"}


def test_every_rank_makes_the_passes_of_the_one_that_needs_most():
    """Without a number from the driver too: as in `infer`, or else one rank would wait for the other for ever."""
    case = Case(TWO, "reference")

    def uneven(rank: int) -> Any:
        _, batch, _ = share(case, 0)
        e = engine(case.model, "reference", TWO, max_tokens_per_microbatch=20 if rank else 10_000)
        return e.infer(batch, ("logprobs",))["logprobs"]

    first, second = run(2, uneven)
    assert torch.allclose(first, second, atol=1e-5)


def test_checkpointed_activations_change_nothing():
    for layout in (Layout(world_size=4, tensor=2), Layout(world_size=4, sequence=2), LAYOUTS["stages of two"]):
        case = Case(layout)
        for policy in ("selective", "full"):
            found = run(4, lambda rank, policy=policy: on_rank(case, rank, gradient_checkpointing=policy))
            assert not differences(together(case, found), one_process(case)), (layout, policy)


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16", "emulate_bf16": False}], ids=["float32", "bfloat16"])
def test_sharded_layers_that_are_computed_again_have_the_bits_of_those_that_are_kept(options):
    found = {}
    for policy in ("none", "selective", "full"):
        given = {**options, "gradient_checkpointing": policy}
        found[policy] = run(2, lambda rank, given=given: on_rank(Case(TWO), rank, **given))
    for policy in ("selective", "full"):
        for rank in range(2):
            (again, kept) = (found[how][rank] for how in (policy, "none"))
            assert again["metrics"] == kept["metrics"], policy
            for name in kept["columns"]:
                assert torch.equal(again["columns"][name], kept["columns"][name]), (policy, name)
            for name in kept["whole"]:
                assert torch.equal(again["whole"][name], kept["whole"][name]), (policy, name)


def test_models_that_cannot_be_cut_are_refused_by_name():
    def refused(make: Any, size: int) -> str:
        def on(rank: int) -> str:
            layout = Layout(world_size=size, tensor=size)
            with pytest.raises(ValueError) as e:
                ShardedEngine(make(), EngineSettings(dtype="float32"), layout=layout)
            return str(e.value)

        return run(size, on)[0]

    said = refused(lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES | {"num_key_value_heads": 1})), 2)
    assert said.startswith("parallel.tensor=2: Qwen3ForCausalLM has 1 key-value heads, which 2 ranks cannot share")
    said = refused(lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES | {"vocab_size": 41})), 2)
    assert "has 41 entries of the vocabulary" in said
    said = refused(lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES | {"intermediate_size": 50})), 4)
    assert "has a matrix of 50, which 4 ranks cannot share equally" in said
    said = refused(lambda: GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=40)), 2)
    assert "GPT2LMHeadModel cannot be cut over ranks here: transformers has no plan for it" in said
    said = refused(lambda: Phi3ForCausalLM(Phi3Config(**SIZES)), 2)
    assert "Phi3ForCausalLM cannot be cut over ranks here: its plan wants ('layers.*.self_attn.qkv_proj'" in said


@pytest.mark.skipif(not FULL, reason="test_memory shows it of more layouts: make test-all")
def test_a_rank_holds_its_part_and_no_more():
    """Bytes of tensors that live after a pass: parameters over all ranks that share them, and little else."""
    big = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 2000, "tie_word_embeddings": False}

    def held(rank: int, layout: Layout) -> tuple[int, int]:
        before = tensor_bytes()
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES | big))
        whole = sum(p.nbytes for p in model.parameters())
        e = ShardedEngine(model, EngineSettings(dtype="float32"), layout=layout)
        del model
        e.check_packing(share_prefix=True)
        return tensor_bytes() - before, whole

    for layout in (Layout(world_size=4), Layout(world_size=4, tensor=2), Layout(world_size=4, tensor=2, sequence=2)):
        for mine, whole in run(4, lambda rank: held(rank, layout)):
            assert mine < 1.1 * whole / 4, (layout, mine / whole)


def test_layouts_that_it_cannot_do_are_refused():
    few_heads = SIZES | {"num_attention_heads": 3, "num_key_value_heads": 3}
    cases = {
        "parallel.expert=2: Qwen3ForCausalLM cannot give its experts to ranks here: transformers has no plan": (
            {"expert": 2},
            {},
            SIZES,
        ),
        "parallel.expert=2 does not divide the 1 ranks that hold one copy": ({"expert": 2, "replicate": 2}, {}, SIZES),
        "parallel.sequence=2 wants model.engine_options.attention=auto": (
            {"sequence": 2},
            {"attention_mode": "padded"},
            SIZES,
        ),
        "parallel.context=2 wants model.engine_options.attention=auto": (
            {"context": 2},
            {"attention_mode": "padded"},
            SIZES,
        ),
        "parallel.sequence=2 with parallel.tensor=1: the model has 3 attention heads": ({"sequence": 2}, {}, few_heads),
    }

    def refused(rank: int) -> list[str]:
        out = []
        for layout, settings, sizes in cases.values():
            with pytest.raises(ValueError) as e:
                model = Qwen3ForCausalLM(Qwen3Config(**sizes))
                ShardedEngine(model, EngineSettings(dtype="float32", **settings), layout=Layout(world_size=2, **layout))
            out.append(str(e.value))
        return out

    for said in run(2, refused):
        assert all(message.startswith(start) for message, start in zip(said, cases, strict=True)), said
