"""The placement of roles on devices: against an exhaustive search, cases computed by hand, and a cluster file."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from handmade_model import write_model, write_rows

from verl.cli import main
from verl.config.cluster import cluster_faults
from verl.config.load import load_config
from verl.errors import Refused
from verl.planner.fitting import best_placements, smallest_cluster
from verl.planner.hardware import DEVICES, Nodes, read_cluster
from verl.planner.latency import (
    Division,
    ModelSize,
    StepWork,
    Stored,
    divisions,
    engine_pace,
    generate_s,
    held_bytes,
    infer_s,
    resharded_bytes,
    summed_s,
    update_s,
)
from verl.planner.mapping import (
    Aim,
    PlannedRole,
    Rules,
    SetTimes,
    Times,
    device_counts,
    partitions,
    placements,
    stages_of,
    step_of,
    times_of,
)
from verl.planner.placement import corners, overrides, paced, planned_roles, rules_of, run_times, seconds_on, work_of
from verl.planner.placement_text import beside_devices
from verl.planner.simulate import lognormal
from verl.planner.verbs import PLACEMENT
from verl.workers.pools import pool_of

SIZE = ModelSize(parameters=8e9, active_parameters=8e9, layers=32, hidden=4096, kv_width=1024)
WORK = StepWork(sequences=256, prompt_tokens=512, response_tokens=512, updates=2)


def nodes(count: int = 1, each: int = 8, *, price: float = 0.0, device: str = "A100-80") -> Nodes:
    return Nodes(device=DEVICES[device], nodes=count, devices_per_node=each, network_gbs=25.0, price_per_hour=price)


def role(name: str, *kinds: str, base: str | None = None) -> PlannedRole:
    stage = {"generate": "answers", "infer": "experience", "train": "update"}
    return PlannedRole(name=name, model=SIZE, calls=tuple((stage[kind], kind) for kind in kinds), base=base)  # type: ignore[misc]


PPO = (role("actor", "generate", "train"), role("critic", "infer", "train"), role("ref", "infer"))


def random_times(names: Sequence[str], cluster: Sequence[Nodes], seed: int) -> Times:
    """Return made-up seconds: not all sets fit, and more devices are not always faster."""
    draw, table = random.Random(seed), dict[tuple[tuple[str, ...], int, int], SetTimes | None]()
    for size in range(1, len(names) + 1):
        for chosen in itertools.combinations(names, size):
            for group, at in enumerate(cluster):
                for devices in device_counts(at):
                    seconds = tuple(draw.uniform(0, 9) / devices**0.5 for _ in range(3))
                    fits = draw.random() < 0.85
                    table[chosen, group, devices] = SetTimes(devices=devices, seconds=seconds) if fits else None
    return lambda roles, group, devices: table[tuple(sorted(roles)), group, devices]


def exhaustive(names: Sequence[str], cluster: Sequence[Nodes], times: Times, cost: bool) -> tuple[float, float] | None:
    """Return the best (seconds, price), or (price, seconds), of all sets on all numbers of devices of all groups."""
    every, found = [(g, n) for g, at in enumerate(cluster) for n in device_counts(at)], list[tuple[float, float]]()
    for sets in partitions(names):
        for chosen in itertools.product(every, repeat=len(sets)):
            used = [sum(n for g, n in chosen if g == group) for group in range(len(cluster))]
            placed = [times(one, g, n) for one, (g, n) in zip(sets, chosen)]
            if any(n > at.devices for n, at in zip(used, cluster)) or any(one is None for one in placed):
                continue
            step_s = sum(max(column) for column in zip(*(one.seconds for one in placed if one is not None)))
            price = step_s * sum(n * at.price_per_hour for n, at in zip(used, cluster)) / 3600
            found.append((price, step_s) if cost else (step_s, price))
    return min(found, default=None)


@pytest.mark.parametrize("cost", [False, True])
def test_the_best_placement_is_that_of_an_exhaustive_search(cost: bool) -> None:
    for seed in range(100):
        count, kinds = 2 + seed % 4, 1 + seed // 4 % 2
        names = [f"role{i}" for i in range(count)]
        cluster = [nodes(1, 8 if kinds == 1 else 4, price=1.0 + 3 * i) for i in range(kinds)]
        times, roles = random_times(names, cluster, seed), [role(name, "infer") for name in names]
        best = exhaustive(names, cluster, times, cost)
        found = placements(roles, cluster, times, "cost" if cost else "time")
        assert (best is None) == (not found)
        if best is not None:
            got = (found[0].price, found[0].step_s) if cost else (found[0].step_s, found[0].price)
            assert got == pytest.approx(best)


def test_every_division_into_sets_is_tried_once() -> None:
    for count, bell in ((0, 1), (1, 1), (2, 2), (3, 5), (4, 15), (5, 52)):
        found = {frozenset(map(frozenset, sets)) for sets in partitions([str(i) for i in range(count)])}
        assert len(found) == len([*partitions([str(i) for i in range(count)])]) == bell


def test_a_step_is_the_sum_over_stages_of_the_slowest_set() -> None:
    table = {("a",): (1.0, 5.0, 0.0), ("b",): (2.0, 1.0, 4.0), ("a", "b"): (3.0, 6.0, 4.0)}
    found = placements(
        [role("a", "infer"), role("b", "infer")],
        [nodes(1, 2)],
        lambda roles, group, devices: SetTimes(devices=devices, seconds=table[tuple(sorted(roles))]),
    )
    assert [(len(one.sets), one.step_s) for one in found] == [(2, 2 + 5 + 4), (1, 3 + 6 + 4)]


def test_a_role_without_weights_of_its_own_is_with_its_base() -> None:
    roles = (*PPO[:2], role("ref", "infer", base="actor"))
    found = placements(roles, [nodes(2)], times_of(roles, [nodes(2)], Rules(work=WORK)))
    assert found and all(any({"actor", "ref"} <= {*one.roles} for one in each.sets) for each in found)


def test_stages_follow_the_calls_and_a_cycle_is_refused() -> None:
    assert stages_of(PPO) == ("answers", "experience", "update")
    back = PlannedRole(name="odd", model=SIZE, calls=(("update", "infer"), ("answers", "infer")))
    with pytest.raises(Refused, match="wait for each other"):
        stages_of((*PPO, back))


def test_more_devices_are_never_slower_and_more_memory_loses_no_placement() -> None:
    last, fitting = math.inf, -1
    for count in (1, 2, 3, 4):
        cluster = [nodes(count)]
        found = placements(PPO, cluster, times_of(PPO, cluster, Rules(work=WORK)))
        assert found[0].step_s <= last
        last = found[0].step_s
    for device in ("A100-40", "A100-80", "H200"):
        found = placements(PPO, [nodes(1, device=device)], times_of(PPO, [nodes(1, device=device)], Rules(work=WORK)))
        assert len(found) >= fitting
        fitting = len(found)
    assert fitting > 0


def test_roles_that_share_devices_fit_together_or_not_at_all() -> None:
    huge = [
        PlannedRole(name=n, model=ModelSize(**{**_fields(SIZE), "parameters": 6e9}), calls=r.calls)
        for n, r in zip("ab", PPO)
    ]
    each = times_of(huge, [nodes(1, 2)], Rules(work=WORK))
    assert each(("b",), 0, 2) is not None and each(("a", "b"), 0, 2) is None


def _fields(size: ModelSize) -> dict[str, float]:
    return {name: getattr(size, name) for name in size.__dataclass_fields__}


def test_the_latencies_of_simple_cases_follow_by_hand() -> None:
    at, one = nodes(), Division(1, 1, 1)
    tokens, device = WORK.sequences * WORK.row_tokens, at.device
    flops = 2 * SIZE.parameters + 2 * SIZE.layers * SIZE.hidden * WORK.row_tokens
    alone = infer_s(SIZE, one, at, WORK, Stored())
    assert alone == pytest.approx(tokens * flops / (1e12 * device.matrix_tflops * device.compute_share))
    assert infer_s(SIZE, Division(1, 1, 8), at, WORK, Stored()) == pytest.approx(alone / 8)
    assert held_bytes(SIZE, Division(2, 1, 4), True, Stored()) == pytest.approx(8e9 / 2 * (2 + 4 + 12 / 4))
    assert held_bytes(SIZE, Division(2, 1, 4), True, Stored(sharded=True)) == pytest.approx(8e9 / 8 * (2 + 4 + 12))
    assert held_bytes(SIZE, Division(2, 2, 1), False, Stored()) == pytest.approx(2 * 8e9 / 4)
    # two nodes, a replica in each: each sends its share of all bytes over the network once
    assert summed_s(SIZE, Division(8, 1, 2), nodes(2), 4.0) == pytest.approx(0.5 * 4 * 8e9 / (25e9 * 0.8))
    assert summed_s(SIZE, Division(4, 1, 2), nodes(1), 4.0) == pytest.approx(0.5 * 4 * 2e9 / (300e9 * 0.8))
    assert summed_s(SIZE, one, at, 4.0) == 0
    more = update_s(SIZE, Division(1, 1, 8), nodes(1), WORK, Stored(sharded=True))
    assert more > update_s(SIZE, Division(1, 1, 8), nodes(1), WORK, Stored())


def test_the_host_of_an_engine_adds_to_a_step_for_each_sequence_on_however_many_devices() -> None:
    at, room = nodes(), 1e12
    slow = replace(at, device=replace(at.device, sequence_us=400))
    for devices in (1, 4):
        one, other = (engine_pace(SIZE, devices, devices, where, WORK, room) for where in (at, slow))
        assert one is not None and other is not None and other.batch == WORK.sequences
        assert other.full_s - one.full_s == pytest.approx(400e-6 * WORK.sequences) and other.empty_s == one.empty_s


def test_tensor_devices_of_an_engine_sum_hidden_values() -> None:
    """By hand, for a ring of four: 3/2 of the values, of each token, for both sums of a layer."""
    at, room = nodes(), 1e12
    without = replace(at, device=replace(at.device, link_gbs=1e9))
    one, free = (engine_pace(SIZE, 4, 4, where, WORK, room) for where in (at, without))
    assert one is not None and free is not None
    token_s = 1.5 * 2 * SIZE.hidden * 2 * SIZE.layers / at.link
    assert one.full_s - free.full_s == pytest.approx(WORK.sequences * token_s, rel=1e-3)
    assert one.prompts_s - free.prompts_s == pytest.approx(WORK.sequences * WORK.prompt_tokens * token_s, rel=1e-3)


@pytest.mark.parametrize(
    ("by", "rate", "free"),
    [
        (Division(1, 2, 1), 300e9 * 0.8, replace(nodes(2), device=replace(DEVICES["A100-80"], link_gbs=1e9))),
        (Division(8, 2, 1), 25e9 * 0.8 / 8, replace(nodes(2), network_gbs=1e9)),
    ],
)
def test_stages_send_hidden_values(by: Division, rate: float, free: Nodes) -> None:
    """By hand: each tensor device of a stage sends its part of the values of each token, in the node or to another."""
    passes, tokens = WORK.passes(WORK.sequences), WORK.sequences * WORK.row_tokens
    sent = 2 * tokens * SIZE.hidden / by.tensor / rate * (passes + 1) / passes
    took = [infer_s(SIZE, by, at, WORK, Stored()) for at in (nodes(2), free)]
    assert took[0] - took[1] == pytest.approx(sent, rel=1e-3)


def test_answers_wait_for_room_and_a_device_without_any_generates_nothing() -> None:
    row_bytes = 2 * SIZE.kv_values * WORK.row_tokens
    whole = generate_s(SIZE, 1, 1, nodes(), WORK, 256 * row_bytes)
    halves = generate_s(SIZE, 1, 1, nodes(), WORK, 128.5 * row_bytes)
    assert whole is not None and halves is not None and whole < halves < 2 * whole
    assert generate_s(SIZE, 1, 1, nodes(), WORK, 0.5 * row_bytes) is None


def test_a_layer_stays_within_a_node_and_no_replica_is_idle() -> None:
    for by in divisions(16, SIZE, nodes(2), sequences=4):
        assert by.devices == 16 and by.tensor <= 8 and by.replicas <= 4 and SIZE.layers % by.pipeline == 0


def test_bytes_between_update_and_answers_are_those_of_the_paper() -> None:
    """Table 2 of HybridFlow: a device gathers what it lacks of its part, not the model."""
    by = Division(8, 1, 2)
    assert resharded_bytes(8e9, by, 2) == pytest.approx(2 * 8e9 * (8 - 2) / (2 * 8))
    assert resharded_bytes(8e9, by, 2, whole=True) == pytest.approx(2 * 8e9 * 7 / 8)
    assert resharded_bytes(8e9, by, 8) == 0


@pytest.mark.parametrize("count", [32, pytest.param(128, marks=pytest.mark.slow)])
def test_many_devices(count: int) -> None:
    roles, began_s = (*PPO, role("reward", "infer")), time.process_time()
    cluster, work = [nodes(count)], StepWork(sequences=8192, prompt_tokens=512, response_tokens=512, updates=1)
    found = placements(roles, cluster, times_of(roles, cluster, Rules(work=work)))
    assert len(found) == 15 and sum(one.times.devices for one in found[0].sets) <= 8 * count
    assert time.process_time() - began_s < 60


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[{device: H1OO}]", "device 'H1OO' is not known"),
        ("[{device: mine, memory_gb: 24}]", "give its bandwidth_gbs, matrix_tflops, link_gbs"),
        ("[{device: Ascend-910B}]", "has no bandwidth_gbs"),
        ("[{device: H100, bandwidth_gbs: 0}]", "bandwidth_gbs=0: a number above 0"),
        ("[{device: H100, nodes: 2}]", "2 nodes without network_gbs"),
        ("[{device: H100, nodes: 1.5}]", "nodes=1.5: a whole number"),
        ("[{device: H100, compute_share: 3}]", "a share is at most 1"),
        ("[{device: H100, spread: 0.5}]", "spread=0.5: a factor of 1 or more"),
        ("[{device: H100, network_gb: 3}]", "'network_gb' is no figure"),
        ("{device: H100}", "a list of node groups"),
        ("[{device: [}]", "no cluster file that can be read"),
    ],
)
def test_a_cluster_file_that_lacks_something_is_refused(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(Refused, match=why):
        read_cluster(path)


def test_a_cluster_file_replaces_figures_and_names_new_devices(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "- {device: H100, nodes: 2, devices_per_node: 8, network_gbs: 50, compute_share: 0.4, price_per_hour: 2.5}\n"
        "- {device: mine, memory_gb: 24, bandwidth_gbs: 900, matrix_tflops: 80, link_gbs: 16}\n"
    )
    first, second = read_cluster(path)
    assert (first.devices, first.price_per_hour, first.device.compute_share) == (16, 2.5, 0.4)
    assert first.device.flops(4096) == pytest.approx(0.4 * 989e12) and first.network == pytest.approx(0.8 * 50e9)
    assert (second.devices, second.device.memory_gb, second.network_gbs) == (1, 24, 16)


# -- a configured run --------------------------------------------------------------------------------------------------

TWO_NODES = "- {device: H100, nodes: 2, devices_per_node: 8, network_gbs: 50, price_per_hour: 2.5}\n"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the arguments of a run with a model of 7B parameters, whose numbers are a sparse file."""
    folder = tmp_path_factory.mktemp("recipe")
    sizes = {"layers": 28, "hidden": 3584, "ffn": 18944, "heads": 28, "kv_heads": 4, "vocab": 152064}
    write_model(folder / "model", **sizes, tied=False)
    rows = write_rows(folder / "rows.jsonl", 500)
    data = [f"data.train_files=[{rows}]", f"data.eval_files=[{rows}]", f"run.root_dir={folder}"]
    return ["recipe=gsm8k_grpo", f"model.path={folder / 'model'}", *data, "model.device=cuda"]


def test_a_plan_as_json_is_what_is_printed(
    recipe: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cluster.yaml").write_text(TWO_NODES)
    args = [*recipe, "algorithm.name=ppo", f"cluster_file={tmp_path / 'cluster.yaml'}", "rollout_s=9", "update_s=5"]
    assert main(["plan", *args]) == 0
    printed = capsys.readouterr().out
    assert main(["plan", *args, "json=true"]) == 0
    found = json.loads(capsys.readouterr().out)
    best, *others = found["placements"]
    assert f"configure {' '.join(best['configure'])}\n" in printed and len(others) == printed.count("slower    ")
    low_s, high_s = best["step_s_range"]
    assert f"about {best['step_s']:.3g} s per step ({low_s:.3g} to {high_s:.3g}), {best['price']:.2f} per" in printed
    low, high = best["price_range"]
    assert (low, high) == pytest.approx([16 * 2.5 * s / 3600 for s in (low_s, high_s)])
    assert f"{best['price']:.2f} per step ({low:.2f} to {high:.2f})" in printed
    columns = zip(*(one["seconds"].values() for one in best["sets"]))
    assert sum(map(max, columns)) == pytest.approx(best["step_s"])
    assert found["plan"]["step"]["prompts"] == 64 and f"{3600 / found['pace']['step_s']:,.1f} steps" in printed
    assert main(["plan", *args, "json=yes"]) == 2
    assert "json=yes: true, or leave it out" in capsys.readouterr().err


@pytest.mark.parametrize(
    "more",
    [
        ("algorithm.name=ppo",),
        ("algorithm.kl_loss_coef=0.001", "mean_tokens=200"),
        ("algorithm.name=grpo", "algorithm.kl_loss_coef=0", "step.updates_per_step=1"),
        ("algorithm.name=ppo", "model.lora.rank=32"),
        ("rollout.engine=vllm", "rollout.python=/usr/bin/python3", "aim=cost"),
    ],
)
def test_what_is_printed_configures_a_run(
    recipe: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...]
) -> None:
    (tmp_path / "cluster.yaml").write_text(TWO_NODES)
    assert main(["plan", *recipe, *more, f"cluster_file={tmp_path / 'cluster.yaml'}"]) == 0
    printed = capsys.readouterr().out
    line = next(line for line in printed.splitlines() if line.startswith("configure "))
    own = [arg for arg in more if arg.partition("=")[0] not in PLACEMENT]
    assert main(["plan", *recipe, *own, *shlex.split(line.removeprefix("configure ")), "cluster.address=auto"]) == 0
    assert "placement" in printed and "slower" in printed
    config = load_config([*recipe, *own]).config
    work = work_of(config, 200.0 if "mean_tokens=200" in more else None)
    aim: Aim = "cost" if "aim=cost" in more else "time"
    found = best_placements(config, read_cluster(tmp_path / "cluster.yaml"), work, aim)
    head = next(line for line in printed.splitlines() if "GiB held" in line)
    assert [name for name in ("rollout, s", "experience, s", "update, s") if name in head] == [
        f"{stage}, s" for stage in stages_of(planned_roles(config))
    ]
    rows = printed.splitlines()[printed.splitlines().index(head) + 1 :][: len(found[0].placement.sets)]
    for line, placed in zip(rows, found[0].placement.sets):
        cells = re.split(r"  +", line.strip())[-len(placed.times.seconds) :]
        assert [cell.split()[0] for cell in cells] == [f"{s:.3g}" if s else "-" for s in placed.times.seconds]


def test_every_placement_of_a_run_configures_it(recipe: list[str]) -> None:
    config = load_config([*recipe, "algorithm.name=ppo"]).config
    at = Nodes(device=DEVICES["H100"], nodes=4, devices_per_node=8, network_gbs=50)
    found = best_placements(config, [at], work_of(config))
    assert len(found) > 5
    for one in found:
        given = [part.strip("'") for part in overrides(config, one)]
        assert not [
            *cluster_faults(
                load_config([*recipe, "algorithm.name=ppo", *given, "cluster.address=auto"]).config, "train"
            )
        ]


def test_latency_host_memory_and_disk_of_a_cluster_file(recipe: list[str], tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "[{device: H100, devices_per_node: 8, link_us: 30, disk_gb: 9},"
        " {device: H100, devices_per_node: 8, disk_gb: 900000, host_memory_gb: 2000}]"
    )
    small, large = read_cluster(path)
    slow, fast = (generate_s(SIZE, 8, 2, at, WORK, 1e12) for at in (small, large))
    assert slow is not None and fast is not None
    assert slow - fast == pytest.approx(WORK.response_tokens * 2 * SIZE.layers * 15e-6)
    config = load_config(recipe).config
    found = {at: beside_devices(config, best_placements(config, [at], work_of(config))[0]) for at in (small, large)}
    assert not found[large] and "disk_gb=9 of H100 is less than" in found[small][0]
    poor = best_placements(config, [replace(large, host_memory_gb=10)], work_of(config))[0]
    assert ["host_memory_gb=10" in line for line in beside_devices(config, poor)] == [True]


def test_a_model_that_fits_nowhere_is_one_line(
    recipe: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cluster.yaml").write_text("- {device: L40S}\n")
    assert main(["plan", *recipe, f"cluster_file={tmp_path / 'cluster.yaml'}"]) == 2
    said = capsys.readouterr().err
    assert "no placement fits 1 x L40S: actor needs" in said and "more devices" in said
    assert main(["plan", *recipe, "aim=cost"]) == 2
    assert "give cluster_file=FILE" in capsys.readouterr().err


def test_the_cheapest_placement_costs_no_more_than_the_fastest(recipe: list[str]) -> None:
    config = load_config(recipe).config
    at = Nodes(device=DEVICES["H100"], nodes=4, devices_per_node=8, network_gbs=50, price_per_hour=2.0)
    fast, cheap = (best_placements(config, [at], work_of(config), aim)[0].placement for aim in ("time", "cost"))
    assert cheap.price < fast.price and fast.step_s < cheap.step_s


def test_the_range_of_a_placement_is_that_of_devices_that_reach_more_and_less(recipe: list[str]) -> None:
    config = load_config([*recipe, "algorithm.name=ppo"]).config
    at, work = Nodes(device=DEVICES["H100"], nodes=2, devices_per_node=8, network_gbs=50), work_of(config)
    for placed in best_placements(config, [at], work)[:3]:
        assert seconds_on(config, placed, placed.cluster, work) == pytest.approx(placed.placement.step_s)
        fast, slow = (seconds_on(config, placed, end, work) for end in corners(placed))
        # every part is a product, a read or a transfer at a share; two of the shares are capped at 1
        assert slow == pytest.approx(1.4 * placed.placement.step_s)
        assert placed.placement.step_s / 1.4 <= fast < placed.placement.step_s


def test_the_smallest_cluster_that_meets_a_deadline(recipe: list[str]) -> None:
    config = load_config(recipe).config
    priced = {"network_gbs": 50.0, "devices_per_node": 8}
    cheap = Nodes(device=DEVICES["H100"], nodes=4, price_per_hour=2.0, **priced)
    dear = Nodes(device=DEVICES["H200"], nodes=4, price_per_hour=20.0, **priced)
    work = work_of(config)
    step_s = {n: best_placements(config, [replace(cheap, nodes=n)], work)[0].placement.step_s for n in (1, 2, 3, 4)}
    for count in (1, 2, 3, 4):
        best = smallest_cluster(config, [dear, cheap], work, step_s[count] * 1.001)[0]
        used = sum(one.times.devices for one in best.placement.sets)
        assert best.at.device.name == "H100" and used <= 8 * count and best.placement.step_s <= step_s[count] * 1.001
        if count > 1:
            assert best.at.devices > 8 * (count - 1) or step_s[count - 1] <= step_s[count] * 1.001
    with pytest.raises(Refused, match="the fastest step on 32 x H100 takes about"):
        smallest_cluster(config, [cheap], work, step_s[4] / 100)


def test_a_prompt_that_answers_share_is_computed_once() -> None:
    alone, shared = WORK, replace(WORK, prompt_shares=8)
    one, at = Division(1, 1, 1), nodes()
    ratio = infer_s(SIZE, one, at, shared, Stored()) / infer_s(SIZE, one, at, alone, Stored())
    assert ratio == pytest.approx((512 / 8 + 512) / 1024)
    prompts = [generate_s(SIZE, 1, 1, at, work, 1e15) for work in (alone, shared)]
    own = 256 * 512 * SIZE.forward_flops(512) / at.device.flops(SIZE.hidden)
    assert prompts[0] - prompts[1] == pytest.approx(own * 7 / 8)  # type: ignore[operator]


def test_an_update_without_recomputation_or_gradients_of_weights_has_fewer_products() -> None:
    one, at = Division(1, 1, 1), nodes()
    states = 2 * 2 * Stored().states * SIZE.parameters / at.device.read
    whole, kept, lora = (
        update_s(SIZE, one, at, replace(WORK, **more), Stored()) - states
        for more in ({}, {"recomputed": False}, {"recomputed": False, "weight_gradients": False})
    )
    assert kept == pytest.approx(whole * 3 / 4) and lora == pytest.approx(whole / 2)


# -- rollout beside training -------------------------------------------------------------------------------------------


def test_a_step_beside_its_rollout_is_the_slower_of_the_two() -> None:
    roles = (role("engines", "generate"), role("actor", "train"), role("ref", "infer"))
    assert stages_of(roles) == ("answers", "update", "experience")
    assert step_of(roles, overlap=False)((5.0, 2.0, 1.0)) == 8
    assert step_of(roles, overlap=True)((5.0, 2.0, 1.0)) == 5 and step_of(roles, overlap=True)((2.0, 2.0, 1.0)) == 3
    cluster = [nodes(2)]
    found = placements(roles, cluster, times_of(roles, cluster, Rules(work=WORK)), overlap=True)
    assert found and all(("engines",) in [one.roles for one in each.sets] for each in found)
    together = placements(roles, cluster, times_of(roles, cluster, Rules(work=WORK)))
    assert {len(each.sets) for each in together} == {1, 2, 3}


def test_equal_answers_on_shared_devices_take_the_seconds_of_the_stages(recipe: list[str]) -> None:
    config = load_config([*recipe, "algorithm.name=ppo", "rollout.max_response_tokens=64"]).config
    at, work = Nodes(device=DEVICES["H100"], nodes=1, devices_per_node=8, network_gbs=50), work_of(config)
    (best, *_) = paced(config, best_placements(config, [at], work)[:1], work, lognormal(64, 0.0, 64))
    assert best.seconds(config) == pytest.approx(best.placement.step_s, rel=0.01)
    longer = paced(config, [best], work, lognormal(32, 1.0, 64))  # a mean of 64 at most, with a tail
    assert longer[0].seconds(config) < best.seconds(config)


def test_a_step_waits_for_tools_and_rewards_as_in_the_simulator(
    recipe: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config([*recipe, "algorithm.name=ppo", "rollout.max_response_tokens=64"]).config
    at, work = Nodes(device=DEVICES["H100"], nodes=1, devices_per_node=8, network_gbs=50), work_of(config)
    waiting = replace(work, reward_s=2.0, tool_calls=3, tool_s=0.5)
    alone, found = (best_placements(config, [at], one) for one in (work, waiting))
    assert found[0].placement.step_s == pytest.approx(alone[0].placement.step_s + 2.0 + 3 * 0.5)
    (best, *_) = paced(config, found[:1], waiting, lognormal(64, 0.0, 64))
    assert best.seconds(config) == pytest.approx(best.placement.step_s, rel=0.01)
    (tmp_path / "cluster.yaml").write_text(TWO_NODES)
    ahead = [*recipe, "pipeline.staleness=1", "rollout.max_response_tokens=64", f"cluster_file={tmp_path}/cluster.yaml"]
    steps = []
    for more in ((), ("reward_s=0.25", "tool_calls=2", "tool_s=0.5")):
        assert main(["plan", *ahead, "json=true", *more]) == 0
        paces = [one["simulated"] for one in json.loads(capsys.readouterr().out)["placements"]]
        assert all(pace["errors"]["tokens"] == 0 for pace in paces), "all answers have the length of the limit"
        steps.append([pace["period_s"] for pace in paces])
    assert min(steps[1]) > min(steps[0])
    assert main(["plan", *recipe, "tool_s=1"]) == 2
    assert "tool_s=1 is of a placement: give cluster_file=FILE too" in capsys.readouterr().err


def test_the_rollout_of_a_run_ahead_has_the_devices_that_its_pace_needs(
    recipe: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cluster.yaml").write_text(TWO_NODES)
    ahead = [*recipe, "pipeline.staleness=1", "rollout.max_response_tokens=64", "step.prompts_per_step=32"]
    assert main(["plan", *ahead, f"cluster_file={tmp_path / 'cluster.yaml'}", "mean_tokens=40", "sigma=0.5"]) == 0
    printed = capsys.readouterr().out
    given = [*ahead, f"cluster_file={tmp_path / 'cluster.yaml'}", "mean_tokens=40", "sigma=0.5", "json=true"]
    assert main(["plan", *given]) == 0
    paces = [one["simulated"] for one in json.loads(capsys.readouterr().out)["placements"]]
    assert all(0 < pace["errors"]["tokens"] < pace["tokens"] / 5 for pace in paces)
    assert all(pace["errors"].keys() | {"errors"} == pace.keys() for pace in paces)
    assert "simulated with pipeline.staleness=1: " in printed and ", simulated +" in printed
    slower = [line for line in printed.splitlines() if line.startswith("slower")]
    ranged = r".*: \S+ \(\S+ to \S+\), simulated \S+ ± \d+%, \S+ s in \w+ \(\S+ to \S+\)"
    assert slower and all(re.fullmatch(ranged, line) for line in slower), "every figure has its range"
    line = next(line for line in printed.splitlines() if line.startswith("configure "))
    assert main(["plan", *ahead, *shlex.split(line.removeprefix("configure ")), "cluster.address=auto"]) == 0
    config = load_config(ahead).config
    work = work_of(config, 40.0)
    found = best_placements(config, read_cluster(tmp_path / "cluster.yaml"), work)
    shares = {one.times.devices for each in found for one in each.placement.sets if one.roles == ("rollout",)}
    assert len(shares) > 3  # several numbers of devices are tried
    best = paced(config, found, work, lognormal(40, 0.5, 64))
    bound = [each.placement.step_s for each in best]
    assert all(each.seconds(config) >= 0.95 * s for each, s in zip(best, bound))
    assert [each.seconds(config) for each in best] == sorted(each.seconds(config) for each in best)


def test_roles_of_one_run_are_on_unequal_devices_where_that_is_faster(
    recipe: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """H20 have the memory bandwidth of decode steps and few products. The placement is at least as
    fast as the best one on either kind, and its arguments configure a run."""
    args = [*recipe, "algorithm.name=ppo", "pipeline.placement=split"]
    config, work = load_config(args).config, work_of(load_config(args).config)
    kinds = [nodes(1, device="H100"), nodes(1, device="H20")]
    best, *others = best_placements(config, kinds, work)
    alone = [best_placements(config, [at], work)[0].placement.step_s for at in kinds]
    assert best.mixed and best.placement.step_s <= min(alone)
    for one in (best, *others):
        for placed in one.placement.sets:  # the seconds are those of the devices that it is on
            engine = (one.engines[0].engine_devices, one.engines[1].at_once)
            rules = rules_of(config, work, one.layout)
            times = run_times(planned_roles(config), one.cluster, rules, one.passes, engine)
            assert times(placed.roles, placed.group, placed.times.devices) == placed.times
    assert best.nodes_of("rollout").device.name == "H20" and best.at.device.name == "H100"
    (tmp_path / "cluster.yaml").write_text(
        "[{device: H100, devices_per_node: 8, network_gbs: 25}, {device: H20, devices_per_node: 8, network_gbs: 25}]"
    )
    assert main(["plan", *args, f"cluster_file={tmp_path / 'cluster.yaml'}"]) == 0
    printed = capsys.readouterr().out
    assert {"H100 (data sheet of H100 SXM5)", "H20 (data sheet of HGX H20)"} <= {*re.findall(r"H\d+ \(.*?\)", printed)}
    assert re.search(r"^ +\d+ H20 +rollout ", printed, re.MULTILINE), printed
    line = next(line for line in printed.splitlines() if line.startswith("configure "))
    given = load_config([*args, *shlex.split(line.removeprefix("configure ")), "cluster.address=auto"]).config
    assert not [*cluster_faults(given, "train")]
    main_pool, other = (pool_of(given.cluster.pools[name], "cuda") for name in ("main", given.cluster.roles["rollout"]))
    assert main_pool.bundle["H100"] == main_pool.bundle["GPU"] == 1 and other.bundle["H20"] == 1
    cards = [replace(at, device=replace(at.device, name="my card")) for at in best.cluster]  # in nodes of two sizes
    line = " ".join(overrides(config, replace(best, cluster=cards)))
    given = load_config([*args, *shlex.split(line), "cluster.address=auto"]).config
    pools = [pool_of(given.cluster.pools[name], "cuda") for name in ("main", given.cluster.roles["rollout"])]
    assert [pool.bundle[name] for pool, name in zip(pools, ("my card", "my card-2"))] == [1, 1]


def test_one_device_is_too_few_for_a_rollout_with_devices_of_its_own(recipe: list[str]) -> None:
    config = load_config([*recipe, "pipeline.staleness=1"]).config
    one = Nodes(device=DEVICES["H100"], nodes=1, devices_per_node=1, network_gbs=50)
    with pytest.raises(Refused, match="the rollout has devices of its own, and the cluster file has one device"):
        best_placements(config, [one], work_of(config))
    assert best_placements(config, [replace(one, devices_per_node=8)], work_of(config))
