"""Models that read images: every way to compute a batch has the log-probs and gradients of transformers, row by row."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import put
from torch import Tensor
from vision import GRIDS, KINDS, drawn, image_folder, model, own_logprobs, pictures, rows, seen, stored, stored_images

from verl.algorithms.losses import nll
from verl.batch import Batch, pack, select_rows
from verl.checkpoint.shards import tensor_names
from verl.errors import Refused
from verl.media_tokens import Picture
from verl.model_engine.base import EngineContext, OneRank
from verl.model_engine.optim import OptimSpec
from verl.model_engine.options import Options
from verl.model_engine.settings import EngineSettings
from verl.model_engine.torch_engine import TorchEngine
from verl.models.families import FAMILIES
from verl.models.multimodal import with_pictures
from verl.models.pictures import Pictures
from verl.models.tiny import character_tokenizer, qwen3
from verl.nn.kept_features import KeptFeatures
from verl.objective import Term
from verl.transfer_queue.memory import MemoryQueue
from verl.types import Medium, Sample, Segment
from verl.workers.rank_batch import RankStep
from verl.workers.role import RoleSpec, build_roles

NLL = (Term(name="loss", fn=nll),)
PATHS: dict[str, dict[str, Any]] = {
    "shared": {},
    "few tokens in a pass": {"max_tokens_per_microbatch": 40},
    "not shared": {"share_prefix": False},
    "padded": {"share_prefix": False, "attention_mode": "padded"},
    "padded after sharing": {"attention_mode": "padded"},
    "checkpointed": {"gradient_checkpointing": "full"},
}


@cache
def made(kind: str) -> Any:
    return model(kind)


@cache
def expected(kind: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the log-probs of each row, and the gradients, by transformers."""
    reference, found, content = copy.deepcopy(made(kind)), [], pictures()
    for row, weights in zip(rows(), shares()):
        logprobs = own_logprobs(reference, row, content)
        (-(logprobs * weights).sum()).backward()
        found.append(logprobs.detach())
    return found, {n: p.grad for n, p in reference.named_parameters()}


def shares() -> list[Tensor]:
    rng = torch.Generator().manual_seed(1)
    return [torch.rand(row.loss_tokens, generator=rng) for row in rows()]


def batch_of(config: Any, first: int = 0, *, share_prefix: bool = True) -> Batch:
    """Return the rows from `first` on, packed for a model."""
    batch = pack(rows()[first:], share_prefix=share_prefix)
    return with_pictures(batch, pictures(), config).with_columns({"w/loss": torch.cat(shares()[first:])})


def engine_of(kind: str, **settings: Any) -> TorchEngine:
    return TorchEngine(
        copy.deepcopy(made(kind)),
        EngineSettings(dtype="float32", optim=OptimSpec(lr=0.1, weight_decay=0.0), **settings),
    )


def gradients(engine: TorchEngine, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    out = engine.forward_backward(batch, NLL, extra_outputs=("logprobs",))
    return out.columns["logprobs"], {n: p.grad for n, p in engine.model.named_parameters()}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_path_has_the_logprobs_and_gradients_of_transformers(kind: str, path: str) -> None:
    engine = engine_of(kind, **PATHS[path])
    own, own_gradients = expected(kind)
    shared = PATHS[path].get("share_prefix", True)
    logprobs, found = gradients(engine, batch_of(engine.model.config, share_prefix=shared))
    torch.testing.assert_close(logprobs, torch.cat(own), rtol=0, atol=2e-5)
    for name, gradient in own_gradients.items():
        assert gradient.abs().max() > 1e-4, name
        scale = float(gradient.abs().max())
        torch.testing.assert_close(
            found[name] / scale, gradient / scale, rtol=0, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize(
    "settings, passes", [({}, 1), ({"attention_mode": "padded"}, 1), ({"max_tokens_per_microbatch": 40}, 2)]
)
def test_an_image_is_encoded_once_in_a_pass(settings: dict[str, Any], passes: int) -> None:
    engine, encoded = engine_of("qwen2_5_vl", **settings), list[list[list[int]]]()
    tower = engine.model.model.visual
    tower.register_forward_pre_hook(lambda _, args, given: encoded.append(given["grid_thw"].tolist()), with_kwargs=True)
    gradients(engine, batch_of(engine.model.config))
    for grids in encoded:
        assert len({tuple(grid) for grid in grids}) == len(grids), "the images differ in size: none is there twice"
    assert len(encoded) == passes and {tuple(g) for grids in encoded for g in grids} == {*GRIDS.values()}


@pytest.mark.parametrize("kind", KINDS)
def test_each_parameter_belongs_to_one_part(kind: str) -> None:
    """The projector has the matrix whose rows are the width of the language model."""
    family, whole = FAMILIES[kind], made(kind)
    parts = {name: family.part_of(name) for name, _ in whole.named_parameters()}
    inside = {id(p) for p in whole.base_model.get_submodule(family.language).parameters()}
    inside |= {id(p) for p in whole.get_output_embeddings().parameters()}
    for name, parameter in whole.named_parameters():
        assert (parts[name] == "language") == (id(parameter) in inside), name
    last = whole.base_model.get_submodule(family.projector[0])
    assert [*last.parameters()][-1].shape[0] == whole.config.get_text_config().hidden_size
    assert {*parts.values()} == {"vision", "projector", "language"}


def test_rows_without_images_leave_the_tower_alone() -> None:
    engine = engine_of("qwen3_vl")
    own, _ = expected("qwen3_vl")
    logprobs, found = gradients(engine, batch_of(engine.model.config, 5))
    torch.testing.assert_close(logprobs, torch.cat(own[5:]), rtol=0, atol=2e-5)
    assert {n for n, g in found.items() if g is None} == {n for n in found if ".visual." in n}
    assert engine.check_packing(share_prefix=True) < 1e-4
    whole = batch_of(engine.model.config)
    part = select_rows(whole, np.arange(5, 7))
    assert part.media is None and torch.equal(part.positions, whole.positions[:, -part.num_tokens :])
    torch.testing.assert_close(engine.infer(part, ("logprobs",))["logprobs"], logprobs)


def test_images_that_a_model_cannot_read_are_refused() -> None:
    config, text = made("qwen2_vl").config, TorchEngine(qwen3(character_tokenizer("ab"), layers=1), EngineSettings())
    with pytest.raises(ValueError, match="the rows of a pass have 3 media, and Qwen3ForCausalLM reads text alone"):
        text.infer(batch_of(config), ("logprobs",))
    with pytest.raises(ValueError, match="model_type 'qwen3' has no row for images; those with one are qwen2_vl"):
        batch_of(text.model.config)
    short = Segment(ids=np.array([1, 60, 60]), source="prompt", media=(Medium("cat", 1, 2),))
    sample = Sample(sample_id="s", trajectory_id="s", group_id="g", purpose="train", segments=(short, drawn(5)))
    with pytest.raises(ValueError, match="image cat has 6 tokens by its size, and 2 placeholders"):
        with_pictures(pack([sample]), pictures(), config)


def test_a_worker_reads_the_images_of_its_rows_from_the_store_of_the_queue(tmp_path: Path) -> None:
    """Each image is processed once; the same rows with the content in the batch have the same log-probs."""
    folder, queue = image_folder(tmp_path, "qwen3_vl"), MemoryQueue()
    names = stored_images(queue.media)
    refs = put(queue, [stored(row, names) for row in rows()])
    context = EngineContext(folder=folder, dtype="float32")
    spec = RoleSpec(
        name="actor", queue=queue, engine="verl.model_engine.torch_engine:build", options=Options(), context=context
    )
    (role,) = build_roles(spec, ranks=[OneRank()])
    role.infer(RankStep(refs), {"logprobs": "old_logprobs"})
    read = Pictures(folder, queue.media)
    given = with_pictures(
        pack(rows()), {n: read.of([name])[name] for n, name in names.items()}, role.engine.model.config
    )
    expected = role.engine.infer(given, ("logprobs",))["logprobs"]
    torch.testing.assert_close(queue.read(refs, ("old_logprobs",))["old_logprobs"].values, expected)
    other = {f"blank {n}": zeros(p) for n, p in given.media.pictures.items()}  # a reference is of one content
    names = tuple(f"blank {n}" for n in given.media.references)
    blank = replace(given, media=replace(given.media, references=names, pictures=other))
    assert (role.engine.infer(blank, ("logprobs",))["logprobs"] - expected).abs().max() > 1e-2, "they are seen"
    alone = TorchEngine(role.engine.model, EngineSettings(dtype="float32"))
    with pytest.raises(ValueError, match="a batch has 3 media, and this engine has no store of them"):
        alone.infer(pack(rows()), ("logprobs",))


def zeros(picture: Picture) -> Picture:
    return replace(picture, patches=torch.zeros_like(picture.patches))


def test_neighbouring_images_without_text_between_them_have_positions_of_their_own() -> None:
    """Two copies of one image, side by side: the second begins where the first ends."""
    both = Segment(ids=np.full(12, 60), source="prompt", media=(Medium("cat", 0, 6), Medium("cat", 6, 6)))
    sample = Sample(sample_id="s", trajectory_id="s", group_id="g", purpose="train", segments=(both, drawn(5)))
    content = {"cat": Picture(patches=torch.zeros(24, 12), grid=(1, 4, 6))}
    batch = with_pictures(pack([sample]), content, made("qwen2_vl").config)
    assert batch.positions.tolist() == [
        [0] * 6 + [3] * 6 + [6],
        [0, 0, 0, 1, 1, 1, 3, 3, 3, 4, 4, 4, 6],
        [0, 1, 2, 0, 1, 2, 3, 4, 5, 3, 4, 5, 6],
    ]
    assert seen([1]).media == ()


@pytest.mark.parametrize("frozen", [("vision",), ("vision", "projector"), ("language",)])
def test_frozen_parts_stay_and_the_others_get_the_gradient_of_whole_training(frozen: Any, tmp_path: Path) -> None:
    """Frozen parameters have no gradient and no state; a checkpoint has the others, and is that of the same parts."""
    whole, engine = engine_of("qwen3_vl"), engine_of("qwen3_vl", freeze=frozen)
    before = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
    family = FAMILIES["qwen3_vl"]
    still = {name for name in before if family.part_of(name) in frozen}
    (_, own), (_, found) = (gradients(one, batch_of(one.model.config)) for one in (whole, engine))
    assert {name for name, gradient in found.items() if gradient is None} == still and still != before.keys()
    for name in before.keys() - still:  # frozen norms take another kernel, which rounds in another order
        torch.testing.assert_close(found[name], own[name], rtol=0, atol=1e-5 * float(own[name].abs().max()))
    engine.optim_step()
    assert {name for name, p in engine.model.named_parameters() if torch.equal(p, before[name])} == still
    assert engine.optimizer is not None and len(engine.optimizer.state) == len(before) - len(still)
    engine.save(tmp_path)
    assert {name.removeprefix("model.") for name in tensor_names(tmp_path) if name.startswith("model.")} == (
        before.keys() - still
    )
    again = engine_of("qwen3_vl", freeze=frozen)
    again.load(tmp_path)
    for name, p in engine.weights():
        torch.testing.assert_close(dict(again.weights())[name], p, rtol=0, atol=0)
    for other in ((), ("projector",)):
        line = f"saved with model.freeze=[{', '.join(frozen)}], and this run has model.freeze=[{', '.join(other)}]: "
        with pytest.raises(Refused, match=re.escape(line)):
            (engine_of("qwen3_vl", freeze=other) if other else whole).load(tmp_path)
    text = batch_of(engine.model.config, 5)
    assert torch.isfinite(gradients(again, text)[0]).all()  # without images nothing depends on the tower
    again.optim_step()


def test_parts_have_learning_rates_of_their_own() -> None:
    rates = {"vision": 1e-3, "projector": 2e-3, "norm": 3e-3}
    spec = OptimSpec(lr=0.1, weight_decay=0.0, options={"lr": rates})
    engine = TorchEngine(copy.deepcopy(made("qwen2_5_vl")), EngineSettings(dtype="float32", optim=spec))
    names = {p: name for name, p in engine.model.named_parameters()}
    assert engine.optimizer is not None
    for group in engine.optimizer.param_groups:
        for p in group["params"]:
            part = FAMILIES["qwen2_5_vl"].part_of(names[p])
            wanted = rates.get(part, 3e-3 if p.ndim < 2 else 0.1)
            assert group["lr_scale"] * 0.1 == pytest.approx(wanted), names[p]


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_a_frozen_tower_encodes_each_image_once_in_a_run(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over passes, steps and outputs; the bits are those of encoding each image again. A budget holds the last ones."""

    def run() -> tuple[list[Tensor], int]:
        engine, calls = engine_of(kind, freeze=("vision", "projector"), max_tokens_per_microbatch=40), list[int]()
        engine.model.model.visual.register_forward_pre_hook(
            lambda _, args, given: calls.append(len(given["grid_thw"])), with_kwargs=True
        )
        batch, found = batch_of(engine.model.config), list[Tensor]()
        for _ in range(2):
            found.append(gradients(engine, batch)[0])
            engine.optim_step()
            found.append(engine.infer(batch, ("logprobs",))["logprobs"])
        assert not torch.equal(found[0], found[2]), "the language model is trained"
        return found, sum(calls)

    kept, calls = run()
    monkeypatch.setattr(KeptFeatures.__init__, "__defaults__", (0,))
    again, more = run()
    assert calls == len(GRIDS) < more and all(map(torch.equal, kept, again))
    monkeypatch.setattr(KeptFeatures.__init__, "__defaults__", (12 * 32 * 4,))  # of two images
    few, some = run()
    assert len(GRIDS) < some <= more and all(map(torch.equal, kept, few))
