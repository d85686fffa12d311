"""bench/gpu.py at toy sizes on a CPU: every part gives its numbers, alone too, and records of parts are kept."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import gpu, gpu_parts
from bench.gpu_parts import TINY, Bench, Row, Sizes, busy_share, decode_sizes, line_of
from bench.gpu_trl import trl_step


@pytest.mark.parametrize("part", ["decode", "prefill", "publish", "update", "idle", "step"])
def test_a_part_alone_gives_numbers_with_a_limit(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    found, late = gpu.measure("tiny", ["limits", part], "cpu", TINY, time.monotonic() + 600)
    assert not late and [row.part for row in found[:3]] == ["limits"] * 3
    own = [row for row in found if row.part == part]
    assert len(own) == {"decode": 4, "prefill": 1, "publish": 2, "update": 3, "idle": 2, "step": 4}[part]
    if part == "idle":  # a CPU's profiler does not see the engine's thread
        assert all(row.note for row in own if row.value is None)
        return
    assert all(row.value and row.value > 0 for row in own), own
    assert own[0].share is not None and own[0].share > 0
    assert all(line_of(row, "tiny") in capsys.readouterr().out for row in own[-1:])


WEIGHTS = "float32 weights under bfloat16 autocast"


def test_the_step_of_trl_is_measured_where_it_is_installed(tmp_path: Path) -> None:
    """By a program in place of its interpreter, which writes what that of bench/peers writes."""
    bench, steps = Bench("tiny", "cpu", TINY), [{"wall_s": s, "rollout_s": s / 2, "update_s": s / 4} for s in (1, 2, 9)]
    written = json.dumps({"versions": {"trl": "1.16.0"}, "steps": steps})
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ncp $2 {tmp_path}/given.json && echo '{written}' > $3\n")
    python.chmod(0o755)
    found, note = list(trl_step(bench, str(python), tmp_path, 60.0)), f"trl 1.16.0; {WEIGHTS}"
    assert [(row.what, row.value, row.note) for row in found] == [
        ("TRL's step", 2, note),
        ("TRL's rollout", 1, note),
        ("TRL's update", 0.5, note),
    ]
    given = json.loads((tmp_path / "given.json").read_text())
    assert (given["prompts_per_step"], given["samples_per_prompt"], given["max_response_tokens"]) == TINY.step
    assert given["device"] == "cpu" and given["rows"] == str(tmp_path / "rows.jsonl")
    python.write_text("#!/bin/sh\necho 'torch.OutOfMemoryError: CUDA out of memory'; exit 1\n")
    (failed,) = trl_step(bench, str(python), tmp_path, 60.0)
    assert failed.value is None and "out of memory" in line_of(failed, "tiny")
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    for left_s, why in ((0.2, "did not end within 0 s"), (-1.0, "no time is left")):
        (late,) = trl_step(bench, str(python), tmp_path, left_s)
        assert late.value is None and why in late.note


def test_what_would_begin_too_late_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--device", "cpu", "--tiny", "--only", "decode,update", "--limit-s", "0"]) == 1
    assert "python bench/gpu.py --shapes tiny --only limits,decode,update" in capsys.readouterr().out


def test_shares_of_rates_and_of_times() -> None:
    assert Row("decode", "x", 50.0, "tokens/s", 200.0).share == 0.25
    assert Row("step", "x", 4.0, "s", 1.0).share == 0.25
    assert Row("step", "x", None, "s", 1.0).share is None and Row("step", "x", 1.0, "s").share is None


def test_time_that_is_covered_counts_once() -> None:
    assert busy_share([(0, 4), (2, 6), (8, 9), (3, 5)], 0, 10) == pytest.approx(0.7)
    assert busy_share([(0, 2), (9, 20)], 1, 10) == pytest.approx(2 / 9)
    assert busy_share([], 0, 10) == 0.0 and busy_share([(0, 1)], 1, 1) == 0.0


def test_the_limit_of_decoding_reads_weights_and_keys_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench("tiny", "cpu", TINY)

    async def rate(rows: int, prompt: int, answer: int) -> tuple[float, float, str]:
        return 1.0, prompt + 7.5, ""

    monkeypatch.setattr(bench, "_decode_rate", rate)
    found = {row.what: row for row in bench.decode()}
    kv, mean = 2 * 2 * 2 * 2 * 16, decode_sizes(3, 40, TINY.tokens, "cpu")[0] + 7.5  # 2 layers, 2 heads of 16, 2 bytes
    assert found["3 x 40"].limit == pytest.approx(3 * bench.bytes_per_s / (2 * bench.params + 3 * mean * kv))
    assert found["3 x 40"].note.startswith(f"{mean:.0f} tokens before each on average, ")
    monkeypatch.setattr(bench, "_free_bytes", lambda: 1e3)
    assert all(row.value is None and "it needs" in row.note for row in bench.decode())


@pytest.mark.parametrize("context", Sizes().contexts)
@pytest.mark.parametrize("rows", Sizes().rows)
def test_rows_are_timed_when_no_prompt_is_left_and_before_one_ends(rows: int, context: int) -> None:
    """By a schedule of its own, of a card: the first pass has 8192 tokens, and each step after it 1024 beside its rows,
    of at most 16 prompts."""
    timed = Sizes().tokens
    prompt, answer = decode_sizes(rows, context, timed, "cuda")
    left, count = [prompt] * rows, [0] * rows
    while any(left):
        room, ready = (1024 if any(count) else 8192), [n == 0 for n in left]
        for i in [i for i, n in enumerate(left) if n][:16]:
            took = min(left[i], room)
            left[i], room = left[i] - took, room - took
        count = [n + 1 if done else 0 for n, done in zip(count, ready, strict=True)]
    assert max(count) + 2 + 0.8 * timed < answer, "none ends while it is timed"
    mean = prompt + sum(count) / rows + 2 + 0.4 * timed
    assert mean == pytest.approx(context, rel=0.06), "and they have the context that the row is of"


def test_the_memory_of_an_update_is_that_of_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all tokens: in two passes of 16,384 each it would be half of what the row says."""
    asked = list[int]()

    def engine(model: Any, settings: Any) -> Any:
        asked.append(settings.max_tokens_per_microbatch)
        raise torch.OutOfMemoryError

    monkeypatch.setattr(gpu_parts, "TorchEngine", engine)
    bench = Bench("tiny", "cpu", TINY)
    bench.sizes = Sizes()
    assert all(row.note == "out of memory" for row in bench.update()) and asked == [32 * 1024] * 3


def test_a_record_keeps_the_parts_of_earlier_runs(tmp_path: Path) -> None:
    gpu.record("tiny", [Row("decode", "1 x 40", 5.0, "tokens/s", 10.0)], tmp_path, "cpu", "abc")
    path = gpu.record("tiny", [Row("update", "full", None, "tokens/s", note="out of memory")], tmp_path, "cpu", "def")
    found = json.loads(path.read_text())
    assert {name: part["commit"] for name, part in found["parts"].items()} == {"decode": "abc", "update": "def"}
    text = gpu.section([found])
    assert "tiny decode: 1 x 40, tokens/s | 5 | 10 | 50%" in text and "not run: out of memory" in text
    assert gpu.NEVER in gpu.section([])


def test_numbers_of_a_cpu_are_not_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["--device", "cpu", "--record"])
    with pytest.raises(SystemExit):
        gpu.main(["--only", "decoding"])
    assert "decoding: there are the shapes" in capsys.readouterr().err
