"""model.gradient_checkpointing: its words, the spellings of earlier versions and of the public verl, and `auto`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from handmade_model import write_model, write_rows

from verl.cli import main
from verl.config.load import Resolved, load_config, read_config
from verl.config.tree import changed
from verl.driver.identity import Identity, compare
from verl.errors import Refused
from verl.planner.checkpointing import CHOICES, KEY, settle_checkpointing
from verl.planner.plan import make_plan


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path / "model", context=4096)
    write_rows(tmp_path / "rows.jsonl", 64)
    return tmp_path


def resolved_of(folder: Path, *more: str) -> Resolved:
    return load_config(
        [f"model.path={folder}/model", f"data.train_files=[{folder}/rows.jsonl]", "model.device=cpu", *more]
    )


@pytest.mark.parametrize(
    "written, means",
    [("true", "full"), ("True", "full"), ("false", "none"), *((word, word) for word in (*CHOICES, "auto"))],
)
def test_the_spellings(written: str, means: str, folder: Path) -> None:
    assert resolved_of(folder, f"{KEY}={written}").config.model.gradient_checkpointing == means
    (folder / "recipe.yaml").write_text(f"model: {{gradient_checkpointing: {written}}}\n")
    of_file = resolved_of(folder, f"recipe={folder}/recipe.yaml")
    assert of_file.config.model.gradient_checkpointing == means
    assert read_config(folder / "recipe.yaml").model.gradient_checkpointing == means
    if written in ("True", "false"):
        other = resolved_of(folder, f"actor_rollout_ref.model.enable_gradient_checkpointing={written}")
        assert other.config.model.gradient_checkpointing == means


@pytest.mark.parametrize("written", ["1", "yes", "some", "null"])
def test_other_values_are_refused_with_the_words(written: str, folder: Path) -> None:
    with pytest.raises(Refused, match=f"{KEY}=(1|.?yes.?|some|null)"):
        resolved_of(folder, f"{KEY}={written}")


def test_a_run_that_was_begun_with_a_switch_continues() -> None:
    was = Identity({"verb": "train", KEY: "false"}, {}, {})
    assert compare(was, Identity({"verb": "train", KEY: '"none"'}, {}, {})) == ([], {})
    others, now = compare(was, Identity({"verb": "train", KEY: '"selective"'}, {}, {}))
    assert not others and now == {KEY: ['"none"', '"selective"']}, "a resumed run may change it"


@pytest.mark.parametrize("supervised", [False, True])
def test_auto_is_the_first_that_fits(supervised: bool, folder: Path) -> None:
    large = ("rollout.max_concurrent_sequences=1", "data.max_prompt_tokens=2048", "rollout.max_response_tokens=2048")
    auto = resolved_of(folder, f"{KEY}=auto", *large)

    def chosen(has: int) -> tuple[str, str]:
        settled, line = settle_checkpointing(auto, has, supervised=supervised)
        assert settled.origins[KEY] == "auto, by the plan's memory"
        assert settled.config == changed(auto.config, {KEY: settled.config.model.gradient_checkpointing})
        return settled.config.model.gradient_checkpointing, line

    peaks, low, high = {}, 0, 1 << 40
    for choice in CHOICES[:2]:  # the least memory with which a choice is made
        low, high = 0, 1 << 40
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if CHOICES.index(chosen(middle)[0]) <= CHOICES.index(choice) else (middle, high)
        peaks[choice] = high
    assert peaks["selective"] < peaks["none"]
    if not supervised:
        for choice, bytes_ in peaks.items():
            assert make_plan(changed(auto.config, {KEY: choice})).memory.peak_bytes == bytes_
    assert chosen(peaks["none"])[1].startswith(f"{KEY}=auto: none (it wants ")
    assert chosen(peaks["none"] - 1)[0] == "selective" and "none wants " in chosen(peaks["none"] - 1)[1]
    assert chosen(peaks["selective"] - 1)[0] == "full" and "selective wants " in chosen(0)[1]


def test_auto_without_known_memory_is_refused_and_without_it_nothing_changes(folder: Path) -> None:
    plain = resolved_of(folder)
    assert settle_checkpointing(plain, None) == (plain, "")
    auto = resolved_of(folder, f"{KEY}=auto")
    with pytest.raises(Refused, match="the memory of the devices is not known here; set none, selective, full"):
        settle_checkpointing(auto, None)
    ray = replace(auto, config=changed(auto.config, {"cluster.backend": "torchrun"}))
    with pytest.raises(Refused, match="a run of several processes has no plan here"):
        settle_checkpointing(ray, 1 << 40, supervised=True)


def test_plan_prints_the_choice(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = [f"model.path={folder}/model", f"data.train_files=[{folder}/rows.jsonl]", f"{KEY}=auto"]
    assert main(["plan", *args, "model.device=cpu"]) == 0
    assert f"{KEY}=auto: none (it wants " in capsys.readouterr().out
    assert main(["plan", *args, "model.device=cuda", "card_gib=0.001"]) == 2  # full does not fit either
    assert main(["plan", *args, "model.device=cuda"]) == 2
    assert "the memory of the devices is not known" in capsys.readouterr().err
