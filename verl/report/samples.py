"""Which samples the report carries, and how: a bounded, deterministic choice with the text of every token."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import numpy as np

from verl.track.samples import Kind, SampleRow, read_samples, read_scalars, sample_steps, samples_path

Decode = Callable[[list[int]], str]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Limits:
    """What one report may carry of one kind of samples."""

    steps: int
    groups: int
    rows_per_group: int
    total_bytes: int
    head_tokens: int = 900
    tail_tokens: int = 300
    text_chars: int = 6000


LIMITS: Mapping[Kind, Limits] = {
    "train": Limits(steps=12, groups=40, rows_per_group=16, total_bytes=4_500_000),
    "eval": Limits(steps=6, groups=48, rows_per_group=8, total_bytes=1_800_000),
}


class SamplePicker:
    """Chooses and packs the samples of a run; what it packed is kept for as long as the file does not change."""

    def __init__(self, run_dir: Path, tokenizer_folders: Sequence[Path]) -> None:
        self._run_dir = run_dir
        self._folders = tokenizer_folders
        self._decode: Decode | None = None
        self._packed: dict[tuple[Kind, int], tuple[object, list[dict[str, Any]], dict[str, int]]] = {}

    def pick(self, last_step: int | None) -> dict[str, Any]:
        """{files: [{kind, step, groups, ...}], note, decoded}. Steps after `last_step` belong to a past attempt."""
        if self._decode is None:
            self._decode = find_decoder(self._run_dir, self._folders)
        files: list[dict[str, Any]] = []
        for kind, limits in LIMITS.items():
            steps = [s for s in sample_steps(self._run_dir, kind) if last_step is None or s <= last_step]
            files += self._pick_kind(kind, limits, steps)
        return {"files": files, "decoded": self._decode is not None, "note": self._note(files)}

    def _pick_kind(self, kind: Kind, limits: Limits, steps: Sequence[int]) -> list[dict[str, Any]]:
        chosen = spread(steps, limits.steps)
        files = []
        for i, step in enumerate(chosen):
            quota = max(1, (limits.groups + i) // len(chosen))
            groups, counts = self._pack_step(kind, step, quota, limits)
            files.append({"kind": kind, "step": step, "groups": groups, **counts, "steps": len(steps)})
        _fit(files, limits.total_bytes)
        return [file for file in files if file["groups"]]

    def _pack_step(
        self, kind: Kind, step: int, quota: int, limits: Limits
    ) -> tuple[list[dict[str, Any]], dict[str, int]]:
        about = samples_path(self._run_dir, step, kind).stat()
        stamp = (about.st_mtime_ns, about.st_size, quota)
        known = self._packed.get((kind, step))
        if known is not None and known[0] == stamp:
            return known[1], known[2]
        scalars = read_scalars(self._run_dir, step, kind)
        wanted = choose_groups(scalars, quota, limits.rows_per_group, by_reward=kind == "train")
        ids = [sample_id for group in wanted for sample_id in group]
        rows = {row.sample_id: row for row in read_samples(self._run_dir, step, kind, sample_ids=ids)}
        groups = [pack_group([rows[i] for i in group], limits, self._decode) for group in wanted]
        counts = {"all_rows": len(scalars), "all_groups": len({row["group_id"] for row in scalars})}
        self._packed[kind, step] = (stamp, groups, counts)
        return groups, counts

    def _note(self, files: Sequence[Mapping[str, Any]]) -> str:
        if not files:
            return ""
        parts = []
        for kind in ("train", "eval"):
            of_kind = [file for file in files if file["kind"] == kind]
            if of_kind:
                groups = sum(len(file["groups"]) for file in of_kind)
                rows = sum(len(group["rows"]) for file in of_kind for group in file["groups"])
                word = "training" if kind == "train" else "evaluation"
                steps = f"{len(of_kind)} of {_count(of_kind[0]['steps'], 'step')}"
                parts.append(f"{_count(rows, word + ' sample')} of {_count(groups, 'group')} from {steps}")
        limit = LIMITS["train"]
        return (
            f"This page carries {' and '.join(parts)}; long responses show their first {limit.head_tokens} and last "
            f"{limit.tail_tokens} tokens. Everything is in {self._run_dir / 'samples'} (Parquet)."
        )


def spread(items: Sequence[T], count: int) -> list[T]:
    """At most `count` of the items at equal distances, first and last included (one: the last)."""
    if len(items) <= count:
        return list(items)
    if count == 1:
        return [items[-1]]
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def choose_groups(
    scalars: Sequence[Mapping[str, Any]], quota: int, rows_per_group: int, *, by_reward: bool
) -> list[list[str]]:
    """Sample ids of the chosen groups. Training: equal distances over the mean reward, worst and best included.
    Evaluation: the tasks that come first by id, so that every evaluation step shows the same ones."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in scalars:
        groups.setdefault(row["group_id"], []).append(row)

    def mean_reward(group_id: str) -> float:
        rewards = [row["reward"] for row in groups[group_id] if math.isfinite(row["reward"])]
        return fmean(rewards) if rewards else -math.inf

    if by_reward:
        order = sorted(groups, key=lambda g: (mean_reward(g), g))
        chosen = spread(order, quota)
        chosen = chosen[-1:] + chosen[:-1]  # the best, the worst, the rest: what the size limit cuts is the middle
    else:
        chosen = sorted(groups, key=lambda g: (_natural(groups[g][0]["task_id"]), g))[:quota]
    out = []
    for group_id in chosen:
        rows = sorted(groups[group_id], key=lambda row: (_reward_rank(row["reward"]), row["sample_id"]))
        out.append([row["sample_id"] for row in spread(rows, rows_per_group)])
    return out


def pack_group(rows: Sequence[SampleRow], limits: Limits, decode: Decode | None) -> dict[str, Any]:
    first = rows[0]
    prompts = {row.prompt_text for row in rows}
    packed = []
    for row in rows:
        entry = pack_row(row, limits, decode)
        if len(prompts) > 1:
            entry["prompt"] = clip(row.prompt_text, limits.text_chars)
        packed.append(entry)
    group = {"id": first.group_id, "task": first.task_id, "prompt": clip(first.prompt_text, limits.text_chars)}
    return {**group, "prompt_tokens": first.prompt_tokens, "rows": packed}


def pack_row(row: SampleRow, limits: Limits, decode: Decode | None) -> dict[str, Any]:
    keep = kept_tokens(row.response_tokens, limits)
    gap = None
    if row.old_logprobs is not None and row.rollout_logprobs is not None:
        gap = row.old_logprobs - row.rollout_logprobs
    out: dict[str, Any] = {
        "id": row.sample_id,
        "trajectory": row.trajectory_id,
        "purpose": row.purpose,
        "reward": _digits(row.reward, 6),
        "components": {name: _digits(value, 6) for name, value in row.components.items()},
        "versions": [row.version_min, row.version_max],
        "stop": row.stop_reason,
        "outcome": row.outcome,
        "temperature": row.temperature,
        "tokens": row.response_tokens,
        "loss_tokens": row.loss_tokens,
        "text": clip(row.response_text, limits.text_chars),
        "ids": [int(t) for t in row.response_ids[keep]],
        "mask": _column(row.response_mask, keep),
        "lp": _column(row.rollout_logprobs, keep),
        "gap": _column(gap, keep),
        "adv": _column(row.advantages, keep),
        "ent": _column(row.entropy, keep),
        "ref": _column(row.ref_logprobs, keep),
        "ver": _column(row.token_versions, keep),
    }
    if len(keep) < row.response_tokens:
        out["cut"] = {"at": limits.head_tokens, "left_out": row.response_tokens - len(keep)}
    if decode is not None:
        head = [int(t) for t in row.response_ids[: limits.head_tokens]] if "cut" in out else out["ids"]
        tail = out["ids"][len(head) :]
        out["pieces"] = token_pieces(head, decode) + token_pieces(tail, decode)
        del out["text"]
        out["snippet"] = clip(row.response_text, 400)
    return {name: value for name, value in out.items() if value is not None}


def token_pieces(ids: Sequence[int], decode: Decode) -> list[str]:
    """The text that each token adds. A token inside a character that later tokens complete adds "", the last of them
    the character; joined, the pieces are the decoded text."""
    pieces: list[str] = []
    start = done = 0  # decode a short window: what a piece looks like depends on the tokens just before it
    for end in range(1, len(ids) + 1):
        before, after = decode(list(ids[start:done])), decode(list(ids[start:end]))
        if after.endswith("�") and end < len(ids) and end - done < 8:
            pieces.append("")
            continue
        pieces.append(after[len(before) :])
        start, done = done, end
    return pieces


def find_decoder(run_dir: Path, folders: Sequence[Path]) -> Decode | None:
    """The run's tokenizer: tokenizer.json in the run directory, in its latest checkpoint, or where the model came from."""
    places = [
        run_dir,
        run_dir / "tokenizer",
        *sorted(run_dir.glob("checkpoints/step_*/hf"), key=_step_of, reverse=True),
    ]
    path = next((p / "tokenizer.json" for p in (*places, *folders) if (p / "tokenizer.json").is_file()), None)
    if path is None:
        return None
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None
    tokenizer = Tokenizer.from_file(str(path))
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)


def kept_tokens(count: int, limits: Limits) -> np.ndarray:
    if count <= limits.head_tokens + limits.tail_tokens:
        return np.arange(count)
    return np.concatenate([np.arange(limits.head_tokens), np.arange(count - limits.tail_tokens, count)])


def clip(text: str, chars: int) -> str:
    if len(text) <= chars:
        return text
    head, tail = chars * 2 // 3, chars // 3
    return f"{text[:head]}\n[... {len(text) - head - tail} characters left out ...]\n{text[-tail:]}"


def _fit(files: Sequence[dict[str, Any]], total_bytes: int) -> None:
    """Keep groups in turns over the steps, latest step first, until the budget is spent."""
    sizes = [[len(json.dumps(group)) for group in file["groups"]] for file in files]
    kept: list[list[int]] = [[] for _ in files]
    left = total_bytes
    for turn in range(max((len(s) for s in sizes), default=0)):
        for i in reversed(range(len(files))):
            if turn < len(sizes[i]) and sizes[i][turn] <= left:
                kept[i].append(turn)
                left -= sizes[i][turn]
    for file, turns in zip(files, kept):
        file["groups"] = [file["groups"][t] for t in turns]


def _column(values: np.ndarray | None, keep: np.ndarray) -> Any:
    """A column of the page: null if absent, one number if constant, else a list with four significant digits."""
    if values is None or not len(values):
        return None
    kept = values[keep]
    short = kept.tolist() if kept.dtype.kind in "iu" else _four_digits(kept)
    return short[0] if all(v == short[0] for v in short) else short


def _four_digits(values: np.ndarray) -> list[float | None]:
    wide = values.astype(np.float64)
    finite = np.isfinite(wide)
    safe = np.where(finite & (wide != 0), wide, 1.0)
    power = 3 - np.floor(np.log10(np.abs(safe))).astype(int)
    up, down = 10.0 ** np.maximum(power, 0), 10.0 ** np.maximum(-power, 0)  # whole numbers: the quotient is the decimal
    short = np.where(wide == 0, 0.0, np.round(safe * up / down) * down / up)
    return [value if ok else None for value, ok in zip(short.tolist(), finite.tolist())]


def _digits(value: float, digits: int) -> float | int | None:
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short == int(short) else short


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _reward_rank(reward: float) -> float:
    return reward if math.isfinite(reward) else -math.inf


def _natural(text: str) -> tuple[int, str]:
    """Numbers by value: task 9 before task 10."""
    return (len(text), text) if text.isdigit() else (1 << 30, text)


def _step_of(path: Path) -> int:
    number = path.parent.name.removeprefix("step_")
    return int(number) if number.isdigit() else -1
