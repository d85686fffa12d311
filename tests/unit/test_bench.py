"""The bench's arithmetic: FLOPs, limits, medians, ratios, tables, and how an arm that cannot run is reported."""

import asyncio
import itertools
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rich.console import Console

from bench import agents, branches, breakdown, environments, limits, ragged, report, results, slow_tools
from bench.peers import countdown
from verl.models import tiny

ROOT = Path(__file__).resolve().parents[2]
SHAPE = limits.Shape(parameters=1_000_000, layers=2, heads=4, kv_heads=2, head_dim=8)
MACHINE = limits.Machine(
    threads=2, gflop_per_s=150.0, gflop_per_core_s=100.0, gflop_per_core_s_model_shapes=80.0, gbyte_per_s=10.0
)


def work(**changed: float) -> limits.Work:
    given = {
        "groups": 3,
        "samples_per_prompt": 2,
        "prompt_tokens_mean": 4.0,
        "response_tokens_mean": 5.0,
        "longest_response_tokens": 6.0,
    }
    return limits.Work(**{**given, **changed})


def steps(wall_s: float, count: int = 3, **changed: float) -> list[dict[str, float]]:
    step = {
        "wall_s": wall_s,
        "cpu_s": 2 * wall_s,
        "rollout_s": 0.25 * wall_s,
        "update_s": 0.5 * wall_s,
        "prompt_tokens": 96.0,
        "response_tokens": 1000.0,
        "longest_response_tokens": 40.0,
        "others_cores": 0.0,
        "load_1min": 0.5,
        "rollout_cpu_s": 0.5 * wall_s,
        "update_cpu_s": wall_s,
        "phase_s/update": 0.5 * wall_s,
        "phase_s/rollout": 0.25 * wall_s,
        "phase_cpu_s/update": wall_s,
        "phase_cpu_s/rollout": 0.5 * wall_s,
    }
    return [{**step, **changed} for _ in range(count)]


def arm(name: str, *walls_s: float, peak_rss_mb: float = 100.0, **changed: float) -> results.Arm:
    return results.Arm(
        name, [{"steps": steps(w, **changed), "peak_rss_mb": peak_rss_mb, "first_step_done_s": 9.0} for w in walls_s]
    )


# -- what a step costs -------------------------------------------------------------------------------------------------


def test_prompt_tokens_count_once_per_group_and_responses_each():
    assert work().tokens == 3 * 4 + 3 * 2 * 5


def test_attended_pairs_equal_the_pairs_counted_one_by_one():
    prompt, response = range(4), range(5)
    by_hand = sum(i + 1 for i in prompt) + 2 * sum(4 + i + 1 for i in response)
    assert work().attended == 3 * by_hand


def test_flops_of_forward_and_train():
    forward = 2 * 1_000_000 * work().tokens + 4 * 2 * 4 * 8 * work().attended
    assert limits.forward_flops(SHAPE, work()) == forward
    assert limits.train_flops(SHAPE, work()) == 3 * forward


def test_decode_bytes_are_weights_per_tick_and_keys_and_values_attended():
    expected = 4 * (1_000_000 * 6 + 2 * 2 * 2 * 8 * work().attended)
    assert limits.decode_bytes(SHAPE, work(), "float32") == expected
    assert limits.decode_bytes(SHAPE, work(), "bfloat16") == expected / 2


def test_rollout_is_bound_by_the_slower_of_compute_and_memory():
    by_compute = limits.forward_flops(SHAPE, work()) / 1e9 / 200.0  # both cores at the best rate of one
    for gbyte_per_s, bound in ((1e-3, "memory"), (1e6, "compute")):
        found = limits.part_limits(SHAPE, work(), limits.Machine(2, 150.0, 100.0, 80.0, gbyte_per_s), "float32")
        by_memory = limits.decode_bytes(SHAPE, work(), "float32") / 1e9 / gbyte_per_s
        assert found["rollout"].seconds == (by_memory if bound == "memory" else by_compute), bound
        assert found["step"].seconds == found["rollout"].seconds + found["update"].seconds
        assert found["step"].gflop == found["rollout"].gflop + found["update"].gflop


def test_the_peak_is_what_all_cores_do_when_they_are_ours():
    assert MACHINE.peak_gflop_per_s == 200.0
    assert limits.Machine(2, 250.0, 100.0, 80.0, 1.0).peak_gflop_per_s == 250.0


def test_the_best_of_several_passes_is_kept_per_figure():
    assert limits.best([limits.Machine(2, 1, 5, 2, 9), limits.Machine(2, 3, 4, 6, 8)]) == limits.Machine(2, 3, 5, 6, 9)


@pytest.mark.parametrize("tied", [True, False])
def test_shape_of_a_model_folder_counts_an_embedding_only_where_it_is_the_head(tmp_path, tied):
    config = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "hidden_size": 8,
        "vocab_size": 10,
        "tie_word_embeddings": tied,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {"embed": np.zeros((10, 8), np.float32), "layer": np.zeros((8, 8), np.float32)}
    save_file(tensors if tied else {**tensors, "head": np.zeros((10, 8), np.float32)}, tmp_path / "model.safetensors")
    assert limits.read_shape(tmp_path) == limits.Shape(80 + 64, 3, 4, 2, 2)


def test_bf16_is_measured_only_where_the_cpu_multiplies_it():
    for capabilities, native in (
        ({"avx2": True, "avx512_bf16": False, "amx_bf16": False}, False),
        ({"avx512_f": True, "avx512_bf16": True}, True),
        ({"amx_bf16": True}, True),
        ({}, False),
    ):
        assert limits.has_native_bf16(capabilities) is native, capabilities
        assert limits.precisions(capabilities) == (("float32", "bfloat16") if native else ("float32",)), capabilities


# -- medians and ratios ------------------------------------------------------------------------------------------------


def test_spread_is_median_and_quartiles():
    assert results.Spread.of([5.0, 1.0, 3.0, 2.0, 4.0]) == results.Spread(3.0, 2.0, 4.0)
    assert results.Spread.of([7.0]).text(1) == "7.0 [7.0–7.0]"
    with pytest.raises(ValueError, match="no values"):
        results.Spread.of([])


def test_a_ratio_above_one_means_verl_is_better_for_costs_and_for_rates():
    ours, peer = arm("verl", 1.0), arm("TRL", 2.0)
    assert results.ratio(results.WALL, ours, peer).overall == 2.0
    tokens = next(f for f in results.FIGURES if f.label == "response tokens/s")
    assert results.ratio(tokens, ours, peer).overall == 2.0
    memory = next(f for f in results.FIGURES if f.label.startswith("peak memory"))
    assert results.ratio(memory, arm("verl", 1.0, peak_rss_mb=50.0), peer).overall == 2.0


def test_the_bracket_of_a_ratio_pairs_rounds():
    found = results.ratio(results.WALL, arm("verl", 1.0, 2.0), arm("TRL", 1.5, 6.0))  # a loaded second round slows both
    assert (found.low, found.high) == (1.5, 3.0)
    assert "[1.50–3.00]" in found.text()


def test_the_parts_of_a_step_sum_to_it():
    labels = ("rollout, s", "update, s", "the rest of the step, s")
    parts = [results.spread_of(arm("verl", 2.0), f).median for f in results.FIGURES if f.label in labels]
    assert sum(parts) == 2.0


# -- tables ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def arms():
    return {"verl": arm("verl", 1.0), "TRL": arm("TRL", 2.0), "naive": results.Arm("naive", reason="no such module: x")}


def test_an_arm_that_did_not_run_is_in_the_table_with_its_reason(arms):
    table = results.comparison(arms, "float32")
    assert all(len(row) == len(table.head) for row in table.rows)
    assert table.rows[0] == ("step, s", "1.00 [1.00–1.00]", "2.00 [2.00–2.00]", "not run", "2.00×", "")
    assert table.notes == ("naive: not run: no such module: x",)
    assert "not run (no such module: x)" in results.verdict(arms, "float32")


def test_the_verdict_has_the_share_of_groups_without_a_backward_pass(arms):
    some = {**arms, "verl": arm("verl", 1.0, equal_rewards_share=0.4)}
    assert "1.00 s; 40% of its groups have equal rewards" in results.verdict(some, "float32")
    assert "equal rewards" not in results.verdict(arms, "float32")


def test_the_verdict_warns_of_a_loaded_machine(arms):
    assert "trust the CPU time" not in results.verdict(arms, "float32")
    loaded = {**arms, "TRL": arm("TRL", 2.0, others_cores=1.2)}
    assert "Others used up to 1.2 cores" in results.verdict(loaded, "float32")


def test_verl_that_did_not_run_is_said_first(arms):
    arms["verl"] = results.Arm("verl", reason="KeyError: 'x'")
    assert results.verdict(arms, "float32") == "float32: verl did not run: KeyError: 'x'"
    assert results.comparison(arms, "float32").rows[0][1] == "not run"


def test_multiples_of_the_limit(arms):
    limit = {
        "rollout": limits.Limit(10.0, 1.0, 0.125),
        "update": limits.Limit(30.0, 0.0, 0.25),
        "step": limits.Limit(40.0, 1.0, 0.375),
    }
    rows = results.multiples(arms, limit, MACHINE, "float32").rows
    assert rows[0] == ("rollout, wall", "10.0", "1.00", "0.125 s", "2.0×", "4.0×", "not run")
    assert rows[1] == ("rollout, CPU", "10.0", "", "0.100 core-s", "5.0×", "10.0×", "not run")
    assert rows[-1] == ("step, CPU", "40.0", "", "0.400 core-s", "5.0×", "10.0×", "not run")


def test_the_ledger_lists_the_longest_phase_first(arms):
    expected = (("update", "500", "50.0%", "1000"), ("rollout", "250", "25.0%", "500"))
    assert results.ledger(arms["verl"], "float32").rows == expected


def test_the_page_holds_facts_verdict_and_tables(arms):
    table = results.comparison(arms, "float32")
    page = report.document({"command": "python bench/laptop.py"}, ["float32: fast"], [table])
    assert "- command: python bench/laptop.py" in page and "**float32: fast**" in page
    lines = page.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("| median"))
    assert len({line.count("|") for line in lines[head : head + 2 + len(table.rows)]}) == 1
    assert report.as_rich(table).row_count == len(table.rows)


# -- environments ------------------------------------------------------------------------------------------------------


def test_why_a_program_failed_is_one_line():
    none = "ERROR: No matching distribution found for trl==9"
    for output, cause in (
        (f"Collecting trl\n{none}\n\n[notice] a new pip\n", none),
        ("Traceback (most recent call last):\n  File x\ntorch.OutOfMemoryError: no\n", "torch.OutOfMemoryError: no"),
        ("one\ntwo\n", "two"),
        ("", "no output"),
    ):
        assert environments.why(output) == cause, output


def test_a_failed_install_names_the_cause_and_the_log(tmp_path):
    fail = "import sys; print('ERROR: no route to index'); sys.exit(3)"
    with pytest.raises(environments.Unavailable, match=r"exit code 3: ERROR: no route to index \(log: .*log\)") as e:
        environments.run_logged([sys.executable, "-c", fail], tmp_path / "log", timeout_s=20)
    assert "\n" not in str(e.value)
    with pytest.raises(environments.Unavailable, match="could not start"):
        environments.run_logged([str(tmp_path / "absent")], tmp_path / "log", timeout_s=20)


def test_an_environment_is_out_of_date_when_its_pins_change(tmp_path):
    pins = tmp_path / "pins.txt"
    pins.write_text("a==1")
    first = environments.Environment(tmp_path / "env", ("trl==1",), pins).stamp
    assert environments.Environment(tmp_path / "env", ("trl==2",), pins).stamp != first
    pins.write_text("a==2")
    assert environments.Environment(tmp_path / "env", ("trl==1",), pins).stamp != first


# -- the arms' meter and task ------------------------------------------------------------------------------------------


@pytest.fixture
def peers(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench" / "peers"))


def test_the_meter_drops_the_first_step_and_books_what_is_between_steps(peers, tmp_path):
    from meter import Meter

    meter = Meter()
    meter.step(rollout_s=9.0)
    time.sleep(0.02)
    meter.step(rollout_s=0.01)
    meter.step(rollout_s=0.0)
    meter.write(tmp_path / "r.json", versions={"x": "1"}, drop_last_steps=1)
    found = json.loads((tmp_path / "r.json").read_text())
    assert [s["rollout_s"] for s in found["steps"]] == [0.01]
    assert 0.02 <= found["steps"][0]["wall_s"] < 5.0
    assert found["peak_rss_mb"] > 1 and found["versions"] == {"x": "1"}


def test_the_peers_score_as_the_recipe_does(peers, arithmetic_data):
    import task

    from verl.recipes import arithmetic

    rows = task.read_rows(arithmetic_data[0], 5)
    assert len(rows) == 5
    for said in (f"4+7+0=1,1;#{task.truth(rows[0])}", "#1", "no answer", f"#{task.truth(rows[0])} "):
        expected = arithmetic.compute_score("verl/arithmetic", said, task.truth(rows[0]))
        assert task.score(said, task.truth(rows[0])) == expected


def test_every_arm_is_given_the_same_work():
    from bench import laptop

    settings = laptop.read_settings(["--quick", "--steps", "4"])
    assert (settings.rounds, settings.steps) == (1, 4)
    assert settings.page.name == "RESULTS_quick.md"
    start = laptop.Start(Path("model"), Path("rows"))
    ours, trl = (laptop.spec_of(settings, start, name, "float32") for name in ("verl", "TRL"))
    assert {k: v for k, v in ours.items() if k != "folder"} == {k: v for k, v in trl.items() if k != "folder"}
    assert laptop.work_of(steps(1.0)).response_tokens == pytest.approx(1000.0)


def test_a_peer_is_measured_at_the_best_of_its_settings():
    from bench.sweep import Setting, best, settings, sweep, table

    assert settings(2) == [Setting(1, False), Setting(1, True), Setting(2, False), Setting(2, True)]
    assert len(settings(1)) == 2
    walls = {(1, False): [3.0], (1, True): None, (2, False): [5.0, 1.0, 2.0], (2, True): [2.5]}

    def run(spec):
        found = walls[spec["threads"], spec["compiled"]]
        if found is None:
            raise RuntimeError("no compiler")
        assert spec["model"] == "m"
        return [{"wall_s": wall} for wall in found]

    tried = sweep(2, {"model": "m", "threads": 9}, run)
    assert [t.wall_s for t in tried] == [3.0, None, 2.0, 2.5] and best(tried) == Setting(2, False)
    shown = table("t", {"peer": tried}).markdown()
    assert shown.count("chosen") == 1 and "2 threads, eager | 2.00 | chosen" in shown and "no compiler" in shown
    assert best([t for t in tried if t.wall_s is None]) is None


def test_the_keys_of_verls_arm_exist(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    from verl_arm import overrides

    from bench import laptop
    from verl.config.load import load_config

    spec = laptop.spec_of(laptop.read_settings([]), laptop.Start(Path("model"), Path("rows")), "verl", "float32")
    config = load_config(overrides(spec)).config
    assert config.run.total_steps == 7 and config.data.shuffle is False and config.optim.lr == laptop.LR


def test_the_breakdown_adds_up_to_the_whole() -> None:
    def model():
        return tiny.qwen3(tiny.character_tokenizer("abc"), hidden=32, layers=2, heads=2, kv_heads=1, ffn=48)

    rng = np.random.default_rng(0)
    prompts, lengths = [rng.integers(0, 32, 6).tolist() for _ in range(64)], [int(n) for n in rng.integers(2, 20, 64)]
    *rollout, (label, whole, _, _) = breakdown.rollout(model(), prompts, lengths, 50.0, True)
    assert label.startswith("as it runs") and float(whole) > 0
    for rows in (rollout, breakdown.update(model(), prompts, lengths, 50.0, True)):
        *parts, (label, whole, _, _) = rows
        assert label == "together" and float(whole) > 0
        assert parts[0][0] == "matrix products" and float(parts[0][3].removesuffix("×")) > 0
        assert abs(sum(float(seconds) for _, seconds, _, _ in parts) - float(whole)) < 0.006 * len(rows)


@pytest.mark.parametrize("add", [False, True])
def test_repetitions_of_earlier_calls_are_kept_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, add: bool
) -> None:
    monkeypatch.setattr(ragged, "ROOT", tmp_path)
    (tmp_path / "runs" / "bench").mkdir(parents=True)
    (tmp_path / "runs" / "bench" / "ragged.json").write_text(
        json.dumps(
            {
                "step-100M": {"reasons": {}, "arms": {"verl": steps(1.0, 1), "TRL": steps(9.0, 1)}},
                "load": {"step-100M": [2.0]},
            }
        )
    )
    bench = ragged.Bench(1, 2, Console(quiet=True), add=add)
    bench._keep("step-100M", {"verl": [{"steps": steps(3.0, 2)}], "TRL": []}, {}, "steps")
    arms = bench.found["step-100M"]["arms"]
    assert [s["wall_s"] for s in arms["verl"]] == ([1.0, 3.0, 3.0] if add else [3.0, 3.0])
    assert [s["wall_s"] for s in arms.get("TRL", ())] == ([9.0] if add else []), "an arm that failed now has run before"
    (table,) = ragged.tables({**bench.found, "step-100M": bench.found["step-100M"]})
    assert table.rows[0][1] == ("3.00 (3)" if add else "3.00 (2)")


@pytest.mark.full("a bench, which no suite relies on")
def test_the_router_bench_counts_what_is_lost_and_doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    from bench import router

    monkeypatch.setattr(router, "TAKES_S", (0.001, 0.002))
    replicas, at_once, median, tail = asyncio.run(router.added(2, 200))
    assert (replicas, at_once) == ("2", "16") and all(abs(float(cell.split()[0])) < 60_000 for cell in (median, tail))
    _, _, asked, killed, *wrong = asyncio.run(router.deaths(3, 3.0))
    assert int(asked.replace(",", "")) > 50 and int(killed) > 0 and wrong == ["0", "0", "0"]

    async def twice(self: Any, request: Any) -> Any:
        return await generate(
            self, replace(request, sampling=replace(request.sampling, seed=request.sampling.seed + 1))
        )

    generate, load = router.Double.generate, router.Double.load_weights
    monkeypatch.setattr(router.Double, "generate", twice)
    *_, exchanged = asyncio.run(router.deaths(3, 1.0))
    assert int(exchanged) > 0, "an answer to another request is seen"

    async def says_so(self: Any, source: Any, *, on_inflight: str) -> Any:
        await load(self, source, on_inflight=on_inflight)  # one that is dead takes none
        self.version = 1
        return source

    monkeypatch.setattr(router.Double, "generate", generate)
    monkeypatch.setattr(router.Double, "load_weights", says_so)
    *_, stale = asyncio.run(router.deaths(3, 3.0))
    assert int(stale) > 0, "an answer of weights that are not served any more is seen"


# -- agents ------------------------------------------------------------------------------------------------------------


def test_branches_hold_the_tokens_of_the_linear_rows_and_train_them_once():
    found = dict(branches.batches())
    linear = found.pop("linear")
    apart = found.pop("a branch every turn, prefixes not shared")
    assert {b.num_tokens for b in found.values()} == {linear.num_tokens} and apart.num_tokens > 3 * linear.num_tokens
    assert {b.num_loss_tokens for b in (*found.values(), apart)} == {linear.num_loss_tokens}


def test_the_model_is_shown_what_the_slow_tool_says():
    tool = countdown.AtOnce()
    tool.reset(prompt=[])
    messages = slow_tools.conversation(40, countdown.CALLS)
    calls = [m["tool_calls"][0]["function"]["arguments"] for m in messages if m.get("tool_calls")]
    said = [asyncio.run(tool.calculator(**call)) for call in calls]
    assert said == [m["content"] for m in messages if m["role"] == "tool"] and len(said) == countdown.CALLS
    assert messages[-1]["content"] == "#" + slow_tools.row_of(40)["reward_model"]["ground_truth"]
    with pytest.raises(ValueError, match=r"NUMBER\*NUMBER"):
        asyncio.run(tool.calculator("40*0"))


def test_waits_begin_with_the_second_step_and_are_the_same_in_every_arm(monkeypatch):
    monkeypatch.setattr(countdown.Countdown, "_begun", itertools.count())
    made = [countdown.Countdown() for _ in range(2 * countdown.TRAJECTORIES)]
    for one in made:
        one.reset()
    first, second = made[: countdown.TRAJECTORIES], made[countdown.TRAJECTORIES :]
    assert not any(sum(one.waits_s) for one in first)
    assert [one.waits_s for one in second] == [countdown.waits_s(k) for k in range(countdown.TRAJECTORIES)]
    every = [wait for one in second for wait in one.waits_s]
    assert 0.4 < sum(every) / len(every) < 0.6


def test_a_part_of_what_agents_cost_is_measured_anew_and_the_others_stay(tmp_path, monkeypatch, capsys):
    section = tmp_path / "bench" / "sections" / "agents.md"
    section.parent.mkdir(parents=True)
    before = (Path(agents.__file__).parent / "sections" / "agents.md").read_text()
    section.write_text(before)
    monkeypatch.setattr(agents, "ROOT", tmp_path)
    for seconds in ("412", "405"):
        monkeypatch.setattr(agents, "recipe", lambda s=seconds: results.Table("recipe", ("all of it, s",), ((s,),)))
        assert agents.main(["--only", "recipe"]) == 0
    kept, old = agents.parts_of(section.read_text()), agents.parts_of(before)
    assert {**kept, "recipe": ""} == {**old, "recipe": ""} and len(old) >= 6
    assert "| 405 |" in kept["recipe"] and "412" not in section.read_text()
    assert "| 405 |" in (tmp_path / "bench" / "RESULTS.md").read_text()
