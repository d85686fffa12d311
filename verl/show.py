"""`verl show` and `verl export`: print tables, configurations and run directories, and export checkpoints."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.table import Table

from verl.errors import Refused


def show(args: Sequence[str]) -> int:
    if not args:
        words = "algorithms | algorithm=NAME | keys | recipes | config [SECTION|KEY ...] [key=value ...]"
        raise Refused(f"verl show RUN [RUN ...] | RUN trajectory=ID | RUN cluster_file=FILE | --live RUN | {words}")
    first, rest = args[0], args[1:]
    if first.startswith("algorithm="):
        _algorithm(first.partition("=")[2], rest)
    elif first in WORDS:
        WORDS[first](rest)
    else:
        _runs(args)
    return 0


def _recipes(args: Sequence[str]) -> None:
    from verl.config.load import recipe_names

    print("\n".join(recipe_names()))


def _config(args: Sequence[str]) -> None:
    """Print the keys of a first run, then all keys with the origin of each value; for named sections and keys, print
    their meaning."""
    from verl.config.help import named_keys, render_keys
    from verl.config.load import dump_config, load_config
    from verl.config.schema import FIRST_RUN
    from verl.config.tree import text_of, values_of

    words = [a for a in args if "=" not in a]
    args = [a for a in args if a not in words]
    keys = named_keys(words)
    given = any(a.partition("=")[0] in ("model.path", "recipe", "actor_rollout_ref.model.path") for a in args)
    resolved = load_config(args if given else [*args, "model.path=MODEL_FOLDER"])
    values = values_of(resolved.config)
    if keys:
        print(render_keys(keys, values, resolved.origins))
        return
    lines = [f"#   {key}={text_of(values[key])}" for key in FIRST_RUN]
    print("\n".join(["# The keys of a first run; every other one has a default that fits.", *lines, ""]))
    print(dump_config(resolved))


def _live(args: Sequence[str]) -> None:
    from verl.report.live import serve_page

    if not args:
        raise Refused("verl show --live RUN [port=8000]")
    port = next((int(a.partition("=")[2]) for a in args[1:] if a.startswith("port=")), 0)
    serve_page(Path(args[0]), port)


def _algorithms(args: Sequence[str]) -> None:
    from verl.algorithms.presets import PRESETS
    from verl.algorithms.specs import short

    table = Table("name", "estimator", "loss", "aggregation", "source", box=None)
    for name, preset in PRESETS.items():
        loss = preset.loss
        table.add_row(name, short(preset.estimator.fn), short(loss.fn), loss.aggregation, preset.source)
    Console(width=140).print(table)


def _algorithm(name: str, overrides: Sequence[str]) -> None:
    from verl.algorithms.meanings import MEANINGS
    from verl.algorithms.presets import altered_settings, find, knobs, settled
    from verl.algorithms.specs import GDPO
    from verl.config.load import load_config

    resolved = load_config([f"algorithm.name={name}", *overrides, "model.path=MODEL_FOLDER"])
    preset, given = find(name), resolved.config.algorithm.given()
    needed: dict[str, Any] = {}  # values that a run must have; a fitting one is shown
    if isinstance(preset.estimator, GDPO):
        needed["reward_components"] = ["COMPONENT", "COMPONENT"]
    table = Table("algorithm.", "value", "from", "what", box=None)
    of_paper = {"estimator", "loss", *altered_settings(preset)}
    filled = {key for key in given if resolved.origins.get(f"algorithm.{key}", "").startswith("default")}
    for key, value in settled(name, {**needed, **given}).settings().items():
        where = "needed" if key in needed and key not in given else "paper" if key in of_paper else "preset"
        where = "given" if key in given and key not in filled else where
        path = f"options.{key}" if knobs().get(key) else key
        table.add_row(path, str(value), where, MEANINGS.get(key, ""))
    print(f"{name}: {preset.source}")
    Console(width=max(160, Console().width)).print(table)
    origins = "paper: the algorithm's own · preset: as in every algorithm · given: on this command line"
    print(f"{origins} · needed: a run has to give it")


def _keys(args: Sequence[str]) -> None:
    from verl.config.compat.table import keys_table

    table = Table("verl's key", "action", "what happens", box=None)
    for row in keys_table():
        table.add_row(*row)
    Console(width=160).print(table)


def _timeline(path: Path, trajectory: str) -> None:
    """Print the events `turn` and `tool` of one trajectory with several turns."""
    from verl.track.events import read_events

    every = [event for event in read_events(path, {"turn", "tool"})]
    found = sorted((e for e in every if e.data["trajectory"] == trajectory), key=lambda e: e.data["start_s"])
    if not found:
        some = ", ".join(dict.fromkeys(e.data["trajectory"] for e in every[-200:])) or "none"
        raise Refused(f"{path} has no turns of trajectory={trajectory}; the last ones with several: {some[:400]}")
    end_s = max(e.data["start_s"] + e.data.get("took_s", 0.0) for e in found)
    table = Table("what", "start, s", "took, s", "", "details", title=f"{trajectory}, step {found[0].step}", box=None)
    for event in found:
        data = dict(event.data)
        start_s, took_s = data.pop("start_s"), data.pop("took_s", 0.0)
        del data["trajectory"]
        first, width = (int(40 * x / max(end_s, 1e-9)) for x in (start_s, took_s))
        details = ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in data.items() if v != "")
        bar = " " * first + ("█" if event.kind == "turn" else "░") * max(1, width)
        table.add_row(event.kind, f"{start_s:.3f}", f"{took_s:.3f}", bar, details)
    Console(width=150).print(table)


def _beside(path: Path, cluster_file: str) -> None:
    """Print what a cluster file predicts for a run, beside what was measured."""
    from verl.planner.beside import beside
    from verl.planner.hardware import read_cluster

    print("\n\n".join(beside(path, at) for at in read_cluster(Path(cluster_file))))


def _runs(args: Sequence[str]) -> None:
    """Print the steps of one run, or of several side by side; with trajectory=ID, the timeline of that trajectory."""
    from verl.planner.recorded import recorded_page
    from verl.report.data import is_run_dir
    from verl.report.page import write_report
    from verl.report.table import print_runs

    paths = [Path(a) for a in args if "=" not in a or Path(a).exists()]
    options = [a.partition("=") for a in args if Path(a) not in paths]
    for path in paths:
        if not is_run_dir(path):
            known = ", ".join(WORDS)
            raise Refused(f"{path} is not a run directory (no metrics.jsonl) and not a word of verl show ({known})")
    known_options: Mapping[str, Callable[[Path, str], None]] = {"trajectory": _timeline, "cluster_file": _beside}
    if unknown := [key for key, _, _ in options if key not in known_options]:
        raise Refused(f"verl show RUN has no option {unknown[0]}=: it takes {'=, '.join(known_options)}=, or more runs")
    if options:
        key, _, value = options[-1]
        if len(paths) > 1:
            raise Refused(f"{key}={value} is shown of one run")
        return known_options[key](paths[0], value)
    noted = dict[str, None]()  # the table and the report read the same files
    print_runs(paths, note=lambda text: noted.setdefault(text))
    for path in paths:
        if page := recorded_page(path):
            print(page)
    reports = [write_report(path, lambda text: noted.setdefault(text)) for path in paths]
    for text in noted:
        print(f"warning: {text}", file=sys.stderr)
    for report in reports:
        print(f"report: {report}")


WORDS: Mapping[str, Callable[[Sequence[str]], None]] = MappingProxyType(
    {"--live": _live, "algorithms": _algorithms, "keys": _keys, "recipes": _recipes, "config": _config}
)


def export(source: Path, out: Path) -> int:
    """Write the complete Hugging Face folder of a checkpoint (the latest valid one of a run). Under LoRA it is that of
    the adapter."""
    folder = _exported(source, out)
    shutil.copytree(folder, out, dirs_exist_ok=True)
    print(f"{folder} -> {out}")
    return 0


def export_merged(source: Path, out: Path, dtype: str) -> int:
    """Write the adapter of a checkpoint, of a run's latest one, or of a folder, merged into its base."""
    from verl.config.adapter import is_adapter
    from verl.model_engine.merging import DTYPES, write_merged

    if dtype not in DTYPES:
        raise Refused(f"--dtype={dtype}: one of {', '.join(DTYPES)}")
    folder = _exported(source, out) if not is_adapter(source) else source
    base = write_merged(folder, _empty(out), dtype)
    print(f"{folder} merged into {base} -> {out}")
    return 0


def _empty(out: Path) -> Path:
    if out.exists() and any(out.iterdir()):
        raise Refused(f"{out} is not empty; choose another folder")
    return out


def _exported(source: Path, out: Path) -> Path:
    """Return the Hugging Face folder of a checkpoint, or of a run's latest valid one, and print what is wrong with the
    checkpoints of the run. Raise ValueError if there is none, or if `out` is not empty."""
    folder = source / "hf"
    if not folder.is_dir():
        from verl.checkpoint.latest import beyond, find_latest
        from verl.track.events import read_events

        if not (source / "checkpoints").is_dir():
            raise Refused(f"{source} is neither a run directory nor a checkpoint (no checkpoints/, no hf/)")
        found, notes = find_latest(source)
        if found is None:
            raise Refused("\n".join([*notes, f"{source} has no valid checkpoint"]))
        wanted = [e.data["total_steps"] for e in read_events(source, {"resumed"})][-1:]
        step = int(found.name.removeprefix("step_"))
        for total in wanted:
            notes += beyond(source, step, total) or ([f"step {step} of {total}: not its end"] if step < total else [])
        print("\n".join(notes), end="\n" if notes else "")
        folder = found / "hf"
    _empty(out)
    return folder
