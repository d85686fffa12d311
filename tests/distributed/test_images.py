"""Models that read images on several ranks: what one process computes, whichever ranks have images."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import vision_families
from fakes import put
from forked import run
from small_runs import metrics_of, small_run
from test_memory import num_bytes
from torch import Tensor
from vision import image_folder, model, pictures, rows, stored, stored_images

from verl.algorithms.losses import nll
from verl.batch import Batch, pack, part_of
from verl.config.model_files import describe_model
from verl.config.schema import Config
from verl.config.tree import changed
from verl.model_engine import rank_engine
from verl.model_engine.base import EngineContext, OneRank
from verl.model_engine.hf_model import load_causal_lm
from verl.model_engine.layout import Layout
from verl.model_engine.objective import trained_rows
from verl.model_engine.optim import OptimSpec
from verl.model_engine.options import Options
from verl.model_engine.settings import EngineSettings
from verl.model_engine.sharded import ShardedEngine
from verl.model_engine.torch_engine import TorchEngine
from verl.model_engine.torch_engine import build as build_torch
from verl.models.multimodal import with_pictures
from verl.models.pictures import Pictures
from verl.objective import Term
from verl.planner.memory import role_items
from verl.recipes import shapes
from verl.track.samples import read_samples
from verl.transfer_queue.media import MemoryMedia
from verl.transfer_queue.options import Shared
from verl.transfer_queue.shared import build as build_queue
from verl.types import Refs
from verl.workers.rank_batch import RankStep
from verl.workers.role import Role, RoleSpec, build_roles

NLL = (Term(name="loss", fn=nll),)
TEXT, THREE, REST = [5, 6], [3, 4], [0, 1, 2]
"""Rows of tests/vision.py: without images, with three images, with one or two."""
CASES = {
    "FSDP": (Layout(world_size=2), [TEXT, THREE + REST]),
    "FSDP, a rank without rows": (Layout(world_size=2), [THREE, []]),
    "FSDP, no image": (Layout(world_size=2), [[5], [6]]),
    "HSDP": (Layout(world_size=4, replicate=2), [TEXT, THREE, [], REST]),
    "SP": (Layout(world_size=2, sequence=2), [TEXT + THREE + REST]),
    "CP": (Layout(world_size=2, context=2), [TEXT + THREE + REST]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return image_folder(tmp_path_factory.mktemp("vl"), "qwen3_vl")


@cache
def made(kind: str) -> Any:
    return model(kind, num_key_value_heads=2)


def engine_of(
    kind: str, folder: Path, layout: Layout | None, *, tokens: int = 60, optim: str = "adamw", **more: Any
) -> TorchEngine:
    """tokens: the budget of a pass."""
    settings = EngineSettings(
        dtype="float64",
        optim=OptimSpec(lr=0.1, name=optim),
        max_tokens_per_microbatch=tokens,
        pictures=Pictures(folder, MemoryMedia()),
        **more,
    )
    own = copy.deepcopy(made(kind))
    return TorchEngine(own, settings) if layout is None else ShardedEngine(own, settings, layout=layout)


def batch_of(kind: str) -> Batch:
    batch = with_pictures(pack(rows()), pictures(), made(kind).config)
    weights = torch.rand(batch.num_loss_tokens, generator=torch.Generator().manual_seed(1))
    return batch.with_columns({"w/loss": weights})


def computed(engine: TorchEngine, batch: Batch) -> dict[str, Tensor]:
    """Return the log-probs and the whole gradients."""
    out = engine.forward_backward(batch, NLL, extra_outputs=("logprobs",))
    named = dict(engine.local.trained().named_parameters())
    found = {n: engine.local.whole(p.grad).clone() for n, p in named.items() if p.grad is not None}
    return {"logprobs": out.columns["logprobs"].clone(), **found}


def different(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    return [n for n, e in expected.items() if (found[n] - e).abs().max() > 1e-6 * max(float(e.abs().max()), 1e-3)]


def on_ranks(kind: str, folder: Path, layout: Layout, of: Sequence[list[int]], **more: Any) -> list[dict[str, Tensor]]:
    def on_rank(rank: int) -> dict[str, Tensor]:
        mine = np.array(of[layout.place(rank).data], np.int64)
        return computed(engine_of(kind, folder, layout, **more), part_of(batch_of(kind), mine))

    return run(layout.world_size, on_rank, timeout_s=60)


@pytest.mark.parametrize(
    "kind, case", [*(("qwen3_vl", case) for case in CASES), ("qwen2_5_vl", "FSDP"), ("qwen2_vl", "HSDP")]
)
def test_ranks_compute_what_one_process_does(kind: str, case: str, folder: Path) -> None:
    """A rank with rows of text alone gathers the tower's weights with the others, and adds 0 to their gradients."""
    layout, of = CASES[case]
    every = np.array(sorted(row for mine in of for row in mine), np.int64)
    whole = part_of(batch_of(kind), every)
    expected = computed(engine_of(kind, folder, None), whole)
    assert any(".visual." in n for n in expected) == (case != "FSDP, no image")
    assert all(t.abs().max() > 1e-4 for t in expected.values()), "a test of zeros proves nothing"
    logprobs = expected.pop("logprobs")
    found = on_ranks(kind, folder, layout, of)
    for rank, theirs in enumerate(found):
        mine = of[layout.place(rank).data]
        if mine:
            own = [logprobs[whole.row_start[i] : whole.row_start[i + 1]] for i in np.searchsorted(every, mine)]
            torch.testing.assert_close(theirs["logprobs"], torch.cat(own), rtol=0, atol=1e-9)
        del theirs["logprobs"]
        assert not (wrong := different(theirs, expected)), (rank, wrong)


@pytest.mark.parametrize("copies, frozen", [(1, ("language",)), (2, ()), (2, ("language",))])
def test_the_towers_gradients_of_earlier_passes_are_kept_if_the_last_pass_has_no_image(
    copies: int, frozen: Any, folder: Path
) -> None:
    """Copies of the model sum the gradients in the last pass of a step; the next step begins with none."""
    of, more = [[3, 5], [4, 6]], {"optim": "sgd", "freeze": frozen}  # Adam would enlarge the smallest differences

    def steps(engine: TorchEngine, mine: Sequence[int]) -> list[dict[str, Tensor]]:
        found = []
        for _ in range(2):
            found.append(computed(engine, part_of(batch_of("qwen3_vl"), np.array(mine))))
            del found[-1]["logprobs"]
            engine.optim_step()
        return found

    def on_rank(rank: int) -> list[dict[str, Tensor]]:
        engine = engine_of("qwen3_vl", folder, Layout(world_size=2, replicate=copies), tokens=1, **more)
        cuts = engine.passes.cuts(part_of(batch_of("qwen3_vl"), np.array(of[rank])))
        assert [rows.tolist() for rows in cuts] == [[0], [1]], "images first, text last"
        return steps(engine, of[rank])

    expected = steps(engine_of("qwen3_vl", folder, None, **more), [3, 4, 5, 6])
    assert any(".visual." in n for n in expected[0])
    for theirs in run(2, on_rank, timeout_s=60):
        assert not [wrong for pair in zip(theirs, expected, strict=True) if (wrong := different(*pair))]


@pytest.mark.parametrize("still", [(3,), (5,), (3, 4), (5, 6), (3, 6)])
def test_ranks_with_and_without_rows_that_need_no_backward_pass(still: tuple[int, ...], folder: Path) -> None:
    """A pass without a row of a rank is computed with one of its rows, with an image or without."""
    of, layout = [[3, 5], [4, 6]], CASES["FSDP"][0]
    batch = batch_of("qwen3_vl")
    batch = batch.with_columns({"w/loss": torch.where(torch.isin(batch.row_of, torch.tensor(still)), 0, 1.0)})
    mine = [part_of(batch, np.array(rows)) for rows in of]
    assert not all(trained_rows(part, NLL).all() for part in mine)
    expected = computed(engine_of("qwen3_vl", folder, None), part_of(batch, np.array([3, 4, 5, 6])))
    del expected["logprobs"]
    for theirs in run(2, lambda rank: computed(engine_of("qwen3_vl", folder, layout), mine[rank]), timeout_s=60):
        del theirs["logprobs"]
        assert not different(theirs, expected)


@pytest.mark.parametrize("kind", ["gemma3", "internvl", "pixtral", "mistral3", "llava", "kimi_k25", "gemma4"])
def test_further_families_over_two_ranks(kind: str) -> None:
    given = vision_families.rows(kind)
    of = [[i for i, row in enumerate(given) if bool(row.media) == has] for has in (False, True)]

    def found_by(layout: Layout | None, rows_of: Sequence[int]) -> dict[str, Tensor]:
        images = SimpleNamespace(blank=lambda: next(iter(vision_families.pictures(kind).values())))
        settings = EngineSettings(
            dtype="float64", optim=OptimSpec(lr=0.1), max_tokens_per_microbatch=100, pictures=cast(Pictures, images)
        )
        own = vision_families.model(kind)
        own.set_experts_implementation("eager")  # torch's grouped product has no float64
        batch = with_pictures(pack(given), vision_families.pictures(kind), own.config)
        weights = torch.rand(batch.num_loss_tokens, generator=torch.Generator().manual_seed(1))
        batch = part_of(batch.with_columns({"w/loss": weights}), np.array(rows_of))
        engine = TorchEngine(own, settings) if layout is None else ShardedEngine(own, settings, layout=layout)
        found = computed(engine, batch)
        return {name: t for name, t in found.items() if name != "logprobs"}

    two, whole = CASES["FSDP"][0], found_by(None, sorted(of[0] + of[1]))
    assert all(not different(theirs, whole) for theirs in run(2, lambda rank: found_by(two, of[rank]), timeout_s=60))


def built(folder: Path, layout: Layout) -> TorchEngine:
    """Return an engine of a folder; a rank among several reads its parts of it."""
    context = EngineContext(
        folder=folder,
        optim=OptimSpec(lr=1e-2),
        dtype="float64",
        layout=layout,
        media=MemoryMedia(),
        max_tokens_per_microbatch=60,
    )
    return (rank_engine.build if layout.world_size > 1 else build_torch)(Options(), context)


def step(engine: TorchEngine, of: Sequence[int]) -> None:
    engine.forward_backward(part_of(batch_of("qwen3_vl"), np.array(of)), NLL, 0, ())
    engine.optim_step()


def weights(engine: TorchEngine) -> dict[str, Tensor]:
    return {n: t.clone() for n, t in engine.weights()}


def test_parts_of_a_folder_are_trained_published_and_continued_by_one_process(folder: Path, tmp_path: Path) -> None:
    """Two ranks read their parts, train, and save; one process continues, and two ranks after it."""
    layout, one, of = *CASES["FSDP"][:1], Layout(world_size=1), CASES["FSDP"][1]
    every, start = TEXT + THREE + REST, weights(built(folder, one))

    def first(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor], list[Any]]:
        engine = built(folder, layout)
        read = weights(engine)
        step(engine, of[rank])
        engine.save(tmp_path / "two")
        return read, weights(engine), [(p.name, p.index, p.mine().clone()) for p in engine.weight_parts() if p.mine]

    found = run(2, first)
    for read, _, _ in found:
        assert read.keys() == start.keys() and all(torch.equal(read[n], t) for n, t in start.items())
    after = found[0][1]
    staged = {n: torch.full_like(t, torch.nan) for n, t in after.items()}
    for name, index, part in (part for _, _, parts in found for part in parts):
        staged[name][index] = part
    assert all(torch.equal(staged[n], t) and torch.equal(found[1][1][n], t) for n, t in after.items())
    alone = built(folder, one)
    step(alone, every)
    assert all((after[n] - t).abs().max() > 1e-4 for n, t in start.items()), "all weights changed, the tower's too"
    assert not different(after, weights(alone))

    continued = built(folder, one)
    continued.load(tmp_path / "two")
    for engine in (alone, continued):
        step(engine, every)
    assert not different(weights(continued), weights(alone))
    continued.save(tmp_path / "one")
    step(alone, every)

    def third(rank: int) -> dict[str, Tensor]:
        engine = built(folder, layout)
        engine.load(tmp_path / "one")
        step(engine, of[rank])
        return weights(engine)

    assert all(not different(theirs, weights(alone)) for theirs in run(2, third))


def test_workers_on_ray_read_the_images_of_their_rows_from_the_store(
    ray_session: Any, folder: Path, tmp_path: Path
) -> None:
    """Each process processes an image once, whatever it computes; the driver sends references."""
    from tests.distributed.watched import roles_that_note_images
    from tests.worker_contract import nothing
    from verl.workers.pools import Pool
    from verl.workers.ray.cluster import RayCluster

    queue, two = build_queue(Shared(max_bytes=64 << 20, timeout_s=20)), Layout(world_size=2)
    names = stored_images(queue.media)
    refs = put(queue, [stored(row, names) for row in rows()])
    context = EngineContext(folder=folder, dtype="float32")
    spec = RoleSpec(
        name="actor", queue=queue, engine="verl.model_engine.torch_engine:build", options=Options(), context=context
    )
    (role,) = build_roles(spec, ranks=[OneRank()])
    role.infer(RankStep(refs), {"logprobs": "old_logprobs"})
    alone = queue.read(refs, ("old_logprobs",))["old_logprobs"].values.clone()

    cluster = RayCluster({"main": Pool(ranks_per_node=2)}, {"actor": "main"}, layout=two, set_up=nothing)
    try:
        over = replace(spec, engine="verl.model_engine.rank_engine:build", context=replace(context, layout=two))
        group = cluster.start("actor", roles_that_note_images, (over, tmp_path), world_size=2)
        shares = [RankStep(Refs(refs[i] for i in of)) for of in (TEXT, REST + THREE)]
        for column in ("ref_logprobs", "old_logprobs"):
            steps = [(step, {"logprobs": column}) for step in shares]
            group.submit(Role.infer, steps).result(60)
            found = queue.read(refs, (column,))[column].values
            torch.testing.assert_close(found, alone, rtol=0, atol=2e-5)
    finally:
        cluster.close()
    logs = sorted((path.read_text().splitlines() for path in tmp_path.iterdir()), key=len)
    assert logs[0] == ["a white image"] and sorted(logs[1]) == sorted(f"image {name}" for name in names.values())


@pytest.mark.parametrize("frozen", [("vision", "projector"), ("language",)])
def test_frozen_parts_get_no_gradient_on_any_rank(frozen: Any, folder: Path) -> None:
    layout, of = CASES["FSDP"]
    expected = computed(engine_of("qwen3_vl", folder, None, freeze=frozen), batch_of("qwen3_vl"))
    del expected["logprobs"]
    for theirs in on_ranks("qwen3_vl", folder, layout, of, freeze=frozen):
        del theirs["logprobs"]
        assert not different(theirs, expected)


SIZES = {
    "tiny": {},
    "10M": dict(
        hidden_size=256, intermediate_size=768, num_hidden_layers=6, num_attention_heads=4, head_dim=64, vocab_size=4000
    ),
}


@pytest.mark.parametrize("size", SIZES)
def test_the_plan_has_the_tensors_of_a_rank(size: str, tmp_path: Path) -> None:
    """Weights, gradients and states of the optimizer, of the tower too, in one process and on each of two ranks."""
    wide = dict(hidden_size=192, intermediate_size=512, out_hidden_size=256, depth=6) if size == "10M" else {}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [16, 8, 8]}} if wide else {}
    image_folder(tmp_path, "qwen3_vl", tower=wide, **SIZES[size], **rope)
    config = changed(Config(), {"model.path": str(tmp_path)})
    facts = describe_model(str(tmp_path))
    whole = load_causal_lm(tmp_path)
    assert facts.parameters == sum(p.numel() for p in whole.parameters())
    assert facts.encoder_parameters == sum(p.numel() for n, p in whole.named_parameters() if ".visual." in n)

    def measured(layout: Layout, of: Sequence[int]) -> dict[str, int]:
        context = EngineContext(
            folder=tmp_path, optim=OptimSpec(lr=1e-2), dtype="float32", layout=layout, media=MemoryMedia()
        )
        engine = (rank_engine.build if layout.world_size > 1 else build_torch)(Options(), context)
        engine.forward_backward(part_of(batch_of("qwen3_vl"), np.array(of)), NLL, 0, ())
        found = {"weights": num_bytes(engine.local.trained().parameters())}
        found["gradients"] = num_bytes(p.grad for p in engine.local.trained().parameters() if p.grad is not None)
        engine.optim_step()
        assert engine.optimizer is not None
        states = (t for state in engine.optimizer.state.values() for t in state.values())
        return found | {"optimizer states": num_bytes(states)}

    two, one, of = *CASES["FSDP"][:1], Layout(world_size=1), CASES["FSDP"][1]
    for layout, found in ((one, [measured(one, THREE)]), (two, run(2, lambda rank: measured(two, of[rank])))):
        planned = role_items(config, "actor", layout, tokens=1)
        for mine in found:
            assert {n: planned[n] for n in mine} == pytest.approx(mine, rel=0.1)
    assert planned["gathered layers"] >= 4 * facts.encoder_gathered > 0


REWARD = """import zlib


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return zlib.crc32(solution_str.encode()) % 2
"""
"""A reward that differs within every group: a model without a warm-up is never right."""


@pytest.mark.runs
def test_a_run_on_two_ranks_is_that_of_one_process(tmp_path: Path) -> None:
    """Three steps with pictures, of which the later ones sample from published weights."""
    base = shapes.write_model(tmp_path / "base", seed=0)
    data, reward = shapes.write_problems(tmp_path / "rows.parquet", 12, seed=1), tmp_path / "bit.py"
    reward.write_text(REWARD)
    more = (f"reward.path={reward}", "data.max_prompt_tokens=64", "rollout.max_response_tokens=6", "optim.eps=1e-5")
    ranks = ("cluster.backend=processes", "cluster.ranks_per_node=2", "track.sinks=[jsonl]")
    found = []
    for name, layout in (("here", ()), ("there", ranks)):
        small_run(tmp_path / name, base, [data], *more, *layout)
        run_dir = tmp_path / name / "r"
        rows = [{r.sample_id: r.response_ids.tolist() for r in read_samples(run_dir, step)} for step in (1, 2, 3)]
        metrics = [metrics_of(run_dir)[step] for step in (1, 2, 3)]
        found.append((rows, [[m[key] for m in metrics] for key in ("actor/entropy", "actor/grad_norm")]))
    (rows, numbers), (theirs, others) = found
    assert rows == theirs and min(numbers[1]) > 0, "the same answers, and every step moves the weights"
    np.testing.assert_allclose(others, numbers, rtol=2e-5)
