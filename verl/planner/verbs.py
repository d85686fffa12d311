"""`verl plan` and `verl simulate` behind the command line: their own arguments, and what they print."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import yaml

from verl.config.devices import colocated, on_cuda
from verl.config.load import Resolved
from verl.config.schema import Config
from verl.config.validate import validate
from verl.errors import Refused
from verl.planner.card import supposed_card
from verl.planner.checkpointing import left_to_placement, settle_checkpointing
from verl.planner.clock import pace_of
from verl.planner.fitting import best_placements, smallest_cluster
from verl.planner.grid import Point, combinations, grid_table, played, point_of, write_trace
from verl.planner.hardware import read_cluster
from verl.planner.latency import StepWork
from verl.planner.learned import learned_file
from verl.planner.placement import AIMS, PlacedRun, on_devices, paced, work_of
from verl.planner.placement_text import as_data, render
from verl.planner.plan import make_plan
from verl.planner.simulate import Lengths, lognormal
from verl.planner.text import card_line, pace_line, render_plan
from verl.planner.what_if import (
    DECODING,
    RESUME,
    SHAPE,
    TIMES,
    WAITS,
    RecordedRun,
    Replayed,
    few_lengths,
    lengths_of,
    measured_by,
    neighbours,
    not_counted,
    replayed,
    simulated_run,
    table,
    workload_of,
)
from verl.workers import host

PLACEMENT = ("cluster_file", "aim", "mean_tokens", "sigma", "deadline_s", *WAITS)
"""Arguments of `verl plan` about the placement of roles on a cluster."""
GRID_PUBLISHES = 12
"""Publishes of each point of a grid, of which the first two do not count."""
STEP_TIMES = ("rollout_s", "update_s")
PLAN = (*STEP_TIMES, "card_gib", "json", *PLACEMENT)
"""The arguments of `verl plan` that are no keys of a run."""
PRICES = ("price_per_hour", "trainer_price_per_hour")
"""The prices of a replica of the rollout, and of the devices that train."""
SIMULATE = (*TIMES, *WAITS, RESUME, *SHAPE, *PRICES, "from", "steps_ahead", "json", "grid", "trace")
"""Those of `verl simulate`."""


def print_learned(args: Sequence[str]) -> int:
    """Print the cluster file with the figures that agree with measured runs: `verl plan learn=RUN cluster_file=FILE`.
    Several runs are given as [A,B]."""
    given = dict(arg.partition("=")[::2] for arg in args)
    if {*given} != {"learn", "cluster_file"}:
        other = next((key for key in given if key not in ("learn", "cluster_file")), None)
        raise Refused(f"verl plan learn=RUN cluster_file=FILE{'' if other is None else f' takes no {other}='}")
    runs = [Path(name.strip()) for name in given["learn"].strip("[]").split(",")]
    print(learned_file(runs, Path(given["cluster_file"])), end="")
    return 0


def print_plan(resolved: Resolved, given: Mapping[str, str]) -> int:
    """Print the plan of a run, and its placement on the cluster of a file if one is given."""
    as_json = _wants_json(given)
    validate(resolved.config)
    times_s = [_number(key, given[key], "the seconds of one step") for key in STEP_TIMES if key in given]
    if len(times_s) == 1:
        raise Refused("give both times of a step: rollout_s=SECONDS update_s=SECONDS")
    card = None
    if "card_gib" in given:
        card = supposed_card(_number("card_gib", given["card_gib"], "the GiB of memory of a card"))
    has = card.free_bytes if card is not None else None if on_cuda(resolved.config) else host.total_bytes()
    given_run = resolved
    if card is None and "cluster_file" in given:
        resolved, line = left_to_placement(resolved)
    else:
        resolved, line = settle_checkpointing(resolved, has)
    config = resolved.config
    made, pace = make_plan(config), pace_of(config, *times_s) if times_s else None
    card_text = None if card is None else card_line(config, made, card)
    if as_json:
        found = _placed(given_run, given)
        placed = None if found is None else as_data(*found)
        _print_json({"plan": made, "pace": None if pace is None else asdict(pace), "placements": placed})
        return 0
    print(render_plan(made) + (f"\n{line}\n" if line else ""))
    if card_text is not None:
        print(card_text)
    if pace is not None:
        print(pace_line(config, pace))
    if (found := _placed(given_run, given)) is not None:
        print(render(*found))
        if "deadline_s" in given and found[1][0].seconds(config) > float(given["deadline_s"]):
            print("the simulated step is longer than deadline_s: its formula has no tail of long answers and no waits")
    return 0


def _placed(resolved: Resolved, given: Mapping[str, str]) -> tuple[Config, list[PlacedRun], StepWork] | None:
    """Return the configuration on the devices of the cluster of a file, its placements, best first, and the work of a
    step; None without a file. Keys of the command line keep their values."""
    if not (named := [key for key in PLACEMENT if key in given]):
        return None
    if "cluster_file" not in given:
        raise Refused(f"{named[0]}={given[named[0]]} is of a placement: give cluster_file=FILE too")
    if (aim := given.get("aim", AIMS[0])) not in AIMS:
        raise Refused(f"aim={aim}: {' or '.join(AIMS)}")
    mean, cluster = given.get("mean_tokens"), read_cluster(Path(given["cluster_file"]))
    config = on_devices(resolved.config, cluster)
    own = [key for key, origin in resolved.origins.items() if origin == "command line"]
    work = work_of(config, None if mean is None else _number("mean_tokens", mean, "the tokens of a mean answer"))
    reward_s, tool_calls, tool_s = (_number(key, given.get(key, "0"), zero=True) for key in WAITS)
    work = replace(work, reward_s=reward_s, tool_calls=tool_calls, tool_s=tool_s)
    if "deadline_s" in given:
        if "aim" in given:
            raise Refused(f"aim={aim} and deadline_s={given['deadline_s']}: give one; with a deadline it is the size")
        deadline_s = _number("deadline_s", given["deadline_s"], "the seconds that a step may take")
        found = smallest_cluster(config, cluster, work, deadline_s, own)
    else:
        found = best_placements(config, cluster, work, aim, own)
    if "sigma" in given or not colocated(config):
        sigma = _number("sigma", given.get("sigma", "0"), "of the logarithm of the lengths of answers", zero=True)
        lengths = lognormal(work.response_tokens, sigma, config.rollout.max_response_tokens)
        found = paced(config, found, work, lengths)
    return config, found, work


def print_simulated(resolved: Resolved, given: Mapping[str, str]) -> int:
    """Print the pace of a run, and with devices of its own for the rollout that of other staleness too."""
    as_json, config = _wants_json(given), resolved.config
    validate(config)
    if "from" in given and (twice := [key for key in SHAPE if key in given]):
        raise Refused(f"{twice[0]}={given[twice[0]]} and from={given['from']}: the lengths are those of the run")
    decoding = not any(key in given for key in DECODING)  # both of the run, or none
    found = measured_by(Path(given["from"]), decoding=decoding) if "from" in given else None
    wanted, known = [*TIMES, *WAITS, *(SHAPE if found is None else ())], _known(found)
    if missing := [key for key in wanted if key not in given and key not in known]:
        raise Refused(f"{', '.join(missing)}: not given (verl simulate --help)")
    numbers = {
        key: _number(key, given.get(key) or known[key], zero=key not in ("token_s", "mean_tokens")) for key in wanted
    }
    if "steps_ahead" in given and found is None:
        raise Refused(f"steps_ahead={given['steps_ahead']} is of from=RUN, a run with answers that grew")
    ahead = _number("steps_ahead", given["steps_ahead"], zero=True) if "steps_ahead" in given else None
    lengths = lengths_of(config, [numbers[key] for key in SHAPE if key in numbers], found, ahead)
    line = "\n".join(filter(None, (not_counted(config), few_lengths(found), _free_resumes(config, given))))
    of_run = {key: number for key, number in numbers.items() if found is not None and key not in given}
    numbers[RESUME] = _number(RESUME, given.get(RESUME, "0"), zero=True)
    if "grid" in given:
        if "trace" in given:
            raise Refused(f"trace={given['trace']} and grid=: a trace is of one run")
        points = _grid(resolved, given, partial(_point_pace, times=numbers, lengths=lengths))
        data, text = {"points": [asdict(one) for one in points]}, grid_table(points)
    else:
        prices = _prices(given)
        runs = [(one, replayed(one, workload_of(one, numbers, lengths))) for one in neighbours(config)]
        data, text = {"runs": [_run_data(one, got, prices) for one, got in runs]}, table(config, runs, prices)
    if "trace" in given:
        write_trace(Path(given["trace"]), simulated_run(config, workload_of(config, numbers, lengths)))
    if as_json:
        _print_json({**data, "not_counted": line, "of_run": of_run})
        return 0
    taken = " ".join(f"{key}={number:.4g}" for key, number in of_run.items())
    print("\n".join(filter(None, (text, line, taken and f"from={given['from']}: {taken}"))))
    return 0


def _prices(given: Mapping[str, str]) -> tuple[float, float]:
    """Return the prices per hour of a replica and of the trainer, 0 where they are not given."""
    rollout, trainer = (_number(key, given.get(key, "0"), "of a device, per hour", zero=True) for key in PRICES)
    return rollout, trainer


def _run_data(config: Config, got: Replayed, prices: tuple[float, float]) -> dict[str, Any]:
    """Return the figures of a simulated run with their errors."""
    data = {"pipeline.staleness": config.pipeline.staleness, **got.as_data()}
    point = point_of({}, config, got, prices)
    if point.price:
        data |= {"price": point.price, "price_per_million_tokens": point.price_per_million_tokens}
        data["errors"] |= {"price": point.price_error, "price_per_million_tokens": point.price_per_million_error}
    return data


def _free_resumes(config: Config, given: Mapping[str, str]) -> str:
    """Return a line about requests that continue after a publish without the time for it, or ""."""
    if RESUME in given or not (config.pipeline.partial_rollout or "partial_rollout" in given.get("grid", "")):
        return ""
    return f"not counted: keys and values computed anew after a publish (pipeline.partial_rollout); {RESUME} has them"


def _known(found: RecordedRun | None) -> dict[str, str]:
    """Return the numbers of a simulation that need not be given: those of a run, if there is one."""
    if found is None:
        return {"publish_s": "0", **dict.fromkeys(WAITS, "0")}
    of_run = {"update_s": found.update_s, "publish_s": found.publish_s, **found.waits}
    if found.decoding is not None:
        of_run |= {"token_s": found.decoding.base_s, "sequence_s": found.decoding.sequence_s}
    return {name: str(number) for name, number in of_run.items()}


def _point_pace(config: Config, times: Mapping[str, float], lengths: Lengths) -> Replayed:
    """Return the pace of a point of a grid."""
    return replayed(config, workload_of(config, times, lengths), GRID_PUBLISHES)


def _grid(resolved: Resolved, given: Mapping[str, str], pace: Callable[[Config], Replayed]) -> list[Point]:
    """Return the points of a grid with their pace. Raise Refused for a key that the command line has too."""
    try:
        grid = yaml.safe_load(given["grid"])
    except yaml.YAMLError:
        grid = None
    if not isinstance(grid, dict) or not grid:
        raise Refused(f"grid={given['grid']}: {{KEY: [VALUES], ...}} is expected: grid='{{rollout.replicas: [1, 2]}}'")
    if twice := [key for key in grid if resolved.origins.get(key) == "command line"]:
        raise Refused(f"grid: {twice[0]} is on the command line too: leave it out, or out of the grid")
    prices = _prices(given)
    points = combinations(resolved.config, grid)
    paces = played([one for _, one in points], pace)
    return [point_of(values, one, got, prices) for (values, one), got in zip(points, paces)]


def _wants_json(given: Mapping[str, str]) -> bool:
    """Return True with json=true. Raise Refused for another value."""
    if given.get("json", "true") != "true":
        raise Refused(f"json={given['json']}: true, or leave it out")
    return "json" in given


def _print_json(data: Mapping[str, Any]) -> None:
    print(msgspec.json.format(msgspec.json.encode(data), indent=2).decode())


def _number(key: str, text: str, meaning: str = "a number", *, zero: bool = False) -> float:
    """Return a number above 0, or with `zero` of 0 or more."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf or (number == 0 and not zero):
        raise Refused(f"{key}={text}: {meaning}, {'0 or more' if zero else 'above 0'}")
    return number
