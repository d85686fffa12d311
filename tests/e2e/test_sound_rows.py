"""`verl train` on rows with sounds: from the file to the gradient."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import metrics_of, small_args, small_run
from sounds import KINDS, SOUND, noise, sound_folder, sound_tokenizer, thinker_config, wav
from transformers import (
    AutoModelForImageTextToText,
    Qwen2_5OmniConfig,
    Qwen2_5OmniForConditionalGeneration,
    Qwen2_5OmniThinkerForConditionalGeneration,
)
from vision import chat_folder, png

from verl.checkpoint.loadable import check_loadable
from verl.config.load import load_config
from verl.config.model_files import describe_model
from verl.config.validate import validate
from verl.data.source import load_tasks
from verl.driver.setup import refuse_untrained
from verl.errors import Refused
from verl.model_engine.hf_model import load_causal_lm
from verl.models.families import FAMILIES, family_of
from verl.models.sound_reader import SoundReader
from verl.track.samples import read_samples
from verl.transfer_queue.media import MemoryMedia

REWARD = """
import pathlib
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert all(pathlib.Path(name).read_bytes().startswith(b"RIFF") for name in extra_info["audios"])
    return float(len(solution_str))
"""


TALKER: dict[str, Any] = dict(
    vocab_size=16,
    embedding_size=32,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]},
)
VOCODER: dict[str, Any] = dict(
    dit_config=dict(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        head_dim=8,
        emb_dim=8,
        num_embeds=9,
        mel_dim=8,
        enc_emb_dim=8,
        enc_dim=8,
        enc_channels=[8] * 5,
        enc_attention_channels=8,
        enc_se_channels=8,
    ),
    bigvgan_config=dict(mel_dim=8, upsample_initial_channel=8, upsample_rates=[2], upsample_kernel_sizes=[4]),
)


def written(root: Path) -> Path:
    """Write four rows with a sound each, one of which has an image too."""
    (root / "cat.png").write_bytes(png(12, 8))
    with (root / "rows.jsonl").open("w") as file:
        for k in range(4):
            (root / f"{k}.wav").write_bytes(wav(noise(2_000 + 700 * k, k)))
            content = f"<audio>{k}?" + "<image>" * (k == 3)
            given = {"prompt": [{"role": "user", "content": content}], "audios": [f"{k}.wav"], "ground_truth": "1"}
            file.write(json.dumps(given | {"images": ["cat.png"] * (k == 3)}) + "\n")
    return root / "rows.jsonl"


@pytest.mark.parametrize(
    "kind, rollout",
    [
        (KINDS[0], "native"),
        pytest.param(KINDS[0], "hf", marks=pytest.mark.slow),
        pytest.param(KINDS[1], "native", marks=pytest.mark.slow),
    ],
)
def test_rows_with_sounds_train(kind: str, rollout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sound is decoded once by the rollout and once by the trainer in a run, all parts change, the export loads in
    transformers, and nothing is kept after the run."""
    stores, make, decoded, real = list[Any](), MemoryMedia.__init__, list[str](), SoundReader.spectrogram
    monkeypatch.setattr(MemoryMedia, "__init__", lambda self: (make(self), stores.append(self))[0])
    monkeypatch.setattr(SoundReader, "spectrogram", lambda *given: (decoded.append(given[2]), real(*given))[1])
    (tmp_path / "reward.py").write_text(REWARD)
    folder, data = sound_folder(tmp_path / "model", kind), written(tmp_path)
    given = ("data.max_prompt_tokens=96", f"reward.path={tmp_path / 'reward.py'}", f"rollout.engine={rollout}")
    assert small_run(tmp_path, folder, [data], "run.total_steps=2", *given).steps == 2
    metrics = metrics_of(tmp_path / "r")
    assert all(metrics[step]["mismatch/max_abs_dlogp"] < 1e-5 < metrics[step]["actor/grad_norm"] for step in (1, 2))
    for step in (1, 2):
        rows = read_samples(tmp_path / "r", step)
        assert len({row.group_id for row in rows}) == 4 and all(SOUND in row.prompt_ids for row in rows)
        assert not any(SOUND in row.response_ids for row in rows)
    assert len({*decoded}) == 4 and len(decoded) in (4, 8), "twice at most"
    assert stores and all(len(store) == 0 for store in stores)
    exported = tmp_path / "r" / "checkpoints" / "step_2" / "hf"
    loaded, found = AutoModelForImageTextToText.from_pretrained(exported, output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"]
    before, family = (
        dict(AutoModelForImageTextToText.from_pretrained(folder).named_parameters()),
        family_of(loaded.config),
    )
    changed = {name for name, p in loaded.named_parameters() if not torch.equal(p, before[name])}
    assert family is not None and {*map(family.part_of, changed)} == {*family.parts}
    unread = {"model.audio_tower.audio_bos_eos_token.weight"} if kind == KINDS[0] else set()
    assert before.keys() - changed == unread, "no forward pass reads it"


@pytest.mark.parametrize(
    "given, line",
    [
        (
            "cluster.ranks_per_node=2 cluster.backend=ray",
            "ranks without a sound would not run its audio tower; use one",
        ),
        ("rollout.engine=openai", "rollout.engine=openai: .*was not tested with it; use rollout.engine=native"),
        ("model.freeze=[vision,projector,language,audio]", r"model.freeze=\[.*\]: nothing would be trained"),
    ],
)
def test_what_a_thinker_cannot_do_is_refused(tmp_path: Path, given: str, line: str) -> None:
    folder, data = sound_folder(tmp_path / "model"), written(tmp_path)
    with pytest.raises(ValueError, match=line):
        validate(load_config(small_args(tmp_path, folder, [data], *given.split())).config)


@pytest.mark.parametrize("given", ["model.freeze=[audio]", "optim.options.lr={audio:1e-4}"])
def test_a_model_that_reads_no_sounds_has_no_such_part(tmp_path: Path, given: str) -> None:
    folder, data = chat_folder(tmp_path / "model", "qwen2_5_vl"), written(tmp_path)
    with pytest.raises(ValueError, match="is a qwen2_5_vl, which reads no sounds; leave audio out"):
        validate(load_config(small_args(tmp_path, folder, [data], given)).config)


@pytest.mark.parametrize(
    "given, line",
    [
        ("model.freeze=[audio,language]", r"model.freeze=\[audio, language\]: the 2 rows of .* have no images, so"),
        ("optim.options.lr={vision:1e-4}", "optim.options.lr.vision: the 2 rows of .* have no images, which alone"),
        ("model.freeze=[language]", ""),
        ("optim.options.lr={audio:1e-4}", ""),
    ],
)
def test_parts_that_no_row_trains_are_refused(tmp_path: Path, given: str, line: str) -> None:
    """The rows have sounds, and no image."""
    folder, data = sound_folder(tmp_path / "model"), tmp_path / "two.jsonl"
    data.write_text("".join(written(tmp_path).read_text().splitlines(keepends=True)[:2]))
    args = small_args(tmp_path, folder, [data], "data.max_prompt_tokens=96", given)
    validate(config := load_config(args).config)
    table = load_tasks([str(data)], sound_tokenizer(), config.data, model=folder)
    with pytest.raises(Refused, match=line) if line else nullcontext():
        refuse_untrained(config, "train", table)


def test_a_model_that_talks_is_refused_and_its_thinker_is_read(tmp_path: Path) -> None:
    """transformers saves the thinker alone, with the weights that it has in the whole model."""
    parts = {"talker_config": TALKER, "token2wav_config": VOCODER}
    config = Qwen2_5OmniConfig(thinker_config=thinker_config().to_dict(), **parts)
    whole = Qwen2_5OmniForConditionalGeneration(config)
    whole.save_pretrained(tmp_path / "whole")
    fix = "Qwen2_5OmniThinkerForConditionalGeneration.from_pretrained.FOLDER..save_pretrained.OUT."
    with pytest.raises(Refused, match=f"the part that talks .*{fix}"):
        check_loadable(tmp_path / "whole")
    Qwen2_5OmniThinkerForConditionalGeneration.from_pretrained(tmp_path / "whole").save_pretrained(tmp_path / "out")
    loaded, own = load_causal_lm(tmp_path / "out"), dict(whole.thinker.named_parameters())
    assert {name: p.shape for name, p in loaded.named_parameters()} == {name: p.shape for name, p in own.items()}
    assert all(torch.equal(p, own[name]) for name, p in loaded.named_parameters())
    facts = describe_model(str(tmp_path / "out"))
    assert facts.parameters == sum(p.numel() for p in own.values())
    encoders = (name for name in own if FAMILIES["qwen2_5_omni_thinker"].part_of(name) != "language")
    assert facts.encoder_parameters == sum(own[name].numel() for name in encoders)
