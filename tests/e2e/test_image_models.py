"""Runs of a model that reads images."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from image_tokenizers import marked_folder
from safetensors.torch import load_file, save_file
from small_runs import metrics_of, same_tensors, small_args, small_run
from transformers import AutoModelForImageTextToText
from vision import model

from verl import AutoModelForCausalLMWithValueHead, VerlConfig, VerlTrainer
from verl.config.image_models import image_model_faults
from verl.config.load import Resolved, load_config
from verl.config.model_files import describe_model
from verl.config.tree import changed
from verl.config.validate import validate
from verl.driver.assemble import context_of
from verl.driver.identity import identity_of
from verl.driver.models import trained
from verl.driver.run_dir import open_run_dir
from verl.driver.state import DriverState, rng_state, write_state
from verl.errors import Refused
from verl.model_engine.layout import Layout
from verl.model_engine.merging import write_merged
from verl.models import tiny
from verl.planner.disk import checkpoint_parts
from verl.planner.memory import role_items
from verl.planner.plan import make_plan
from verl.planner.text import render_plan
from verl.recipes import arithmetic
from verl.track.samples import read_samples


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = tiny.character_tokenizer(arithmetic.CHARACTERS)
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    return tiny.save(model("qwen2_5_vl", **ends), tokenizer, tmp_path_factory.mktemp("vl"))


def exported(folder: Path) -> dict[str, torch.Tensor]:
    loaded, found = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"]
    return dict(loaded.named_parameters())


@pytest.mark.slow
def test_rows_of_text_train_its_language_model(folder: Path, arithmetic_data: Sequence[Path], tmp_path: Path) -> None:
    """A resumed run is that without an interruption."""
    done = small_run(tmp_path, folder, arithmetic_data, "checkpoint.every_steps=1")
    last, rows = metrics_of(tmp_path / "r")[3], read_samples(tmp_path / "r", 3)
    assert (
        rows
        and all(row.banned for row in rows)
        and not {58, 59, 60, 61} & {i for r in rows for i in r.response_ids.tolist()}
    )
    assert done.steps == 3 and last["mismatch/max_abs_dlogp"] < 1e-5 and last["sync/canary_mean_abs"] < 1e-5
    for steps in (1, 3):
        small_run(tmp_path, folder, arithmetic_data, f"run.total_steps={steps}", "run.name=again")
    before, after, again = (
        exported(f) for f in (folder, *(tmp_path / name / "checkpoints" / "step_3" / "hf" for name in ("r", "again")))
    )
    same_tensors(after, again)
    changed = {name for name, p in before.items() if not torch.equal(p, after[name])}
    assert changed == {name for name in before if ".visual." not in name}


def test_a_trainer_in_python_samples_no_placeholder_either(folder: Path) -> None:
    from transformers import AutoTokenizer

    config = VerlConfig(samples_per_prompt=8, max_length=40)
    model_of_folder = AutoModelForCausalLMWithValueHead.from_pretrained(folder)
    trainer = VerlTrainer(config=config, model=model_of_folder, tokenizer=AutoTokenizer.from_pretrained(folder))
    answers = trainer.generate_rollout(["1+2=", "3+4="])
    sampled = [i for completions in trainer._last.values() for c in completions for i in c.ids.tolist()]
    assert len(sampled) > 200 and not {58, 59, 60, 61} & {*sampled}
    metrics = trainer.step(["1+2=", "3+4="], answers, [[float(len(text)) for text in texts] for texts in answers])
    trainer.close()
    assert metrics["mismatch/max_abs_dlogp"] < 1e-5


@pytest.mark.slow
def test_rows_of_text_train_factors_of_its_language_model(
    folder: Path, arithmetic_data: Sequence[Path], tmp_path: Path
) -> None:
    """The rollout computes the base and factors; the checkpoint is an adapter of the language model, and is merged."""
    done = small_run(tmp_path, folder, arithmetic_data, "model.lora.rank=2", "optim.lr=1e-3")
    last, run = metrics_of(tmp_path / "r")[3], tmp_path / "r"
    assert done.steps == 3 and last["mismatch/max_abs_dlogp"] < 1e-5 and last["sync/canary_mean_abs"] < 1e-5
    write_merged(run / "checkpoints" / "step_3" / "hf", tmp_path / "merged", "float32")
    before, after = exported(folder), exported(tmp_path / "merged")
    changed = {name for name, p in before.items() if not torch.equal(p, after[name])}
    assert changed == {n for n in before if ".language_model.layers." in n and n.endswith("_proj.weight")}


@pytest.mark.parametrize(
    "given, line",
    [
        ("model.lora.rank=4 model.quantization=nf4", "model.quantization=nf4: model.path=.* is a qwen2_5_vl, a model"),
        ("model.lora.rank=4 model.freeze=[language]", r"model.freeze=\[language\] with model.lora: "),
        ("model.lora.rank=4 cluster.ranks_per_node=2 cluster.backend=ray", "beside images are trained by one rank"),
        *(
            (
                f"model.lora.rank=4 model.lora.modules_to_save=[visual.merger,{name}]",
                rf"modules_to_save=\['visual.merger', '{name}'\]: .* a qwen2_5_vl, a model that reads images, and no "
                rf"test trains model\..*{name} whole beside its factors; name modules of the projector alone \(visual",
            )
            for name in ("embed_tokens", "norm2")
        ),
        (
            "model.lora.rank=4 model.lora.modules_to_save=[visual.merger] model.freeze=[projector]",
            r"model.freeze=\[projector\] with model.lora.modules_to_save: modules of the projector are trained whole;",
        ),
        (
            "model.lora.rank=4 model.lora.modules_to_save=[visual.merger] optim.options.lr={vision:1e-4}",
            "optim.options.lr.vision with model.lora, .*: the part is not trained; leave its rate out",
        ),
        (
            "model.lora.rank=4 optim.options.lr={projector:1e-4}",
            "optim.options.lr.projector with model.lora, .*: the part is not trained; leave its rate out",
        ),
        ("rollout.engine=openai", "rollout.engine=openai: .*was not tested with it; use rollout.engine=native"),
        ("model.freeze=[projector,language,vision]", r"model.freeze=\[.*\]: nothing would be trained"),
        (
            "model.freeze=[vision] optim.options.lr={vision:1e-4}",
            r"optim.options.lr.vision with model.freeze=\[vision\]: the part is not trained; leave its rate out",
        ),
        (
            "cluster.ranks_per_node=2 cluster.backend=ray parallel.tensor=2",
            "parallel.tensor=2: model.path=.* reads images, and its ranks divide language models alone; use "
            "parallel.tensor=1: ranks share it by FSDP, with parallel.replicate, parallel.sequence or parallel.context",
        ),
        *(
            (
                f"cluster.ranks_per_node=2 cluster.backend=ray parallel.{name}=2",
                f"parallel.{name}=2: .*use parallel.{name}=1",
            )
            for name in ("pipeline", "expert")
        ),
    ],
)
def test_what_it_cannot_do_is_refused(
    folder: Path, arithmetic_data: Sequence[Path], tmp_path: Path, given, line
) -> None:
    with pytest.raises(ValueError, match=line):
        validate(load_config(small_args(tmp_path, folder, arithmetic_data, *given.split())).config)


NO_EFFECT = [
    (
        "model.freeze=[vision,language]",
        r"model.freeze=\[vision, language\]: {}; .* nothing would be; leave language out",
    ),
    ("optim.options.lr={projector:1e-4}", "optim.options.lr.projector: {}; text does not train the part; leave its"),
]


@pytest.mark.parametrize("given, line", NO_EFFECT)
def test_parts_that_rows_of_text_do_not_train_are_refused(
    folder: Path, arithmetic_data: Sequence[Path], tmp_path: Path, given: str, line: str
) -> None:
    other = tmp_path / "gemma3"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"model_type": "gemma3", "vision_config": {}}))
    args = small_args(tmp_path, folder, arithmetic_data, given)
    config = load_config(args).config
    gemma = changed(config, {"model.path": str(other)})
    assert not [*image_model_faults(config, "train", samples=True)]
    assert not [*image_model_faults(gemma, "eval", samples=True)], "nothing is trained"
    for command in ("train", "sft", "rm"):
        assert not [*image_model_faults(config, command, samples=False)]
        assert not [*image_model_faults(gemma, command, samples=False)]
    with pytest.raises(Refused, match=line.format(r"the \d+ rows of .* are text alone")):
        small_run(tmp_path, folder, arithmetic_data, given)
    assert not (tmp_path / "r").exists()


def test_a_projector_that_rows_of_text_would_not_train_beside_factors_is_refused(
    folder: Path, arithmetic_data: Sequence[Path], tmp_path: Path
) -> None:
    given = ("model.lora.rank=2", "model.lora.modules_to_save=[visual.merger]")
    config = load_config(small_args(tmp_path, folder, arithmetic_data, *given)).config
    assert not [*image_model_faults(config, "sft", samples=False)]
    line = (
        r"modules_to_save=\['visual.merger'\]: the \d+ rows of .* are text alone, and images alone train the projector"
    )
    with pytest.raises(Refused, match=line):
        small_run(tmp_path, folder, arithmetic_data, *given)
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    "kind, given, line",
    [
        ("mllama", "model.lora.rank=2", "model.lora: .* a mllama, a model that reads images by cross-attention, and"),
        ("mllama", "model.engine=sharded", "model.engine=sharded: .* would not run the same layers; use one rank"),
        ("llava_next", "model.engine=sharded", "model.engine=sharded: .* with a vector in no module that ranks would"),
    ],
)
def test_settings_that_some_families_cannot_have(
    folder: Path, arithmetic_data: Sequence[Path], tmp_path: Path, kind: str, given: str, line: str
) -> None:
    config = load_config(small_args(tmp_path, folder, arithmetic_data, given)).config
    other = tmp_path / kind
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"model_type": kind, "vision_config": {"image_size": 8}}))
    crossed = changed(config, {"model.path": str(other)})
    assert re.match(line, next(iter(image_model_faults(crossed, "train", samples=True))))


def test_an_adapter_that_scores_images_is_refused(
    folder: Path, tiny_model: Path, arithmetic_data: Sequence[Path], tmp_path: Path
) -> None:
    judge = tmp_path / "judge"
    judge.mkdir()
    config = load_config(small_args(tmp_path, folder, arithmetic_data, f"reward.model={judge}")).config
    for base, lines in ((folder, 1), (tiny_model, 0)):
        about = {"peft_type": "LORA", "base_model_name_or_path": str(base)}
        (judge / "adapter_config.json").write_text(json.dumps(about))
        found = [*image_model_faults(config, "train", samples=True)]
        assert len(found) == lines and all(re.match("reward.model=.*judge: an adapter of .*vl", one) for one in found)


def test_the_plan_names_and_counts_padded_rows(arithmetic_data: Sequence[Path], tmp_path: Path) -> None:
    """A pass has the prompt of a group once for each answer."""
    folder, passes = marked_folder("mllama", tmp_path / "model"), dict[bool, int]()
    text = ""
    for shares in (True, False):
        given = (f"model.engine_options.share_prefix={shares}", "step.max_tokens_per_microbatch=64")
        plan = make_plan(load_config(small_args(tmp_path, folder, arithmetic_data, *given)).config)
        passes[shares], text = plan.step.microbatches, render_plan(plan)
    assert "trained on padded rows, prompts once per answer" in text and passes[True] == passes[False] > 1
    made, facts = AutoModelForImageTextToText.from_pretrained(folder), describe_model(str(folder))
    assert facts.parameters == sum(p.numel() for p in made.parameters())
    seen = [name for name, _ in made.named_parameters() if "vision_model" in name or "multi_modal" in name]
    assert facts.encoder_parameters == sum(dict(made.named_parameters())[name].numel() for name in seen)


def test_a_fork_has_the_untrained_weights_of_its_checkpoint(
    folder: Path, arithmetic_data: Sequence[Path], tmp_path: Path
) -> None:
    """A checkpoint lacks them. Another folder with the same files is the same model."""
    step, other, same = (tmp_path / name for name in ("r/checkpoints/step_1", "other", "same"))
    shutil.copytree(folder, same)
    shutil.copytree(folder, other)
    weights = other / "model.safetensors"
    save_file({n: t + 1 for n, t in load_file(weights).items()}, weights, metadata={"format": "pt"})

    def begun(name: str, of: Path, *given: str) -> Resolved:
        return load_config(small_args(tmp_path, of, arithmetic_data, f"run.name={name}", *given))

    def refused(of: Path, *given: str) -> str:
        try:
            open_run_dir(begun("fork", of, f"run.resume={step}", *given), "train").lock.close()
        except Refused as e:
            return str(e)
        return ""

    step.mkdir(parents=True)
    (step / "manifest.json").touch()
    for kept, lacks in (("model.freeze=[vision]", "frozen parts"), ("model.lora.rank=2", "the base of its factors")):
        identity = identity_of(begun("r", folder, kept), "train")
        write_state(step / "state", DriverState(step=1, rng=rng_state(), cursor={}, history=[], identity=identity))
        assert not refused(folder, kept) and not refused(same, kept)
        line = f"model.path={other}: run.resume={step} was trained with another model and lacks {lacks}: "
        assert refused(other, kept).startswith(f"{line}set model.path={folder}, or begin another run with model.")
        if "freeze" in kept:
            line = f"run.resume={step} was saved with {kept}, and this run has model.freeze=[]: set {kept}, or begin "
            assert refused(folder).startswith(line)


def test_a_plan_counts_what_is_trained(folder: Path, arithmetic_data: Sequence[Path], tmp_path: Path) -> None:
    sizes = {name: p.numel() for name, p in exported(folder).items()}
    tower, head = (sum(n for name, n in sizes.items() if part in name) for part in (".visual.", "lm_head"))
    outside = head + sum(n for name, n in sizes.items() if "embed_tokens" in name)

    def planned(*given: str) -> tuple[int, int, int]:
        config = load_config(small_args(tmp_path, folder, arithmetic_data, *given)).config
        items = role_items(config, "actor", Layout(), 100)
        return items["gradients"], items["optimizer states"], checkpoint_parts(config)["state"]

    assert planned() == (4 * sum(sizes.values()), 8 * sum(sizes.values()), 12 * sum(sizes.values()))
    trained = sum(sizes.values()) - tower
    assert planned("model.freeze=[vision,projector]") == (4 * trained, 8 * trained, 12 * trained)
    assert planned("model.freeze=[language]") == (4 * tower, 8 * tower, 12 * tower)
    more = "optim.name=muon"
    assert planned(more, "model.freeze=[vision,projector]")[1] == 4 * (trained - outside) + 8 * outside


def test_a_plan_counts_and_names_a_projector_that_is_trained_whole(
    folder: Path, arithmetic_data: Sequence[Path], tmp_path: Path
) -> None:
    merger = sum(p.numel() for name, p in exported(folder).items() if ".visual.merger." in name)
    found = list[int]()
    text = ""
    for more in ((), ("model.lora.modules_to_save=[visual.merger]",)):
        config = load_config(small_args(tmp_path, folder, arithmetic_data, "model.lora.rank=2", *more)).config
        found.append(role_items(config, "actor", Layout(), 100)["optimizer states"])
        text = render_plan(make_plan(config))
    assert found[1] - found[0] == 8 * merger > 0
    assert f"and {merger:,} (" in text and "of ln_q, mlp.0, mlp.2, whole" in text


def test_a_text_model_has_no_parts_to_freeze(tiny_model: Path, arithmetic_data: Sequence[Path], tmp_path: Path) -> None:
    for given in ("model.freeze=[vision]", "optim.options.lr={projector:1e-4}"):
        args = small_args(tmp_path, tiny_model, arithmetic_data, given)
        with pytest.raises(ValueError, match="reads text alone, and has no such part; leave it out"):
            validate(load_config(args).config)


def test_the_key_of_the_public_verl_freezes_the_tower_with_its_projector(
    folder: Path, arithmetic_data: Sequence[Path], tmp_path: Path
) -> None:
    args = small_args(tmp_path, folder, arithmetic_data, "actor_rollout_ref.actor.freeze_vision_tower=True")
    config = load_config(args).config
    assert config.model.freeze == ["vision", "projector"]
    assert trained(context_of(config), "actor").context.freeze == ("vision", "projector")


@pytest.mark.parametrize("engine, lines", [("native", 0), ("vllm", 0), ("sglang", 1), ("server", 1)])
def test_servers_that_were_not_tested_with_it_are_refused(
    folder: Path, arithmetic_data: Sequence[Path], tmp_path: Path, engine: str, lines: int
) -> None:
    config = load_config(small_args(tmp_path, folder, arithmetic_data, f"rollout.engine={engine}")).config
    assert len([*image_model_faults(config, "train", samples=True)]) == lines
