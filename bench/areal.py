"""The planner's seconds of synchronous and asynchronous runs beside those of AReaL, and what other texts leave open.

    python bench/areal.py

The one free number is the mean length of the answers, which no text gives: each row is predicted for several.
Writes its part of bench/RESULTS.md (bench/sections/areal.md).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import yaml

from bench.mapping import model_size
from bench.report import write_section
from bench.results import Table
from verl.driver.scheduler import Scheduler
from verl.planner.hardware import Device, Nodes
from verl.planner.latency import Division, ModelSize, StepWork, Stored, update_s
from verl.planner.simulate import Decoding, Simulated, Workload, lognormal, simulate

PUBLISHED = Path(__file__).parent / "published" / "areal.yaml"
SHAPES = Path(__file__).parent / "published" / "shapes.yaml"
PUBLISHES = 14
WARM = 8
"""Publishes that do not count: answers of the start have all been trained by then."""
STEPS = 1000
"""The steps of the published hours."""


def run_of(
    page: Mapping[str, Any], name: str, nodes: int, mean_tokens: float, *, ahead: bool, interruptible: bool = True
) -> Simulated:
    """Return the simulated run of a model. ahead: a part of the devices generates while the others train."""
    work, model = page["work"], model_size(page["models"][name])
    at = Nodes(
        device=Device(**page["device"]),
        nodes=nodes,
        devices_per_node=page["devices_per_node"],
        network_gbs=page["network_gbs"],
    )
    generate = int(at.devices * page["rollout_share"]) if ahead else at.devices
    train = at.devices - generate if ahead else at.devices
    # while they are decoded, long answers count for longer: their mean context is that of answers weighted by length
    context = work["prompt_tokens"] + mean_tokens * math.exp(page["sigma"] ** 2) / 2
    token = 2 * model.kv_values * context / at.device.read
    scheduler = Scheduler(
        prompts_per_step=work["prompts_per_step"],
        total_steps=PUBLISHES + 3 + work["staleness"],
        staleness=work["staleness"] if ahead else 0,
    )
    of = Workload(
        replicas=generate,
        sequences=256,
        samples_per_prompt=work["samples_per_prompt"],
        lengths=lognormal(mean_tokens, page["sigma"], work["most_tokens"]),
        decoding=Decoding(
            base_s=2 * model.parameters / at.device.read + page["overhead_s"],
            sequence_s=max(token, model.forward_flops(context) / at.device.flops(model.hidden)),
        ),
        update_s=_update_s(page, model, at, train, mean_tokens),
        shared=not ahead,
        partial_rollout=ahead and interruptible,
        resume_s=context * model.forward_flops(context / 2) / at.device.flops(model.hidden),
    )
    return simulate(scheduler, of, publishes=PUBLISHES, warm=WARM)


def _update_s(page: Mapping[str, Any], model: ModelSize, at: Nodes, devices: int, mean_tokens: float) -> float:
    of = page["work"]
    work = StepWork(
        sequences=of["prompts_per_step"] * of["samples_per_prompt"],
        prompt_tokens=of["prompt_tokens"],
        response_tokens=mean_tokens,
        updates=of["updates"],
        micro_tokens=32768,
    )
    return update_s(model, Division(1, 1, devices), at, work, Stored())


def rows_of(page: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the cells of the table: each published row for each mean."""
    cells = list[tuple[str, ...]]()
    for row in page["rows"]:
        wanted = row["sync_h"] / row["async_h"]
        for mean in page["mean_tokens"]:
            both = [run_of(page, row["model"], row["nodes"], mean, ahead=ahead).period_s for ahead in (False, True)]
            hours = [f"{STEPS * s / 3600:.1f}" for s in both]
            ratio = both[0] / both[1]
            published = [f"{row['sync_h']:g}", f"{row['async_h']:g}", f"{wanted:.2f}"]
            error = f"{ratio / wanted - 1:+.0%}"
            cells.append((row["model"], f"{8 * row['nodes']}", f"{mean:,}", *hours, f"{ratio:.2f}", *published, error))
    return cells


def gain_of(page: Mapping[str, Any], name: str, mean_tokens: float, share: float) -> float:
    """Return what requests that continue under new weights gain in trained tokens per second, if this share of the
    devices generates."""
    of = {**page, "rollout_share": share}
    with_it, without = (
        run_of(of, name, page["interruptible"]["nodes"], mean_tokens, ahead=True, interruptible=on).tokens_per_s
        for on in (True, False)
    )
    return with_it / without - 1


def gains_of(page: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the cells of the table of interruptible generation: each mean, with the published division of the devices
    and with others."""
    return [
        (
            name,
            f"{mean:,}",
            *(f"{gain_of(page, name, mean, share):+.0%}" for share in page["interruptible"]["shares"]),
            f"{published:+.0%}",
        )
        for name, published in page["interruptible"]["gains"].items()
        for mean in page["mean_tokens"]
    ]


def _shapes() -> list[dict[str, Any]]:
    return list(yaml.safe_load(SHAPES.read_text()))


HEAD = (
    *("model", "devices", "mean tokens", "sync, h", "async, h", "ratio"),
    *("sync, published", "async, published", "ratio, published", "error"),
)


def main(argv: Sequence[str]) -> int:
    page = yaml.safe_load(PUBLISHED.read_text())
    table = Table("1,000 steps of AReaL", HEAD, tuple(rows_of(page)))
    shares = (f"{share:.1%} generate" for share in page["interruptible"]["shares"])
    head = ("model", "mean tokens", *shares, "published")
    gains = Table("Throughput by requests that continue under new weights", head, tuple(gains_of(page)))
    about = (
        "Command: `python bench/areal.py`. The paper does not say how long the answers are, on "
        "which both times depend: each row is predicted for several means. A mean of 5,500 tokens gives the factors "
        "of both models. The gain of requests that continue is given for four nodes, without the division of the "
        "devices and the lengths there: it is 0 where the trainer is the slower side, and mostly more than was "
        "measured where the rollout is, since a publish otherwise waits for the longest of all requests while none "
        "begins."
    )
    named = ("system", "factor", "against", "why it is not predicted", "source")
    cells = [tuple(str(one[key]) for key in ("system", "factor", "against", "open", "source")) for one in _shapes()]
    others = Table("Factors that the texts do not determine", named, tuple(cells))
    parts = (about, table.markdown(), gains.markdown(), others.markdown())
    print(*parts, sep="\n\n")
    write_section("areal", "## Asynchronous runs beside AReaL's", *parts)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
