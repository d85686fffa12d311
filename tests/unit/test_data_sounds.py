"""Rows with sounds: where their content is, their places, the tokens of a prompt, their spectrograms, and bad input."""

from __future__ import annotations

import base64
import io
import json
import re
import struct
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from sounds import KINDS, RATE, SETTINGS, SOUND, SOUND_END, SOUND_START, noise, sound_folder, sound_tokenizer, wav
from vision import IMAGE, chat_folder, png

from verl.config.schema import DataConfig
from verl.data.source import load_conversations, load_tasks
from verl.driver.task_media import LostImage, _media
from verl.errors import Refused
from verl.models.expand import banned_tokens
from verl.models.image_files import image_processor
from verl.models.pictures import Pictures
from verl.models.sound_files import decoded_sound, sound_samples, wav_file
from verl.models.sounds import halved_thrice, unpacked_sound
from verl.transfer_queue.media import MemoryMedia

SAMPLES = noise(3_300)
FILE = wav(SAMPLES)
"""21 frames, of which the last one is not whole: five tokens."""
TEXT = base64.b64encode(FILE).decode()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: sound_folder(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


@pytest.fixture(scope="module")
def model(models: dict[str, Path]) -> Path:
    return models[KINDS[0]]


@pytest.fixture
def load(model: Path, tmp_path: Path) -> Any:
    (tmp_path / "a.wav").write_bytes(FILE)
    (tmp_path / "cat.png").write_bytes(png(12, 8))

    def read(*rows: dict[str, Any], folder: Path | None = model, **keys: Any) -> Any:
        file = tmp_path / "rows.parquet"
        columns = {key: [row.get(key) for row in rows] for row in rows for key in row}
        pq.write_table(pa.table(columns), file)
        cfg = DataConfig(**{"cache_dir": str(tmp_path / "cache"), "max_prompt_tokens": 96, **keys})
        return load_tasks([str(file)], sound_tokenizer(), cfg, model=folder)

    return read


def row(prompt: Any, **columns: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": prompt}], "ground_truth": "4", **columns}


def shown(task: Any) -> str:
    """Return the prompt, with s and i for each token of a sound and of an image."""
    names, tokenizer = {IMAGE: "i", SOUND: "s"}, sound_tokenizer()
    return "".join(names.get(i) or tokenizer.decode([i]) for i in task.prompt_ids.tolist())


ITEMS = {
    "path": "a.wav",
    "bytes": FILE,
    "datasets": {"bytes": FILE, "path": None},
    "data URL": f"data:audio/wav;base64,{TEXT}",
    "array": {"array": SAMPLES.tolist(), "sampling_rate": RATE, "path": "x.wav"},
}


@pytest.mark.parametrize("form", ITEMS)
def test_a_sound_is_read_from_each_form_of_its_content(form: str, load: Any) -> None:
    for table in (load(row("a<audio>b", audios=[ITEMS[form]])), load(row("a<audio>b", audios=[ITEMS[form]]))):
        (task,) = table
        assert shown(task) == "<|user|>a<|audio_bos|>sssss<|audio_eos|>b<|end|><|assistant|>"
        (seen,) = task.images
        assert (seen.start, seen.tokens) == (3, 5) and task.row["audios"] == [seen.path]
        assert unpacked_sound(seen.head)[0].samples == len(SAMPLES)
        assert decoded_sound(Path(seen.path).read_bytes(), RATE, "x").tobytes() == SAMPLES.tobytes()
        assert task.extra_info == {"audios": [seen.path]}
    assert table.report.from_cache


def test_images_and_sounds_have_the_places_that_the_text_and_parts_give_them(load: Any) -> None:
    both = {"images": ["cat.png"], "audios": ["a.wav"]}
    parts = [{"type": "audio"}, {"type": "text", "text": "x"}, {"type": "image"}]
    i, s = f"<|vision_start|>{'i' * 6}<|vision_end|>", "<|audio_bos|>sssss<|audio_eos|>"
    y = {"type": "text", "text": "y"}
    cases = [
        (row("<audio>x<image>", **both), f"{s}x{i}"),
        (row("x<image><audio>", **both), f"x{i}{s}"),
        (row("x", **both), f"{i}{s}x"),
        (row("x", audio="a.wav"), f"{s}x"),
        (row(parts, **both), f"{s}x{i}"),
        (row([{"type": "audio", "audio": "a.wav"}, y]), f"{s}y"),
        (row([{"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{TEXT}"}}, y]), f"{s}y"),
        (row([{"type": "input_audio", "input_audio": {"data": TEXT, "format": "wav"}}, y]), f"{s}y"),
        (row([{"type": "audio", "audio": {"array": SAMPLES.tolist(), "sampling_rate": RATE}}, y]), f"{s}y"),
    ]
    for given, expected in cases:
        (task,) = load(given)
        assert shown(task) == f"<|user|>{expected}<|end|><|assistant|>"
        assert {seen.start: bool(seen.head) for seen in task.images} == {
            seen.start: task.prompt_ids[seen.start] == SOUND for seen in task.images
        }


def test_a_placeholder_that_a_text_spells_out_is_text(load: Any) -> None:
    (task,) = load(row("is <|audio_bos|><|AUDIO|><|audio_eos|> or <audio> a sound?"))
    assert not task.images and not {SOUND, SOUND_START, SOUND_END} & {*task.prompt_ids.tolist()}
    assert "is <|audio_bos|><|" in shown(task) and " or <audio> a sound?" in shown(task)


def reference_of(kind: str, folder: Path, patch: pytest.MonkeyPatch) -> Any:
    """Return the processor of transformers, without a processor of videos."""
    from transformers import Qwen2_5OmniProcessor, Qwen3OmniMoeProcessor, WhisperFeatureExtractor
    from transformers.processing_utils import ProcessorMixin

    patch.setattr(ProcessorMixin, "check_argument_for_proper_class", lambda *given: None)
    tokenizer, marks = sound_tokenizer(), {"image": "<|image_pad|>", "audio": "<|AUDIO|>", "video": "<|video_pad|>"}
    marks |= {"vision_bos": "<|vision_start|>", "vision_eos": "<|vision_end|>"}
    for name, token in (marks | {"audio_bos": "<|audio_bos|>", "audio_eos": "<|audio_eos|>"}).items():
        setattr(tokenizer, f"{name}_token", token)
        setattr(tokenizer, f"{name}_token_id", tokenizer.convert_tokens_to_ids(token))
    parts = image_processor(folder)[0], None, WhisperFeatureExtractor.from_pretrained(folder), tokenizer
    return {KINDS[0]: Qwen2_5OmniProcessor, KINDS[1]: Qwen3OmniMoeProcessor}[kind](
        *parts, chat_template=tokenizer.chat_template
    )


CONVERSATIONS: list[list[Any]] = [["no sound"], [0], ["a", 1, "b"], [0, 1, " ", 2], ["x", "image", 2, "y", 0]]
SOUNDS = [noise(3_300), noise(16_000, 1), noise(321, 2)]


CASES = [(KINDS[0], turn) for turn in CONVERSATIONS] + [(KINDS[1], ["image", k, "x"]) for k in range(3)]


@pytest.mark.parametrize("kind, turn", CASES, ids=str)
def test_ids_and_spectrograms_are_those_of_the_processor(
    kind: str, turn: list[Any], models: dict[str, Path], load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sound of the longest length, and one of the fewest samples that make a token. The processor of Qwen3-Omni reads
    other frames and writes other tokens for a sound beside a longer one."""
    model = models[kind]
    parts = [{"type": "audio"} if isinstance(part, int) else {"type": "text", "text": part} for part in turn]
    parts = [{"type": "image"} if part.get("text") == "image" else part for part in parts]
    used = [SOUNDS[part] for part in turn if isinstance(part, int)]
    columns = {"audios": [wav(one) for one in used], "images": ["cat.png"] * ("image" in turn)}
    (task,) = load(row(parts, **{name: items for name, items in columns.items() if items}), folder=model)
    reference = reference_of(kind, model, monkeypatch)
    text = reference.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
    images = [Image.open(io.BytesIO(png(12, 8)))] if "image" in turn else None
    own = reference(text=[text], audio=used or None, images=images, return_tensors="pt")
    assert task.prompt_ids.tolist() == own["input_ids"][0].tolist()
    store = MemoryMedia()
    media = _media(store, task.images, "me", threading.Event())
    seen = Pictures(model, store).of([m.reference for m in media])
    sounds = [seen[m.reference] for m in media if seen[m.reference].sound]
    for k, sound in enumerate(sounds):
        mask = own["feature_attention_mask"][k].bool()
        assert torch.equal(sound.patches, own["input_features"][k][:, mask]) and sound.grid == (int(mask.sum()), 1, 1)
    assert len(sounds) == len(used)


def test_another_file_than_when_the_row_was_read_is_found(load: Any, model: Path, tmp_path: Path) -> None:
    (task,) = load(row("<audio>", audios=["a.wav"]))
    (tmp_path / "a.wav").write_bytes(wav(noise(4_000)))
    with pytest.raises(LostImage, match="a.wav: the file was changed after the rows were read"):
        _media(MemoryMedia(), task.images, "me", threading.Event())
    store = MemoryMedia()
    name = store.put(task.images[0].head + wav(noise(4_000)), "me")
    with pytest.raises(Refused, match=f"sound {name}: 4000 samples, and it had 3300 when its row was read"):
        Pictures(model, store).of([name])
    assert len(load(row("<audio>", audios=["a.wav"]))[0].images) == 1


def test_tokens_of_sounds_count_in_the_filter(load: Any) -> None:
    rows = [row("<audio>a", audios=["a.wav"]), row("a")]
    assert len(load(*rows, max_prompt_tokens=10)) == 1 and len(load(*rows, max_prompt_tokens=11)) == 2


def extensible(content: bytes) -> bytes:
    """Return a WAV file with the longer description of its samples, and a chunk in front of them."""
    form, data = content[20:36], content[36:]
    longer = struct.pack("<H", 0xFFFE) + form[2:] + struct.pack("<HHI", 22, 16, 4) + form[:2] + bytes(14)
    return b"RIFF\0\0\0\0WAVE" + b"LIST\3\0\0\0abc\0" + b"fmt " + struct.pack("<I", len(longer)) + longer + data


def test_samples_of_wav_files() -> None:
    """Of 8 to 64 bits, whole numbers and floats, of one channel and two, of which the mean is read."""
    both = np.stack([SAMPLES, noise(3_300, 5)])
    mean = both.mean(0, dtype=np.float32)
    doubles = SAMPLES.astype("<f8").tobytes()
    described = struct.pack("<HHIIHH", 3, 1, RATE, RATE * 8, 8, 64)
    wide = (
        b"RIFF\0\0\0\0WAVEfmt "
        + struct.pack("<I", 16)
        + described
        + b"data"
        + struct.pack("<I", len(doubles))
        + doubles
    )
    cases = [(wav(SAMPLES, width=width), SAMPLES) for width in (2, 3, 4)]
    cases += [(wav(both, width=width), mean) for width in (2, 3, 4)]
    cases += [(wav_file(SAMPLES, RATE), SAMPLES), (wide, SAMPLES), (extensible(FILE), SAMPLES)]
    for content, expected in cases:
        assert decoded_sound(content, RATE, "x").tobytes() == expected.tobytes()
        assert sound_samples(io.BytesIO(content), RATE, "x") == len(SAMPLES)
    coarse = decoded_sound(wav(SAMPLES, width=1), RATE, "x")
    assert float(np.abs(coarse - SAMPLES).max()) <= 0.5 / 128 and len(coarse) == len(SAMPLES)


def encoded(samples: np.ndarray, rate: int, kind: str, codec: str) -> bytes:
    av = pytest.importorskip("av")
    out = io.BytesIO()
    with av.open(out, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=rate, layout="stereo" if samples.ndim > 1 else "mono")
        values = np.round(np.atleast_2d(samples) * 2**15).astype(np.int16)
        frame = av.AudioFrame.from_ndarray(values.T.reshape(1, -1).copy(), "s16", layout=stream.layout.name)
        frame.rate = rate
        resampler = av.AudioResampler(format=stream.codec_context.format, layout=stream.layout.name, rate=rate)
        frames = [*resampler.resample(frame), *resampler.resample(None)]
        for part in frames:
            container.mux(stream.encode(part))
        container.mux(stream.encode())
    return out.getvalue()


def test_other_formats_and_rates_by_the_library() -> None:
    """FLAC keeps the samples. A tone keeps its height at another rate, and two processes would read the same bits."""
    flac = encoded(SAMPLES, RATE, "flac", "flac")
    assert decoded_sound(flac, RATE, "x").tobytes() == SAMPLES.tobytes()
    both = np.stack([SAMPLES, noise(3_300, 5)])
    found = decoded_sound(encoded(both, RATE, "flac", "flac"), RATE, "x")
    assert found.tobytes() == both.mean(0, dtype=np.float32).tobytes()
    for rate in (8_000, 22_050, 44_100, 48_000):
        tone = (0.5 * np.sin(2 * np.pi * 440 * np.arange(rate // 2) / rate)).astype(np.float32)
        found = decoded_sound(wav(tone, rate), RATE, "x")
        assert (
            abs(len(found) - RATE // 2) <= 32 and found.tobytes() == decoded_sound(wav(tone, rate), RATE, "x").tobytes()
        )
        wanted = 0.5 * np.sin(2 * np.pi * 440 * np.arange(len(found)) / RATE)
        assert float(np.abs(found - wanted)[400:-400].max()) < 5e-3
    mp3 = decoded_sound(encoded(SAMPLES, RATE, "mp3", "mp3"), RATE, "x")
    assert abs(len(mp3) - len(SAMPLES)) < 3_000


BAD: list[tuple[dict[str, Any], str]] = [
    (row("<audio>", audios=[b"no sound"]), r"sound 1 \(.*\): 8 bytes are no sound that can be read"),
    (row("<audio>", audios=[b"#EXTM3U\n#EXTINF:5,\nfile:///etc/passwd\n"]), "no sound that can be read"),
    (row("<audio>", audios=[FILE[:-2]]), "a damaged sound: 6600 bytes are announced, and 6598 are there"),
    (row("<audio>", audios=[FILE[:40]]), "a damaged WAV file: no samples after a description"),
    (row("<audio>", audios=[wav(np.zeros(0))]), "a sound without samples"),
    (row("<audio>", audios=[wav_file(np.full(400, np.nan), RATE)]), "values that are no finite numbers"),
    (row("<audio>", audios=[wav(noise(320))]), "a sound of 320 samples at 16000 a second is too short for one token"),
    (row("<audio>", audios=[wav(noise(16_001))]), r"1.0 s, and the processor of this model would cut it off at 1 s"),
    (row("<audio>", audios=["gone.wav"]), "sound 1: no file .*gone.wav"),
    (row("<audio>", audios=["https://x.org/a.wav"]), "media are downloaded from no host. Fix: download the files"),
    (row("<audio><audio>", audios=["a.wav"]), "have places for 2 sounds, and there are 1 in the column 'audios'"),
    (row("<audio>", audios=["a.wav", "a.wav"]), "have places for 1 sounds, and there are 2 in the column"),
    (row("<audio>", audios=["a.wav"], audio="a.wav"), "sounds in the columns 'audios' and 'audio'"),
    (row("<audio>", audios=[{"array": [1, 2000], "sampling_rate": RATE}]), "values up to 2000. Fix: floats between"),
    (row("<audio>", audios=[{"array": [0.1], "sampling_rate": 0}]), "sampling_rate=0. Fix: a whole number"),
    (
        row("<audio>", audios=[{"array": [[0.1], [0.2]], "sampling_rate": 8}]),
        "an array of 2 dimensions. Fix: the samples",
    ),
    (row([{"type": "audio", "audio": "a.wav", "fps": 1}]), "a part of type 'audio' has fps, which is not read"),
    (row([{"type": "video", "video": "a.mp4"}]), "Videos are read for qwen2_vl, .*, not for a qwen2_5_omni_thinker"),
    (row("<video>", videos=["a.mp4"]), "Videos are read for qwen2_vl, .*, not for a qwen2_5_omni_thinker"),
]


@pytest.mark.parametrize("given, line", BAD, ids=[line[:30] for _, line in BAD])
def test_bad_sounds_are_refused_in_one_line_with_file_and_row(given: dict[str, Any], line: str, load: Any) -> None:
    with pytest.raises(Refused, match=line) as refused:
        load(given)
    assert re.match(r".*rows.parquet: row 1: ", str(refused.value)) and "\n" not in str(refused.value)


def test_models_that_read_no_sounds_name_those_that_do(load: Any, tmp_path: Path) -> None:
    other = chat_folder(tmp_path / "other", "qwen2_5_vl")
    for given in (row("<audio>", audios=["a.wav"]), row([{"type": "audio", "audio": "a.wav"}])):
        with pytest.raises(Refused, match="Sounds are read for .*qwen2_5_omni_thinker, not for a qwen2_5_vl"):
            load(given, folder=other)
        with pytest.raises(Refused, match="prompts are rendered as text only"):
            load(given, folder=None)


def test_rows_of_supervised_runs_have_no_sounds(model: Path, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "<audio>?"}, {"role": "assistant", "content": "yes"}]
    (tmp_path / "talks.jsonl").write_text(json.dumps({"messages": messages, "audios": ["a.wav"]}))
    cfg = DataConfig(cache_dir=str(tmp_path / "cache"))
    with pytest.raises(Refused, match="sounds in the column 'audios'. Sounds are read for .*, in rows of verl train"):
        load_conversations([str(tmp_path / "talks.jsonl")], sound_tokenizer(), cfg, model=model)


@pytest.mark.parametrize(
    "change, line",
    [
        ({"dither": 0.1}, "dither=0.1 of its processor"),
        ({"padding_side": "left"}, "padding_side='left' of its processor"),
        ({"feature_size": 80}, "feature_size=80 of its processor, and its audio tower reads 8"),
    ],
)
def test_settings_that_are_not_computed_are_refused(
    change: dict[str, Any], line: str, load: Any, tmp_path: Path
) -> None:
    folder = sound_folder(tmp_path / "other")
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | SETTINGS | change))
    with pytest.raises(Refused, match=line):
        load(row("<audio>", audios=["a.wav"]), folder=folder)


def test_a_tower_with_parts_of_another_size_is_refused() -> None:
    from transformers import Qwen3OmniMoeThinkerConfig

    config = Qwen3OmniMoeThinkerConfig()
    assert [halved_thrice(config, frames) for frames in (1, 100, 101, 350)] == [1, 13, 14, 46]
    config.audio_config.n_window = 25
    with pytest.raises(Refused, match="audio_config.n_window=25: sounds are read in parts of 2 x 50 frames"):
        halved_thrice(config, 100)


def test_placeholders_of_sounds_are_banned(model: Path) -> None:
    from transformers import AutoConfig

    assert {SOUND, SOUND_START, SOUND_END, IMAGE} <= {
        *banned_tokens(AutoConfig.from_pretrained(model), sound_tokenizer())
    }
