"""What the report shows, as plain JSON values: read from the run directory, reduced to what a page can carry."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from omegaconf import OmegaConf

from verl.config.schema import HealthConfig
from verl.report.samples import SamplePicker
from verl.track.events import read_events
from verl.track.health import scan
from verl.track.metrics import PHASES, MetricLine, phase_order, read_metrics, read_units

CONFIG_FILE = "config.yaml"
MAX_POINTS = 1200
"""Points of one curve on the page; beyond it the least and the greatest of each stretch are kept."""
MAX_BARS = 180
"""Bars of the time chart; beyond it each bar is the mean of a stretch of steps."""
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


class RunReader:
    """Reads one run directory again and again while it grows; samples that did not change are not decoded twice."""

    def __init__(self, run_dir: Path) -> None:
        if not is_run_dir(run_dir):
            raise ValueError(
                f"{run_dir} is not a run directory: it has neither metrics.jsonl, {CONFIG_FILE} nor events/"
            )
        self.run_dir = run_dir
        self._config = read_config(run_dir)
        self._picker = SamplePicker(run_dir, _tokenizer_folders(self._config))

    def version(self) -> str:
        """Changes whenever something that the page shows was written."""
        stamps = []
        for folder in (self.run_dir, self.run_dir / "samples", self.run_dir / "events"):
            for path in sorted(folder.iterdir()) if folder.is_dir() else ():
                if path.is_file() and not path.name.startswith(".") and path.suffix != ".html":
                    about = path.stat()
                    stamps.append((path.name, about.st_size, about.st_mtime_ns))
        return f"{hash(tuple(stamps)) & (2**64 - 1):016x}"

    def payload(self) -> dict[str, Any]:
        lines = read_metrics(self.run_dir)
        last_step = lines[-1].step if lines else None
        return {
            "run": self._about(lines),
            "highlights": highlights(self._config),
            "config": OmegaConf.to_yaml(OmegaConf.create(dict(self._config))) if self._config else "",
            "summary": summary(lines),
            "series": series(lines, read_units(self.run_dir)),
            "time": time_ledger(lines),
            "alarms": alarms(self.run_dir, lines, self._config),
            "resumes": resumes(lines),
            "samples": self._picker.pick(last_step),
        }

    def _about(self, lines: Sequence[MetricLine]) -> dict[str, Any]:
        planned = lookup(self._config, "run.total_steps")
        return {
            "name": str(lookup(self._config, "run.name") or self.run_dir.resolve().name),
            "folder": str(self.run_dir),
            "written": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
            "steps": lines[-1].step if lines else 0,
            "planned": planned if isinstance(planned, int) else None,
            "attempts": len({line.attempt for line in lines}),
            "wall_s": number(busy_seconds(lines)),
        }


def is_run_dir(path: Path) -> bool:
    return (path / "metrics.jsonl").is_file() or (path / CONFIG_FILE).is_file() or (path / "events").is_dir()


def read_config(run_dir: Path) -> Mapping[str, Any]:
    """config.yaml as nested mappings; a leaf written as {value, origin} stands for its value."""
    path = run_dir / CONFIG_FILE
    if not path.exists():
        return {}
    tree = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    plain = _values_only(tree)
    return plain if isinstance(plain, dict) else {}


def lookup(config: Mapping[str, Any], key: str) -> Any:
    node: Any = config
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return None
        node = node[part]
    return node


def highlights(config: Mapping[str, Any]) -> list[dict[str, str]]:
    found = [(label, key, lookup(config, key)) for label, key in HIGHLIGHTS]
    return [{"label": label, "key": key, "value": str(value)} for label, key, value in found if value is not None]


def number(value: float) -> float | None:
    """Six significant digits; null for what JSON cannot hold."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def busy_seconds(lines: Sequence[MetricLine]) -> float:
    """Seconds of all steps; without step times, from the first line to the last one."""
    steps = [line.values["perf/time_per_step"] for line in lines if "perf/time_per_step" in line.values]
    if steps:
        return sum(s for s in steps if math.isfinite(s))
    return lines[-1].time_s - lines[0].time_s if lines else 0.0


def series(lines: Sequence[MetricLine], units: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Every metric as {x: steps, y: values or null, unit}; `thinned` where points were left out."""
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
    """At most about `limit` of the points: first, last, and the extremes of equal stretches, so that spikes stay."""
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
    """Seconds by phase: the totals of the run, and one bar per step (or the mean of a stretch of steps)."""
    prefix = "timing_s/"
    timed: list[tuple[int, dict[str, float]]] = []
    for line in lines:
        seconds = {name.removeprefix(prefix): s for name, s in line.values.items() if name.startswith(prefix)}
        seconds.pop("step", None)  # verl's name for the whole step is no phase
        if seconds:
            timed.append((line.step, {name: s for name, s in seconds.items() if math.isfinite(s) and s > 0}))
    phases = phase_order({name for _, seconds in timed for name in seconds})
    bars = []
    stride = max(1, math.ceil(len(timed) / MAX_BARS))
    for i in range(0, len(timed), stride):
        stretch = timed[i : i + stride]
        parts = [number(sum(seconds.get(name, 0.0) for _, seconds in stretch) / len(stretch)) for name in phases]
        bars.append({"from": stretch[0][0], "to": stretch[-1][0], "parts": parts})
    totals = [number(sum(seconds.get(name, 0.0) for _, seconds in timed)) for name in phases]
    return {"phases": phases, "known": list(PHASES), "totals": totals, "bars": bars}


def resumes(lines: Sequence[MetricLine]) -> list[dict[str, int]]:
    """Steps at which another attempt took over."""
    return [
        {"step": line.step, "attempt": line.attempt}
        for before, line in pairwise(lines)
        if line.attempt != before.attempt
    ]


def summary(lines: Sequence[MetricLine]) -> list[dict[str, Any]]:
    """Before -> after, one card each. Measurements at single steps compare the first with the last; noisy per-step
    numbers compare the mean of the first steps with that of the last ones."""
    cards = []
    for label, name in _accuracies(lines):
        points = _points(lines, name)
        best_step, best = max(((step, value) for step, value in points), key=lambda p: p[1])
        several = len(points) > 1
        span = f"step {points[0][0]} → {points[-1][0]} · best {best:.1%} at step {best_step}"
        note = span if several else f"at step {points[0][0]}"
        cards.append(_card(label, points[0][1] if several else None, points[-1][1], "percent", note, better="up"))
    for label, name, form, better in (
        ("Reward", "critic/score/mean", "number", "up"),
        ("Loss", "train/loss", "number", "down"),
        ("Held-out loss", "eval/loss", "number", "down"),
        ("Entropy", "actor/entropy", "number", ""),
        ("Response length", "response_length/mean", "tokens", ""),
    ):
        values = [value for _, value in _points(lines, name)]
        if values:
            k = max(1, min(5, len(values) // 2))
            note = f"mean of the first and last {k} steps" if k > 1 else "first and last step"
            before = fmean(values[:k]) if len(values) > 1 else None
            cards.append(
                _card(label, before, fmean(values[-k:]), form, note if len(values) > 1 else "one step", better)
            )
    k3 = [value for _, value in _points(lines, "mismatch/k3")]
    if k3:
        cards.append(_card("Rollout/trainer KL (k3)", None, median(k3), "number", f"median · greatest {max(k3):.2g}"))
    speed = [value for _, value in _points(lines, "perf/throughput")]
    if speed:
        cards.append(_card("Tokens per second", None, median(speed), "count", "median over steps"))
    return cards


def _accuracies(lines: Sequence[MetricLine]) -> list[tuple[str, str]]:
    """(label, metric) of the held-out accuracies: the overall ones, or else those of the first few data sources."""
    names = {name for line in lines for name, value in line.values.items() if math.isfinite(value)}
    overall = [n for n in ("eval/acc/greedy", "eval/acc/sampled") if n in names]
    sources = sorted(n for n in names if n.startswith("eval/") and n.endswith(("/acc/greedy", "/acc/sampled")))
    found = overall or sources[:4]
    words = [
        n.removeprefix("eval/").replace("acc/", "").replace("/greedy", " greedy").replace("/sampled", " sampled")
        for n in found
    ]
    return [(f"Held-out accuracy, {word}", name) for word, name in zip(words, found)]


def alarms(run_dir: Path, lines: Sequence[MetricLine], config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Alarms that the run recorded (events of kind `alarm`) and those that its metrics raise, one entry per name and
    unbroken stretch of steps."""
    known = HealthConfig.__dataclass_fields__
    section = lookup(config, "health")
    limits = HealthConfig(**{k: v for k, v in (section or {}).items() if k in known})
    found: list[tuple[int, str, str, str, str]] = [
        (lines[i].step, alarm.level, alarm.name, alarm.message, alarm.metric)
        for i, alarm in scan([line.values for line in lines], limits)
    ]
    seen = {(step, name) for step, _, name, _, _ in found}
    for event in read_events(run_dir, {"alarm"}):
        level, name, message, metric = (str(event.data.get(k, "")) for k in ("level", "name", "message", "metric"))
        if (event.step, name) not in seen:
            found.append((event.step, level or "warn", name or "alarm", message, metric))
    return _stretches(sorted(found), [line.step for line in lines])[-MAX_ALARMS:]


def _stretches(found: Sequence[tuple[int, str, str, str, str]], steps: Sequence[int]) -> list[dict[str, Any]]:
    rank = {step: i for i, step in enumerate(steps)}
    out: list[dict[str, Any]] = []
    running: dict[str, dict[str, Any]] = {}
    for step, level, name, message, metric in found:
        entry = running.get(name)
        if entry and entry["level"] == level and rank.get(step, step) - rank.get(entry["last"], step) <= 1:
            entry.update(last=step, message=message, count=entry["count"] + 1)
            continue
        running[name] = {
            "name": name,
            "level": level,
            "message": message,
            "metric": metric,
            "first": step,
            "last": step,
            "count": 1,
        }
        out.append(running[name])
    return out


def _points(lines: Sequence[MetricLine], name: str) -> list[tuple[int, float]]:
    found = [(line.step, line.values[name]) for line in lines if name in line.values]
    return [(step, value) for step, value in found if math.isfinite(value)]


def _card(label: str, before: float | None, after: float, form: str, note: str, better: str = "") -> dict[str, Any]:
    start = None if before is None else number(before)
    return {"label": label, "before": start, "after": number(after), "form": form, "note": note, "better": better}


def _values_only(node: Any) -> Any:
    if isinstance(node, dict):
        if set(node) == {"value", "origin"}:
            return _values_only(node["value"])
        return {str(key): _values_only(value) for key, value in node.items()}
    return [_values_only(item) for item in node] if isinstance(node, list) else node


def _tokenizer_folders(config: Mapping[str, Any]) -> list[Path]:
    paths = (lookup(config, "model.tokenizer_path"), lookup(config, "model.path"))
    return [Path(path) for path in paths if isinstance(path, str) and path]
