"""Select the samples of the report: a bounded, deterministic selection, with the text of every token."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

import numpy as np

from verl.report.thumbnails import Thumbnails
from verl.track.log import Note, logger
from verl.track.samples import DamagedSamples, Kind, SampleRow, read_samples, read_scalars, sample_steps, samples_path

Decode = Callable[[list[int]], str]
T = TypeVar("T")
HEAD_TOKENS, TAIL_TOKENS = 900, 300  # tokens shown of a long response
TEXT_CHARS = 6000  # characters shown of a long text
RUN = re.compile(r"(<[^<>\s]{1,40}>|\[[A-Z_]{1,20}\])\1{3,}")


class SampleLimits(NamedTuple):
    """The largest share of one report for one kind of samples."""

    steps: int
    groups: int
    rows_per_group: int
    total_bytes: int


LIMITS: Mapping[Kind, SampleLimits] = {
    "train": SampleLimits(steps=12, groups=40, rows_per_group=16, total_bytes=4_500_000),
    "eval": SampleLimits(steps=6, groups=48, rows_per_group=8, total_bytes=1_800_000),
}


class SamplePicker:
    """Selects the samples of a run and prepares them for the page. Prepared samples are cached until their file
    changes."""

    def __init__(self, run_dir: Path, tokenizer_folders: Sequence[Path], note: Note = logger.warning) -> None:
        """Prepare to read the samples of a run.

        note: a function that is called with a line about each damaged file, which is left out
        """
        self._run_dir, self._folders, self._note_of = run_dir, tokenizer_folders, note
        self._decode: Decode | None = None
        self._thumbnails = Thumbnails(run_dir, note)
        self._packed: dict[tuple[Kind, int], tuple[object, dict[str, Any]]] = {}

    def pick(self, last_step: int | None) -> dict[str, Any]:
        """Return {files: [{kind, step, groups, ...}], note, decoded}. Steps after `last_step` belong to an earlier
        attempt and are left out."""
        if self._decode is None:
            self._decode = find_decoder(self._run_dir, self._folders, self._note_of)
        files: list[dict[str, Any]] = []
        for kind, limits in LIMITS.items():
            steps = [s for s in sample_steps(self._run_dir, kind) if last_step is None or s <= last_step]
            files += self._pick_kind(kind, limits, steps)
        return {"files": files, "decoded": self._decode is not None, "note": self._note(files)}

    def _pick_kind(self, kind: Kind, limits: SampleLimits, steps: Sequence[int]) -> list[dict[str, Any]]:
        chosen = evenly_spaced(steps, limits.steps)
        files = []
        for i, step in enumerate(chosen):
            quota = max(1, (limits.groups + i) // len(chosen))
            try:
                about = samples_path(self._run_dir, step, kind).stat()
            except OSError as e:
                self._note_of(f"{e.filename} cannot be read: {e.strerror}; it is left out")
                continue
            stamp = (about.st_mtime_ns, about.st_size, quota)
            if self._packed.get((kind, step), (None,))[0] != stamp:
                self._packed[kind, step] = stamp, self._pack(kind, step, quota, limits)
            files.append({**self._packed[kind, step][1], "steps": len(steps)})
        _fit(files, limits.total_bytes)
        return [file for file in files if file["groups"]]

    def _pack(self, kind: Kind, step: int, quota: int, limits: SampleLimits) -> dict[str, Any]:
        try:
            return self._packed_file(kind, step, quota, limits)
        except DamagedSamples as e:
            self._note_of(f"{e}; it is left out")
            return {"kind": kind, "step": step, "groups": [], "all_rows": 0, "all_groups": 0}

    def _packed_file(self, kind: Kind, step: int, quota: int, limits: SampleLimits) -> dict[str, Any]:
        scalars = read_scalars(self._run_dir, step, kind)
        wanted = choose_groups(scalars, quota, limits.rows_per_group, by_reward=kind == "train")
        ids = [sample_id for group in wanted for sample_id in group]
        rows = {row.sample_id: row for row in read_samples(self._run_dir, step, kind, sample_ids=ids)}
        groups = [pack_group([rows[i] for i in group], self._decode, self._thumbnails) for group in wanted]
        counts = {"all_rows": len(scalars), "all_groups": len({row["group_id"] for row in scalars})}
        return {"kind": kind, "step": step, "groups": groups, **counts}

    def _note(self, files: Sequence[Mapping[str, Any]]) -> str:
        parts = []
        for kind, word in (("train", "training sample"), ("eval", "evaluation sample")):
            if of_kind := [file for file in files if file["kind"] == kind]:
                groups = [group for file in of_kind for group in file["groups"]]
                rows = _count(sum(len(group["rows"]) for group in groups), word)
                steps = _count(of_kind[0]["steps"], "step")
                parts.append(f"{rows} of {_count(len(groups), 'group')} from {len(of_kind)} of {steps}")
        carries = f"This page carries {' and '.join(parts)}; long responses show their first {HEAD_TOKENS} and last "
        everything = f"{TAIL_TOKENS} tokens. Everything is in {self._run_dir / 'samples'} (Parquet)."
        return carries + everything if parts else ""


def evenly_spaced(items: Sequence[T], count: int) -> list[T]:
    """Return at most `count` of the items at equal distances, first and last included (for one: the last)."""
    if len(items) <= count:
        return list(items)
    if count == 1:
        return [items[-1]]
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def choose_groups(
    scalars: Sequence[Mapping[str, Any]], quota: int, rows_per_group: int, *, by_reward: bool
) -> list[list[str]]:
    """Return the sample ids of the chosen groups.

    by_reward: True (training): at equal distances of the mean reward, with the worst and the best; False (evaluation):
        the first tasks by id, so that every evaluation shows the same ones
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in scalars:
        groups.setdefault(row["group_id"], []).append(row)

    def mean_reward(group_id: str) -> float:
        rewards = [row["reward"] for row in groups[group_id] if math.isfinite(row["reward"])]
        return fmean(rewards) if rewards else -math.inf

    def number_first(group_id: str) -> tuple[int, str]:  # numbers by value: task 9 before task 10
        task = groups[group_id][0]["task_id"]
        return (len(task), task) if task.isdigit() else (1 << 30, task)

    if by_reward:
        chosen = evenly_spaced(sorted(groups, key=lambda g: (mean_reward(g), g)), quota)
        chosen = chosen[-1:] + chosen[:-1]  # the best, the worst, the rest: the size limit cuts the middle
    else:
        chosen = sorted(groups, key=lambda g: (number_first(g), g))[:quota]
    rank = lambda row: (row["reward"] if math.isfinite(row["reward"]) else -math.inf, row["sample_id"])  # noqa: E731
    return [[row["sample_id"] for row in evenly_spaced(sorted(groups[g], key=rank), rows_per_group)] for g in chosen]


def pack_group(rows: Sequence[SampleRow], decode: Decode | None, thumbnails: Thumbnails) -> dict[str, Any]:
    first, packed = rows[0], [pack_row(row, decode) for row in rows]
    seen = [thumbnails.of_row(row.segments, f"step {row.step}, sample {row.sample_id}") for row in rows]
    for row, entry, (shown, later) in zip(rows, packed, seen, strict=True):
        if row.prompt_text != first.prompt_text or shown != seen[0][0]:
            entry |= {"prompt": _prompt(row, shown), "media": shown}
        entry |= {"later_media": later} if later else {}
    about: dict[str, Any] = {"id": first.group_id, "task": first.task_id, "prompt": _prompt(first, seen[0][0])}
    about |= {"media": seen[0][0]} if seen[0][0] else {}
    about |= {"truth": clip(first.ground_truth, 400)} if first.ground_truth else {}
    return {**about, "prompt_tokens": first.prompt_tokens, "rows": packed}


def _prompt(row: SampleRow, media: Sequence[Any]) -> str:
    """Return the text of a prompt. If it has media, each run of one mark, as the placeholders of an image are, is that
    mark and its count."""
    text = row.prompt_text
    if media:
        text = RUN.sub(lambda run: f"{run[1]} x {len(run[0]) // len(run[1])}", text)
    return clip(text, TEXT_CHARS)


def pack_row(row: SampleRow, decode: Decode | None) -> dict[str, Any]:
    count = row.response_tokens
    cut = count > HEAD_TOKENS + TAIL_TOKENS
    keep = np.r_[:HEAD_TOKENS, count - TAIL_TOKENS : count] if cut else np.arange(count)
    tokens = row.tokens
    both = "old_logprobs" in tokens and "rollout_logprobs" in tokens
    gap = tokens["old_logprobs"] - tokens["rollout_logprobs"] if both else None
    ids = row.response_ids[keep].tolist()
    out: dict[str, Any] = {
        "id": row.sample_id,
        "trajectory": row.trajectory_id,
        "purpose": row.purpose,
        "reward": number(row.reward),
        "components": {name: number(value) for name, value in row.components.items()},
        "versions": [row.version_min, row.version_max],
        "stop": row.stop_reason,
        "outcome": row.outcome,
        "temperature": row.temperature,
        "tokens": count,
        "loss_tokens": row.loss_tokens,
        "ids": ids,
        "mask": _column(row.response_mask, keep),
        "lp": _column(tokens.get("rollout_logprobs"), keep),
        "gap": _column(gap, keep),
        "adv": _column(tokens.get("advantages"), keep),
        "ent": _column(tokens.get("entropy"), keep),
        "ref": _column(tokens.get("ref_logprobs"), keep),
        "ver": _column(tokens.get("token_versions"), keep),
        "cut": {"at": HEAD_TOKENS, "left_out": count - len(keep)} if cut else None,
    }
    if decode is None:
        out["text"] = clip(row.response_text, TEXT_CHARS)
    else:
        head = HEAD_TOKENS if cut else count
        out["pieces"] = token_pieces(ids[:head], decode) + token_pieces(ids[head:], decode)
        out["snippet"] = clip(row.response_text, 400)
    return {name: value for name, value in out.items() if value is not None}


def token_pieces(ids: Sequence[int], decode: Decode) -> list[str]:
    """Return the text that each token adds. If a character consists of several tokens, the last of them adds it and the
    others add "". The joined pieces are the decoded text."""
    pieces: list[str] = []
    start = done = 0  # decode a short window: a piece depends on the tokens just before it
    for end in range(1, len(ids) + 1):
        before, after = decode(list(ids[start:done])), decode(list(ids[start:end]))
        if after.endswith("�") and end < len(ids) and end - done < 8:
            pieces.append("")
            continue
        pieces.append(after[len(before) :])
        start, done = done, end
    return pieces


def find_decoder(run_dir: Path, folders: Sequence[Path], note: Note = logger.warning) -> Decode | None:
    """Return the decoder of the run's tokenizer.json: in the run directory, in its latest checkpoint, or in the model's
    folder."""
    saved = [path for path in run_dir.glob("checkpoints/step_*/hf") if path.parent.name[5:].isdigit()]
    saved.sort(key=lambda path: -int(path.parent.name[5:]))
    path = next((p / "tokenizer.json" for p in (run_dir, *saved, *folders) if (p / "tokenizer.json").is_file()), None)
    if path is None:
        return None
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as e:  # the package has no narrower one
        note(f"{path} cannot be read, and tokens are shown without their texts: {' '.join(str(e).split())[:200]}")
        return None
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)


def number(value: float, digits: int = 6) -> float | None:
    """Return a number rounded to significant digits; None (null in JSON) for a value that JSON does not have."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def clip(text: str, chars: int) -> str:
    if len(text) <= chars:
        return text
    head, tail = chars * 2 // 3, chars // 3
    return f"{text[:head]}\n[... {len(text) - head - tail} characters left out ...]\n{text[-tail:]}"


def _fit(files: Sequence[dict[str, Any]], total_bytes: int) -> None:
    """Keep groups in turn from each step, the latest step first, until the size limit is reached."""
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
    """Return a column of the page: null if absent, one number if constant, else a list with four significant digits."""
    if values is None or not len(values):
        return None
    kept = values[keep].tolist()
    short = [number(v, 4) for v in kept] if values.dtype.kind == "f" else kept
    return short[0] if all(v == short[0] for v in short) else short


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
