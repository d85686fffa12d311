"""Placements of a run fit by the plan of the arguments that are printed for them, and are the best ones that do."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from each import matrix
from handmade_model import write_model, write_rows

from verl.cli import main
from verl.config.cluster import placed_roles
from verl.config.load import load_config
from verl.config.schema import Config
from verl.errors import Refused
from verl.planner import fitting
from verl.planner.fitting import MemoryCounter, best_placements, passes_of
from verl.planner.hardware import DEVICES, Nodes, read_cluster
from verl.planner.latency import (
    RESERVE,
    Division,
    ModelSize,
    StepWork,
    Stored,
    activation_bytes,
    divisions,
    engine_pace,
    generate_s,
    held_bytes,
    infer_s,
    published_s,
    summed_s,
    update_s,
)
from verl.planner.mapping import PlannedRole, Rules, best_devices, device_counts, divided, step_of, times_of
from verl.planner.memory import MEASURED_RANGE
from verl.planner.placement import (
    PlacedRun,
    SetMemory,
    layouts,
    on_devices,
    overrides,
    paced,
    planned_roles,
    pool_names,
    rules_of,
    run_times,
    sent_s,
    stored_of,
    version_bytes,
    work_of,
)
from verl.planner.plan import make_plan
from verl.planner.simulate import lognormal

SEVEN_B = {"layers": 28, "hidden": 3584, "ffn": 18944, "heads": 28, "kv_heads": 4, "vocab": 152064, "tied": False}
TWO_B = {"layers": 28, "hidden": 1536, "ffn": 8960, "heads": 12, "kv_heads": 2, "vocab": 151936, "tied": True}
LONG = ("rollout.max_response_tokens=8192", "step.max_tokens_per_microbatch=16384")


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Return the arguments of runs with models of 7 and of 1.5 billion parameters, whose numbers are sparse files."""
    folder = tmp_path_factory.mktemp("fitting")
    rows = write_rows(folder / "rows.jsonl", 500)
    data = [f"data.train_files=[{rows}]", f"data.eval_files=[{rows}]", f"run.root_dir={folder}"]
    for name, sizes in (("7B", SEVEN_B), ("2B", TWO_B)):
        write_model(folder / name, **sizes)  # type: ignore[arg-type]
    return {name: ["recipe=gsm8k_grpo", f"model.path={folder / name}", *data] for name in ("7B", "2B")}


def nodes(device: str, count: int = 1, each: int = 8) -> Nodes:
    return Nodes(device=DEVICES[device], nodes=count, devices_per_node=each, network_gbs=50.0)


def placed_on(args: Sequence[str], at: Nodes) -> tuple[Config, list[PlacedRun]]:
    config = on_devices(load_config(args).config, [at])
    return config, best_placements(config, [at], work_of(config))


def overfull(args: Sequence[str], config: Config, found: Sequence[PlacedRun], at: Nodes) -> list[str]:
    """Return the pools of the printed arguments that hold more than a run has on the devices of a rank, by
    `make_plan`."""
    out = []
    for placed in found:
        made = make_plan(load_config([*args, *map(str.strip, shlex.split(" ".join(overrides(config, placed))))]).config)
        assert made.cluster is not None
        sets = dict(zip(pool_names(placed), placed.placement.sets, strict=True))
        for name, pool in made.cluster.pools.items():
            devices = max(1, sets[name].times.engine_devices if sets[name].roles == ("rollout",) else 1)
            assert pool.each["GPU"] == devices
            wanted = {role for role in sets[name].roles if role in placed_roles(config) and role != "rollout"}
            assert {*pool.roles} - {"compute", "recorder"} == wanted, name
            assert bool(pool.replicas) == ("rollout" in sets[name].roles)
            if pool.memory.peak_bytes > devices * 0.9e9 * at.device.memory_gb:
                out.append(f"{name}: {pool.memory.peak_bytes / 1e9:.1f} GB in {pool.memory.peak_phase}")
    return out


GRID = [
    ("7B", nodes("A100-80", 1), LONG),
    ("7B", nodes("H100", 2), (*LONG, "algorithm.name=ppo")),
    ("7B", nodes("A100-40", 2), ("algorithm.kl_loss_coef=0.001",)),
    ("7B", nodes("L40S", 4), (*LONG, "pipeline.staleness=1")),
    ("7B", nodes("H100", 1), ("model.lora.rank=32", "algorithm.name=ppo")),
    ("7B", nodes("H100", 1, 1), ("model.lora.rank=32", "model.quantization=nf4")),
    ("7B", nodes("H200", 1), ("rollout.engine=vllm", "rollout.python=/usr/bin/python3", "pipeline.placement=split")),
    ("2B", nodes("A100-40", 1, 4), (*LONG, "step.updates_per_step=1")),
    ("2B", nodes("H20", 1, 2), ("algorithm.name=ppo",)),
]


@pytest.mark.parametrize(("model", "at", "more"), GRID)
def test_the_plan_of_the_printed_arguments_fits_the_cards(
    recipes: dict[str, list[str]], model: str, at: Nodes, more: tuple[str, ...]
) -> None:
    args = [*recipes[model], *more]
    config, found = placed_on(args, at)
    assert found and not overfull(args, config, found, at)
    for one in found:  # what is printed beside it is that plan
        assert all(memory.peak_bytes <= memory.room_bytes for memory in one.memory)
        assert all(memory.phases[memory.phase] == memory.peak_bytes for memory in one.memory)
        assert all(max(memory.phases.values()) == memory.peak_bytes for memory in one.memory)


def test_without_the_plan_placements_are_printed_that_do_not_fit(
    recipes: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant: a memory that is never counted. Some of its placements hold more than their cards."""
    endless = SetMemory(peak_bytes=0, phase="rollout", room_bytes=2**62)

    def anything(self: MemoryCounter, *of: object) -> SetMemory:
        return replace(endless, at_once=int(of[-1]))  # type: ignore[call-overload]

    monkeypatch.setattr(fitting.MemoryCounter, "of_set", anything)
    full = 0
    for model, at, more in GRID[:3]:
        args = [*recipes[model], *more]
        config, found = placed_on(args, at)
        full += len(overfull(args, config, found, at))
    assert full >= 3


def test_every_figure_of_a_placement_has_its_range_and_every_phase_its_bytes(
    recipes: dict[str, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By hand: the seconds of a stage on devices that reach 1.4 times as much and as little; the bytes are those of the
    plan of the printed arguments, phase by phase."""
    (tmp_path / "cluster.yaml").write_text("- {device: H100, devices_per_node: 8, nodes: 2, network_gbs: 50}\n")
    args = [*recipes["7B"], "algorithm.name=ppo"]
    assert main(["plan", *args, f"cluster_file={tmp_path / 'cluster.yaml'}", "json=true"]) == 0
    best = json.loads(capsys.readouterr().out)["placements"][0]
    made = make_plan(load_config([*args, *map(str.strip, shlex.split(" ".join(best["configure"])))]).config)
    assert made.cluster is not None
    for one, pool in zip(best["sets"], made.cluster.pools.values(), strict=True):
        assert one["phase_bytes"] == pool.memory.peaks and len(one["phase_bytes"]) > 2
        assert one["peak_bytes_range"] == [int(share * one["peak_bytes"]) for share in MEASURED_RANGE]
        assert tuple(one["peak_bytes_range"]) == pool.memory.peak_bytes_range
        for stage, seconds in one["seconds"].items():
            low, high = one["seconds_range"][stage]
            assert high == pytest.approx(1.4 * seconds) and seconds / 1.4 <= low <= seconds
            assert low < seconds or not seconds
    ends = [
        sum(max(one["seconds_range"][stage][i] for one in best["sets"]) for stage in best["sets"][0]["seconds"])
        for i in (0, 1)
    ]
    assert ends == pytest.approx(best["step_s_range"])
    # and as text: a range beside each number of seconds, and a bar of eight parts for each phase
    assert main(["plan", *args, f"cluster_file={tmp_path / 'cluster.yaml'}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("memory    roles"))
    for row, one in zip(lines[at + 1 :], best["sets"]):
        bars = [(len(bar), bar.count("█"), float(gib)) for bar, gib in re.findall(r"([█░]+) ([\d.]+)", row)]
        sizes = [one["phase_bytes"].get(phase) for phase in re.split(r"  +", lines[at])[2:]]
        assert bars == [
            (8, max(1, round(8 * n / one["room_bytes"])), round(n / 2**30, 1)) for n in sizes if n is not None
        ]
    assert "on CPUs, held at most 10% less and 12% more" in lines[at + 1 + len(best["sets"])]
    for row in lines[at - len(best["sets"]) : at]:
        cells = re.split(r"  +", row.strip())[3:]
        assert all(cell == "-" or re.fullmatch(r"\S+ \(\S+ to \S+\)", cell) for cell in cells) and len(cells) == 3


def test_the_error_of_planned_bytes_is_that_of_the_recorded_bench() -> None:
    section = (Path(__file__).parents[2] / "bench" / "sections" / "plan_memory.md").read_text()
    errors = [float(text) / 100 for text in re.findall(r"\| ([+-][\d.]+)% \|$", section, re.MULTILINE)]
    held = [1 / (1 + error) for error in errors]
    low, high = MEASURED_RANGE
    assert len(held) >= 42 and low < min(held) < low + 0.02 and high - 0.02 < max(held) < high


def test_keys_of_the_command_line_keep_their_values(
    recipes: dict[str, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cluster.yaml").write_text("- {device: A100-80, devices_per_node: 8}\n")
    args = ["plan", *recipes["7B"], f"cluster_file={tmp_path / 'cluster.yaml'}", "json=true"]
    keys = ("rollout.max_concurrent_sequences", "step.max_tokens_per_microbatch")
    steps = []
    for given in ((), (f"{keys[0]}=8", f"{keys[1]}=4096")):
        assert main([*args, *given]) == 0
        best = json.loads(capsys.readouterr().out)["placements"][0]
        assert not given or not [arg for arg in best["configure"] if arg.startswith(keys)]
        steps.append(best["sets"][0]["seconds"]["rollout"])
    assert steps[1] > 2 * steps[0]  # eight answers at once, and not all


@pytest.mark.parametrize(("device", "wanted"), [("H100", "none"), ("L40S", "full")])
def test_auto_checkpointing_is_settled_on_the_devices_of_the_file_and_printed(
    recipes: dict[str, list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    wanted: str,
) -> None:
    """The memory of this machine changes neither the placements nor the table above them; where `none` fits it is the
    placement of `none`."""
    (tmp_path / "cluster.yaml").write_text(f"- {{device: {device}, nodes: 2, devices_per_node: 4, network_gbs: 50}}\n")
    key, file = "model.gradient_checkpointing", f"cluster_file={tmp_path / 'cluster.yaml'}"
    found = []
    for gib, how, more in ((8, "auto", ()), (4096, "auto", ()), (8, "auto", ("model.device=cuda",)), (8, "none", ())):
        monkeypatch.setattr("verl.workers.host.total_bytes", lambda gib=gib: gib << 30)
        given = () if how == "none" and wanted == "full" else (f"{key}={how}",)
        assert main(["plan", *recipes["7B"], *LONG, *given, *more, file, "json=true"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    small, large, cuda, plain = (one["placements"] for one in found)
    assert small == large == cuda and found[0]["plan"]["memory"] == found[1]["plan"]["memory"]
    assert all(len([arg for arg in one["configure"] if arg.startswith(f"{key}=")]) == 1 for one in small)
    assert f"{key}={wanted}" in small[0]["configure"]
    assert [one["sets"] for one in small] == [one["sets"] for one in plain]
    assert main(["plan", *recipes["7B"], *LONG, f"{key}=auto", file]) == 0
    assert f"{key}=auto: none in this table" in capsys.readouterr().out


def test_a_server_takes_the_share_that_models_leave_or_the_one_that_is_given(recipes: dict[str, list[str]]) -> None:
    """Alone it takes the 90% that a run has of each device; beside the actor less; a given share stays."""
    vllm, key = (
        ["rollout.engine=vllm", "rollout.python=/usr/bin/python3"],
        "rollout.engine_options.gpu_memory_utilization",
    )
    at, taken = nodes("H100", 1), {}
    for placement, share in (("split", None), ("colocated", None), ("split", 0.6)):
        args = [*recipes["7B"], *vllm, f"pipeline.placement={placement}", *([f"{key}={share}"] if share else [])]
        config = on_devices(load_config(args).config, [at])
        best = best_placements(config, [at], work_of(config), given=[key] if share else [])[0]
        printed = [float(arg.partition("=")[2]) for arg in overrides(config, best) if arg.startswith(key)]
        engines, memory = best.engines
        whole = at.device.memory_gb * 1e9 * engines.engine_devices
        assert printed == ([] if share or memory.share == 0.5 else [memory.share])
        assert memory.share * whole <= memory.peak_bytes <= memory.room_bytes
        taken[placement, share] = memory.share
    assert taken["split", None] == 0.9 and taken["split", 0.6] == 0.6 and 0 < taken["colocated", None] < 0.9


@pytest.mark.parametrize(
    ("model", "at", "more"),
    [
        ("7B", nodes("A100-80", 1, 4), LONG),
        ("2B", nodes("A100-40", 1, 2), (*LONG, "algorithm.name=ppo")),
        ("2B", nodes("A100-40", 1, 4), LONG),
    ],
)
def test_the_search_is_an_exhaustive_one_over_what_fits(
    recipes: dict[str, list[str]], model: str, at: Nodes, more: tuple[str, ...]
) -> None:
    """The oracle counts the memory of every layout, passes and set before it takes the best devices. Memory binds:
    what is fastest without it does not fit."""
    config = on_devices(load_config([*recipes[model], *more]).config, [at])
    work, counter, roles = work_of(config), MemoryCounter(config), planned_roles(config)
    best: dict[frozenset[tuple[str, ...]], float] = {}
    freest = math.inf
    for by, sets in itertools.product(layouts(config, at), divided(roles, [at])):
        of = frozenset(sets)
        for passes in passes_of(config):  # smaller ones only where larger ones have no place
            rules = rules_of(config, work, by)
            free, step = run_times(roles, [at], rules, passes), step_of(roles, False)

            def times(names: tuple[str, ...], group: int, n: int, by=by, passes=passes, free=free, rules=rules):  # type: ignore[no-untyped-def]
                if free(names, group, n) is None:
                    return None
                memory = counter.of_set(by, passes, names, at, work, 1, math.ceil(work.sequences / n))
                if memory.peak_bytes > memory.room_bytes:
                    return None
                engine = (1, memory.at_once) if "rollout" in names else None
                return run_times(roles, [at], rules, passes, engine)(names, group, n)

            if (unchecked := best_devices(sets, [at], free, "time", step)) is not None:
                freest = min(freest, unchecked.step_s)
            if (placed := best_devices(sets, [at], times, "time", step)) is not None:
                best[of] = min(best.get(of, math.inf), placed.step_s)
                break
    found = best_placements(config, [at], work)
    assert found and found[0].placement.step_s > freest
    assert found[0].placement.step_s == pytest.approx(min(best.values()))
    for one in found:
        assert one.placement.step_s == pytest.approx(best[frozenset(s.roles for s in one.placement.sets)])


# -- nothing fits ------------------------------------------------------------------------------------------------------


def test_what_is_missing_is_a_number_that_follows_by_hand(recipes: dict[str, list[str]]) -> None:
    """One L40S for 7.6 billion parameters: 4 + 2 bytes of weights, 4 of gradients, 8 of optimizer states, 2 of the
    engine. What an update of one row holds beside them is small."""
    config, at = load_config([*recipes["7B"], "model.device=cuda"]).config, nodes("L40S", 1, 1)
    with pytest.raises(Refused) as refused:
        best_placements(config, [at], work_of(config))
    said = str(refused.value)
    lacks, peak, room = (float(n) for n in re.findall(r"([\d.]+) GiB", said)[:3])
    parameters = 7_615_616_512
    by_hand = 20 * parameters / 2**30
    assert by_hand < peak < 1.06 * by_hand and room == pytest.approx(0.9 * 48e9 / 2**30, abs=0.1)
    assert lacks == pytest.approx(peak - room, abs=1) and "actor needs" in said and "phase update actor" in said
    # each of the three ways is one
    enough = int(re.findall(r"devices of (\d+) GB", said)[0])
    for gb, fits in ((enough, True), (enough - 1, False)):
        card = replace(at, device=replace(at.device, memory_gb=gb))
        if fits:
            assert best_placements(config, [card], work_of(config))
        else:
            with pytest.raises(Refused, match="no placement fits"):
                best_placements(config, [card], work_of(config))
    more = int(re.findall(r"more devices \((\d+) x L40S", said)[0])
    assert best_placements(config, [replace(at, nodes=more, network_gbs=50.0)], work_of(config))
    assert said.endswith("or model.lora.rank=32, which trains few parameters")


def test_a_set_that_fits_nowhere_is_named_with_its_bytes(recipes: dict[str, list[str]]) -> None:
    config, found = placed_on([*recipes["7B"], "algorithm.name=ppo"], nodes("A100-40", 2))
    assert found[0].without_room and all(re.search(r" GiB in .*, of 33.5 GiB$", line) for line in found[0].without_room)
    tried = {line.partition(" on ")[0] for line in found[0].without_room}
    assert not tried & {" + ".join(s.roles) for one in found for s in one.placement.sets}


@pytest.mark.parametrize(
    ("cluster", "more", "why"),
    [
        ("[{device: H100}]", ("aim=cost", "deadline_s=9"), "aim=cost and deadline_s=9: give one"),
        ("[{device: H100}]", ("aim=speed",), "aim=speed: time or cost"),
        ("[{device: H100, price_per_hour: 2}, {device: H200}]", ("deadline_s=9",), "give it to all or none"),
        ("[{device: H100}]", ("pipeline.placement=colocated", "pipeline.staleness=1"), "pipeline.placement=colocated"),
        ("[{device: H100}]", ("pipeline.placement=split",), "the cluster file has one device"),
        ("[{device: H1000}]", (), "device 'H1000' is not known"),
        ("[{device: H100, network_gbs: 0}]", (), "network_gbs=0: a number above 0"),
    ],
)
def test_arguments_that_contradict_each_other_are_one_line(
    recipes: dict[str, list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    cluster: str,
    more: tuple[str, ...],
    why: str,
) -> None:
    (tmp_path / "cluster.yaml").write_text(cluster)
    assert main(["plan", *recipes["2B"], *more, f"cluster_file={tmp_path / 'cluster.yaml'}"]) == 2
    shown = capsys.readouterr()
    assert why in shown.err and len(shown.err.strip().splitlines()) == 1, shown.err


def test_more_roles_than_devices_share_them(recipes: dict[str, list[str]]) -> None:
    _, found = placed_on([*recipes["2B"], "algorithm.name=ppo"], nodes("H200", 1, 1))
    assert [{*s.roles} for one in found for s in one.placement.sets] == [{"rollout", "actor", "critic", "ref"}]


# -- weights on their way ----------------------------------------------------------------------------------------------


def test_weights_for_devices_that_only_generate_take_time_by_the_link(recipes: dict[str, list[str]]) -> None:
    """By hand: 16 GB over 25 GB/s of a network of which 80% are reached, then each of two devices its half over
    300 GB/s."""
    size = ModelSize(parameters=8e9, active_parameters=8e9, layers=32, hidden=4096, kv_width=1024)
    work = StepWork(sequences=256, prompt_tokens=512, response_tokens=512, updates=2)
    one = Nodes(device=DEVICES["A100-80"], nodes=1, devices_per_node=8, network_gbs=25.0)
    within, between = 8e9 / 0.8 / 300e9, 16e9 / 0.8 / 25e9
    assert published_s(16e9, 2, one, far=False) == pytest.approx(within)
    assert published_s(16e9, 2, one, far=True) == pytest.approx(within + between)
    actor = PlannedRole(name="actor", model=size, calls=(("update", "train"),))
    rules = Rules(work=work, engines=(2,))
    took = {}
    for trainer in (None, "actor"):
        engines = PlannedRole(name="engines", model=size, calls=(("answers", "generate"),), weights_of=trainer)
        roles = (engines, actor)
        for count in (1, 2):
            times = times_of(roles, [replace(one, nodes=count)], rules)
            alone, shared = times(("engines",), 0, 8), times(("engines", "actor"), 0, 8)
            assert alone is not None and shared is not None
            took[trainer, count] = alone.seconds[0], shared.seconds[0]
    for count, by_hand in ((1, within), (2, within + between)):
        assert took["actor", count][0] - took[None, count][0] == pytest.approx(by_hand)
        assert took["actor", count][1] == took[None, count][1], "on the trainer's devices nothing is sent"
    # of a run, under the virtual clock too; factors alone under LoRA
    more = ("pipeline.staleness=1", "rollout.max_response_tokens=64", "step.prompts_per_step=32")
    config, found = placed_on([*recipes["7B"], *more], nodes("H100", 2))
    assert version_bytes(config) == 2 * 7_615_616_512
    best = paced(config, found[:1], work_of(config), lognormal(64, 0.0, 64))[0]
    assert sent_s(config, best) == pytest.approx(2 * 7_615_616_512 * (1 / 40e9 + 1 / 360e9))
    lora = on_devices(load_config([*recipes["7B"], *more, "model.lora.rank=32"]).config, [nodes("H100")])
    assert version_bytes(lora) < 0.02 * version_bytes(config)


# -- codes and factors -------------------------------------------------------------------------------------------------


def test_a_base_in_codes_is_held_and_read_as_codes(recipes: dict[str, list[str]]) -> None:
    """By hand: of 7.6 billion values 6.5 are in layers, with about half a byte each; the others have 4."""
    card, lora = nodes("H200", 1, 1), [*recipes["7B"], "model.lora.rank=32"]
    plain, coded = (on_devices(load_config([*lora, *q]).config, [card]) for q in ((), ("model.quantization=nf4",)))
    in_layers = 28 * (2 * 3584 * 3584 + 2 * 512 * 3584 + 3 * 18944 * 3584)
    code = 0.5 + 1 / 64 + 4 / (64 * 256)
    by_hand = (code * in_layers + 4 * (7_615_616_512 - in_layers)) / 7_615_616_512
    assert stored_of(coded).weight == pytest.approx(by_hand, rel=1e-3) and stored_of(plain).weight == 4
    assert stored_of(coded).decoded == pytest.approx((code + 4) * in_layers / 7_615_616_512, rel=1e-3)
    one, size, work = Division(1, 1, 1), planned_roles(coded)[0].model, work_of(coded)
    passes = work.passes(work.sequences)
    longer = infer_s(size, one, card, work, stored_of(coded)) - infer_s(size, one, card, work, stored_of(plain))
    assert longer == pytest.approx(passes * stored_of(coded).decoded * size.parameters / card.device.read)
    peaks = [best_placements(c, [card], work_of(c))[0].memory[0].peak_bytes for c in (plain, coded)]
    assert peaks[1] < peaks[0]
    # the engine of this machine's process computes with the codes: a decode step reads fewer bytes
    few = replace(work, at_once=8)  # which wait for the weights, and not for products
    steps = [generate_s(size, 1, 1, card, replace(few, weight_bytes=n), 1e12) for n in (2.0, 0.6)]
    assert steps[0] is not None and steps[1] is not None and steps[1] < steps[0]
    with pytest.raises(Refused, match="no placement fits"):  # codes are not divided among ranks
        best_placements(coded, [replace(card, device=replace(card.device, memory_gb=8))], work_of(coded))


def test_products_in_fp8_and_the_latency_between_nodes_follow_by_hand(
    recipes: dict[str, list[str]], tmp_path: Path
) -> None:
    """An H100 multiplies in FP8 2.001 times as fast; its weights are read as bytes and scales. Two nodes sum the
    gradients of 32 layers, each of which waits for the network."""
    size = ModelSize(parameters=8e9, active_parameters=8e9, layers=32, hidden=4096, kv_width=1024)
    work = StepWork(sequences=4096, prompt_tokens=512, response_tokens=512, updates=2)
    (tmp_path / "cluster.yaml").write_text(
        "- {device: H100, nodes: 2, devices_per_node: 8, network_gbs: 50, network_us: 40}"
    )
    (far,) = read_cluster(tmp_path / "cluster.yaml")
    near = replace(far, network_us=0.0)
    over, inside = Division(8, 1, 2), Division(8, 1, 1)
    assert summed_s(size, over, far, 4.0) - summed_s(size, over, near, 4.0) == pytest.approx(32 * 40e-6)
    assert summed_s(size, inside, far, 4.0) == summed_s(size, inside, near, 4.0)
    plain, fp8 = (engine_pace(size, 1, 1, far, replace(work, fp8=on), math.inf) for on in (False, True))
    assert plain is not None and fp8 is not None
    assert plain.prompts_s / fp8.prompts_s == pytest.approx(1979 / 989) and fp8.full_s <= plain.full_s
    without = replace(far, device=DEVICES["A100-80"])
    plain, fp8 = (engine_pace(size, 1, 1, without, replace(work, fp8=on), math.inf) for on in (False, True))
    assert plain == fp8, "a device without FP8"
    config = on_devices(load_config([*recipes["7B"], "rollout.dtype=fp8"]).config, [far])
    rounded = rules_of(config, work_of(config), inside).work
    assert rounded.fp8 and 1 < rounded.weight_bytes < 1.2


# -- the search of sets ------------------------------------------------------------------------------------------------


def test_the_least_devices_of_a_set_follow_by_hand() -> None:
    """8 billion parameters, 18 bytes each in training: two A100-80 with 72 GB of room have no place beside their 72 GB
    of weights, gradients and states, four hold 36 GB each. A reference of 16 GB has one device, and both have four."""
    size = ModelSize(parameters=8e9, active_parameters=8e9, layers=32, hidden=4096, kv_width=1024)
    work = StepWork(sequences=256, prompt_tokens=512, response_tokens=512, updates=2)
    actor = PlannedRole(name="actor", model=size, calls=(("update", "train"),))
    ref = PlannedRole(name="ref", model=size, calls=(("experience", "infer"),))
    at = Nodes(device=DEVICES["A100-80"], nodes=1, devices_per_node=8, network_gbs=25.0)
    times = times_of((actor, ref), [at], Rules(work=work))

    def least(*names: str) -> int:
        return min(n for n in device_counts(at) if times(names, 0, n) is not None)

    assert [least("actor"), least("ref"), least("actor", "ref")] == [4, 1, 4]
    assert held_bytes(size, Division(2, 1, 1), True, Stored()) == 72e9 == 0.9 * 80e9
    tight = replace(at, device=replace(at.device, memory_gb=41))  # 36.9 GB: no activations beside 36
    times = times_of((actor, ref), [tight], Rules(work=work))
    assert [least("actor"), least("ref"), least("actor", "ref")] == [8, 1, 8]


def test_ways_to_divide_models_are_those_of_an_exhaustive_search_where_memory_binds() -> None:
    """Every division of every role of a set beside the others, each with its bytes: none that is faster fits."""
    drawn, bound = random.Random(3), 0
    for _ in range(60):
        roles = tuple(
            PlannedRole(name=name, model=_drawn_size(drawn), calls=calls)
            for name, calls in (
                ("actor", (("answers", "generate"), ("update", "train"))),
                ("critic", (("experience", "infer"), ("update", "train"))),
                ("ref", (("experience", "infer"),)),
            )[: drawn.randint(1, 3)]
        )
        at = Nodes(
            device=replace(DEVICES["A100-80"], memory_gb=drawn.uniform(10, 60)),
            nodes=1,
            devices_per_node=drawn.choice((1, 2, 4, 8)),
            network_gbs=25.0,
        )
        work = StepWork(sequences=64, prompt_tokens=256, response_tokens=256, updates=2, micro_tokens=2048)
        names, n = tuple(role.name for role in roles), at.devices
        found = times_of(roles, [at], Rules(work=work))(names, 0, n)
        best, free = (_exhaustive_s(roles, at, work, room) for room in (0.9e9 * at.device.memory_gb, 1e15))
        assert (found is None) == (best == math.inf)
        if found is not None:
            assert sum(found.seconds) == pytest.approx(best)
        bound += best > 1.001 * free
    assert bound > 20


def _drawn_size(drawn: random.Random) -> ModelSize:
    parameters = drawn.choice((0.5e9, 1e9, 3e9, 7e9))
    return ModelSize(parameters=parameters, active_parameters=parameters, layers=16, hidden=2048, kv_width=512)


def _exhaustive_s(roles: Sequence[PlannedRole], at: Nodes, work: StepWork, room: float) -> float:
    """Return the least seconds of these roles on all devices of a node; infinity if they do not fit."""
    best, n = math.inf, at.devices
    rows = {role.name: work.sequences // work.updates if role.trained else work.sequences for role in roles}
    for chosen in itertools.product(*(divisions(n, role.model, at, rows[role.name]) for role in roles)):
        held = sum(held_bytes(r.model, by, r.trained, Stored()) for r, by in zip(roles, chosen))
        peaks = [activation_bytes(r.model, by, work) if r.trained else 0.0 for r, by in zip(roles, chosen)]
        if held + max(peaks) > room:
            continue
        seconds = 0.0
        for role, by in zip(roles, chosen):
            for _, kind in role.calls:
                if kind == "infer":
                    seconds += infer_s(role.model, by, at, work, Stored())
                elif kind == "train":
                    seconds += update_s(role.model, by, at, work, Stored())
                else:
                    engines = [e for e in (1, 2, 4, 8) if e <= at.devices_per_node and n % e == 0]
                    seconds += min(_generation_s(role.model, by, e, at, work, room - held) for e in engines)
        best = min(best, seconds)
    return best


def _generation_s(model: ModelSize, by: Division, engine: int, at: Nodes, work: StepWork, free: float) -> float:
    gathered = 2 * max(0.0, model.parameters / engine - model.parameters / (by.tensor * by.pipeline))
    took = generate_s(model, by.devices, engine, at, work, free - gathered)
    return math.inf if took is None else took + gathered / at.link


# -- costs of a mapping ------------------------------------------------------------------------------------------------


def test_a_mapping_counts_the_memory_of_few_sets_and_reads_a_model_once(
    recipes: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = []
    count = fitting.pool_rank_memory
    monkeypatch.setattr(fitting, "pool_rank_memory", lambda *of: counted.append(1) or count(*of))
    for device, devices in (("H100", 2), ("A100-40", 2), ("H100", 16)):
        counted.clear()
        placed_on([*recipes["7B"], *LONG, "algorithm.name=ppo"], nodes(device, devices))
        assert 0 < len(counted) <= 700, len(counted)


@matrix("count, limit_s", [(2, 2), (128, 60)])
def test_a_search_stays_within_its_limit_of_cpu_seconds(
    recipes: dict[str, list[str]], count: int, limit_s: float
) -> None:
    """PPO with models of 7B on 16 and on 1,024 devices, a tenth and a seventh of the limits where they were measured.
    The CPU seconds of this thread do not grow with what other processes do."""
    began_s = time.thread_time()
    _, found = placed_on([*recipes["7B"], "algorithm.name=ppo"], nodes("H100", count))
    assert len({role for one in found[0].placement.sets for role in one.roles}) == 4
    assert time.thread_time() - began_s < limit_s


def test_a_plan_of_a_cluster_imports_no_torch(recipes: dict[str, list[str]], tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text("- {device: H100, devices_per_node: 8}\n")
    args = ["plan", *recipes["2B"], f"cluster_file={tmp_path / 'cluster.yaml'}", "sigma=0.5"]
    code = f"import sys; from verl.cli import main; assert main({args!r}) == 0; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "configure " in done.stdout, done.stderr
    assert RESERVE == 0.1
