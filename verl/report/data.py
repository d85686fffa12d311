"""The data of the report as JSON values: read from the run directory, and reduced to the size of a page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import yaml

from verl.bounds import fast_yaml
from verl.errors import Refused
from verl.report.samples import SamplePicker, number
from verl.track.events import read_events
from verl.track.health import Alarm, HealthLimits, scan
from verl.track.log import Note, logger
from verl.track.metrics import METRICS_FILE, PHASES, MetricLine, held_out_word, phase_order, read_metrics, read_units

CONFIG_FILE = "config.yaml"
MAX_POINTS = 1200  # of one curve; beyond it the least and the greatest of each stretch are kept
MAX_BARS = 180  # of the time chart; beyond it each bar is the mean of a stretch of steps
MAX_ALARMS = 300
HIGHLIGHTS = (
    ("model", "model.path"),
    ("algorithm", "algorithm.name"),
    ("rollout", "rollout.engine"),
    ("prompts per step", "step.prompts_per_step"),
    ("samples per prompt", "step.samples_per_prompt"),
    ("updates per step", "step.updates_per_step"),
    ("learning rate", "optim.lr"),
    ("schedule", "optim.schedule"),
    ("temperature", "rollout.temperature"),
    ("response tokens", "rollout.max_response_tokens"),
    ("staleness", "pipeline.staleness"),
    ("dtype", "model.dtype"),
    ("seed", "run.seed"),
)
CARDS = (
    ("Reward", "critic/score/mean", "number", "up"),
    ("Loss", "train/loss", "number", "down"),
    ("Held-out loss", "val/loss", "number", "down"),
    ("Entropy", "actor/entropy", "number", ""),
    ("Response length", "response_length/mean", "tokens", ""),
)


class RunReader:
    """Reads a run directory repeatedly while the run continues. Samples are decoded again only if they have changed."""

    def __init__(self, run_dir: Path, note: Note = logger.warning) -> None:
        """Open the run directory.

        note: a function that is called once with a line about each damaged file, which is left out
        """
        if not is_run_dir(run_dir):
            known = f"{METRICS_FILE}, {CONFIG_FILE} nor events/"
            raise Refused(f"{run_dir} is not a run directory: it has neither {known}")
        self.run_dir = run_dir
        path = run_dir / CONFIG_FILE
        self._noted: set[str] = set()
        self._note_of = note
        self._config_text, self._config = self._read_config(path)
        folders = (lookup(self._config, key) for key in ("model.tokenizer_path", "model.path"))
        self._picker = SamplePicker(run_dir, [Path(str(folder)) for folder in folders if folder], self._note)

    def _note(self, text: str) -> None:
        if text not in self._noted:
            self._noted.add(text)
            self._note_of(text)

    def _read_config(self, path: Path) -> tuple[str, Mapping[str, Any]]:
        """Return the text of the configuration and its tree; both empty if it is damaged."""
        try:
            text = path.read_text("utf-8") if path.is_file() else ""
            tree = fast_yaml(text) or {}
        except (OSError, ValueError, yaml.YAMLError, RecursionError) as e:
            self._note(f"{path} cannot be read, and is left out: {' '.join(str(e).split())[:200]}")
            return "", {}
        return text, tree if isinstance(tree, dict) else {}

    def version(self) -> str:
        """Return a text that changes whenever the page's data change."""
        stamps = []
        for folder in (self.run_dir, self.run_dir / "samples", self.run_dir / "events"):
            for path in sorted(folder.glob("*")):
                if path.is_file() and not path.name.startswith(".") and path.suffix != ".html":
                    about = path.stat()
                    stamps.append((path.name, about.st_size, about.st_mtime_ns))
        return f"{hash(tuple(stamps)) & (2**64 - 1):016x}"

    def payload(self) -> dict[str, Any]:
        lines = read_metrics(self.run_dir, self._note)
        last_step = lines[-1].step if lines else None
        times = (line.values.get("perf/time_per_step", 0.0) for line in lines)
        run = {
            "name": str(lookup(self._config, "run.name") or self.run_dir.resolve().name),
            "folder": str(self.run_dir),
            "written": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
            "steps": last_step or 0,
            "planned": lookup(self._config, "run.total_steps"),
            "attempts": len({line.attempt for line in lines}),
            "wall_s": number(sum(seconds for seconds in times if math.isfinite(seconds))),
        }
        found = [(label, key, lookup(self._config, key)) for label, key in HIGHLIGHTS]
        begun = [event.data.get("told", ()) for event in read_events(self.run_dir, {"resumed"}, self._note)]
        found += [(what, "at the start", how) for what, _, how in (s.partition(": ") for s in (begun or [()])[-1])]
        return {
            "run": run,
            "highlights": [{"label": label, "key": key, "value": str(v)} for label, key, v in found if v is not None],
            "config": self._config_text,
            "summary": summary(lines),
            "held_out": held_out_word(line.values for line in lines),
            "series": series(lines, read_units(self.run_dir, self._note)),
            "time": time_ledger(lines),
            "alarms": alarms(self.run_dir, lines, self._config, self._note),
            "resumes": [{"step": b.step, "attempt": b.attempt} for a, b in pairwise(lines) if a.attempt != b.attempt],
            "samples": self._picker.pick(last_step),
        }


def is_run_dir(path: Path) -> bool:
    return (path / METRICS_FILE).is_file() or (path / CONFIG_FILE).is_file() or (path / "events").is_dir()


def lookup(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key; None if it does not exist."""
    node: Any = config
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def series(lines: Sequence[MetricLine], units: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return every metric as {x: steps, y: values or null, unit}; `thinned` if points were left out."""
    points: dict[str, list[tuple[int, float]]] = {}
    for line in lines:
        for name, value in line.values.items():
            points.setdefault(name, []).append((line.step, value))
    out: dict[str, dict[str, Any]] = {}
    for name in sorted(points):
        kept = thin(points[name], MAX_POINTS)
        out[name] = {"x": [step for step, _ in kept], "y": [number(value) for _, value in kept]}
        if name in units:
            out[name]["unit"] = units[name]
        if len(kept) < len(points[name]):
            out[name]["thinned"] = len(points[name])
    return out


def thin(points: Sequence[tuple[int, float]], limit: int) -> list[tuple[int, float]]:
    """Return at most about `limit` points: first, last, and the extremes of equal ranges, so that spikes remain."""
    if len(points) <= limit:
        return list(points)
    stretches = limit // 2 - 1
    kept = {0, len(points) - 1}
    for i in range(stretches):
        start, end = i * len(points) // stretches, (i + 1) * len(points) // stretches
        finite = [j for j in range(start, end) if math.isfinite(points[j][1])] or [start]
        kept |= {min(finite, key=lambda j: points[j][1]), max(finite, key=lambda j: points[j][1])}
    return [points[j] for j in sorted(kept)]


def time_ledger(lines: Sequence[MetricLine]) -> dict[str, Any]:
    """Return seconds by phase: the totals of the run, and one bar per step (or the mean of a range of steps)."""
    prefix = "timing_s/"
    timed: list[tuple[int, dict[str, float]]] = []
    for line in lines:
        seconds = {name.removeprefix(prefix): s for name, s in line.values.items() if name.startswith(prefix)}
        if seconds:
            timed.append((line.step, {name: s for name, s in seconds.items() if math.isfinite(s) and s > 0}))
    phases = phase_order({name for _, seconds in timed for name in seconds})
    bars, stride = [], max(1, math.ceil(len(timed) / MAX_BARS))
    for i in range(0, len(timed), stride):
        stretch = timed[i : i + stride]
        parts = [number(sum(seconds.get(name, 0.0) for _, seconds in stretch) / len(stretch)) for name in phases]
        bars.append({"from": stretch[0][0], "to": stretch[-1][0], "parts": parts})
    totals = [number(sum(seconds.get(name, 0.0) for _, seconds in timed)) for name in phases]
    return {"phases": phases, "known": list(PHASES), "totals": totals, "bars": bars}


def summary(lines: Sequence[MetricLine]) -> list[dict[str, Any]]:
    """Return one card per measurement, with its value before and after. Values of single steps are compared first with
    last; for noisy values the mean of the first steps is compared with the mean of the last ones."""
    cards = []
    word = held_out_word(line.values for line in lines)
    form, show = ("percent", "{:.1%}") if word == "accuracy" else ("number", "{:.4g}")
    for label, name in _accuracies(lines):
        (first_step, first), *rest = points = _points(lines, name)
        best_step, best = max(points, key=lambda point: point[1])
        last_step, last = points[-1]
        span = f"step {first_step} → {last_step} · best {show.format(best)} at step {best_step}"
        note = span if rest else f"at step {first_step}"
        cards.append(_card(f"Held-out {word}, {label}", first if rest else None, last, form, note, "up"))
    for label, name, form, better in CARDS:
        if values := [value for _, value in _points(lines, name)]:
            k = max(1, min(5, len(values) // 2))
            ends = f"mean of the first and last {k} steps" if k > 1 else "first and last step"
            before, note = (fmean(values[:k]), ends) if len(values) > 1 else (None, "one step")
            cards.append(_card(label, before, fmean(values[-k:]), form, note, better))
    if k3 := [value for _, value in _points(lines, "mismatch/k3")]:
        cards.append(_card("Rollout/trainer KL (k3)", None, median(k3), "number", f"median · greatest {max(k3):.2g}"))
    if speed := [value for _, value in _points(lines, "perf/throughput")]:
        cards.append(_card("Tokens per second", None, median(speed), "count", "median over steps"))
    return cards


def _accuracies(lines: Sequence[MetricLine]) -> list[tuple[str, str]]:
    """Return (label, metric) of the held-out means: the overall ones, or else those of the first few data sources."""
    names = {name for line in lines for name, value in line.values.items() if math.isfinite(value)}
    overall = [n for n in ("eval/acc/greedy", "eval/acc/sampled") if n in names]
    sources = sorted(n for n in names if n.startswith("eval/") and n.endswith(("/acc/greedy", "/acc/sampled")))
    found = overall or sources[:4]
    label = lambda name: " ".join(name.removeprefix("eval/").replace("acc/", "").rsplit("/", 1))  # noqa: E731
    return [(label(name), name) for name in found]


def alarms(run_dir: Path, lines: Sequence[MetricLine], config: Mapping[str, Any], note: Note) -> list[dict[str, Any]]:
    """Return the recorded alarms (events of kind `alarm`) and those of the metrics, one entry per name and unbroken
    range of steps."""
    section = lookup(config, "health")
    section = section if isinstance(section, Mapping) else {}
    limits = HealthLimits(**{key: section[key] for key in HealthLimits.__dataclass_fields__ if key in section})
    found = [(lines[i].step, alarm) for i, alarm in scan([line.values for line in lines], limits)]
    seen = {(step, alarm.name) for step, alarm in found}
    recorded = [(event.step, Alarm(**{"metric": "", **event.data})) for event in read_events(run_dir, {"alarm"}, note)]
    found += [(step, alarm) for step, alarm in recorded if (step, alarm.name) not in seen]
    place = {line.step: i for i, line in enumerate(lines)}
    out: list[dict[str, Any]] = []
    running: dict[str, dict[str, Any]] = {}
    for step, alarm in sorted(found, key=lambda entry: (entry[0], entry[1].level, entry[1].name)):
        entry = running.get(alarm.name)
        if entry and entry["level"] == alarm.level and place.get(step, step) - place.get(entry["last"], step) <= 1:
            entry.update(last=step, message=alarm.message, count=entry["count"] + 1)
        else:
            running[alarm.name] = {**asdict(alarm), "first": step, "last": step, "count": 1}
            out.append(running[alarm.name])
    return out[-MAX_ALARMS:]


def _points(lines: Sequence[MetricLine], name: str) -> list[tuple[int, float]]:
    found = [(line.step, line.values[name]) for line in lines if name in line.values]
    return [(step, value) for step, value in found if math.isfinite(value)]


def _card(label: str, before: float | None, after: float, form: str, note: str, better: str = "") -> dict[str, Any]:
    start = None if before is None else number(before)
    return {"label": label, "before": start, "after": number(after), "form": form, "note": note, "better": better}
