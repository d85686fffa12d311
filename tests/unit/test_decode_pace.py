"""The decode steps of engines as a placement counts them, by hand: the experts that a batch reads, and requests that
continue under new weights."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from handmade_model import qwen2_tensors, write_model, write_rows, write_safetensors

from verl.cli import main
from verl.config.load import load_config
from verl.config.model_files import describe_model
from verl.planner.fitting import best_placements
from verl.planner.hardware import DEVICES, Nodes
from verl.planner.latency import EnginePace, ModelSize, StepWork, engine_pace
from verl.planner.placement import on_devices, paced, planned_roles, size_of, work_of
from verl.planner.simulate import Workload, lognormal

DENSE = ModelSize(parameters=30e9, active_parameters=3e9, layers=48, hidden=2048, kv_width=512)
SPARSE = replace(DENSE, expert_parameters=28.8e9, active_expert_parameters=1.8e9)
"""As Qwen3-30B-A3B: a token passes through 8 of 128 experts of a layer."""
WORK = StepWork(sequences=512, prompt_tokens=256, response_tokens=256, updates=2)
AT = Nodes(device=DEVICES["H100"], nodes=1, devices_per_node=8, network_gbs=50.0)


def pace_of_batch(model: ModelSize, batch: int, work: StepWork = WORK) -> EnginePace:
    found = engine_pace(model, 1, 1, AT, replace(work, sequences=batch), math.inf)
    assert found is not None and found.batch == batch
    return found


def test_a_batch_reads_each_expert_that_one_of_its_sequences_is_sent_to() -> None:
    """By hand: 1.2 billion parameters beside the experts, and of 28.8 in experts 1 - (15/16)^n."""
    assert SPARSE.read_parameters(1) == pytest.approx(3e9)
    assert SPARSE.read_parameters(2) == pytest.approx(1.2e9 + (31 / 256) * 28.8e9)
    assert SPARSE.read_parameters(64) == pytest.approx(1.2e9 + 0.98392 * 28.8e9, rel=1e-5)
    assert SPARSE.read_parameters(10_000) == pytest.approx(30e9)
    assert [DENSE.read_parameters(n) for n in (1, 64, 10_000)] == [3e9] * 3


@pytest.mark.parametrize(("batch", "weight_bytes"), [(1, 0.0), (2, 0.0), (64, 0.0), (64, 0.6), (512, 1.0)])
def test_a_decode_step_waits_for_the_experts_of_its_batch(batch: int, weight_bytes: float) -> None:
    """Memory binds: the step is longer than that of a model that is multiplied as often, by the experts that it reads
    beyond those of one token. A step with few sequences, from which a simulated run goes on, is the same."""
    work = replace(WORK, weight_bytes=weight_bytes)
    sparse, dense = (pace_of_batch(model, batch, work) for model in (SPARSE, DENSE))
    further = 28.8e9 * (1 - (15 / 16) ** batch) - 1.8e9
    took = (weight_bytes or 2) * further / (0.7 * 3.35e12)
    assert sparse.full_s - dense.full_s == pytest.approx(took, abs=1e-9)
    assert sparse.empty_s == dense.empty_s and sparse.prompts_s == dense.prompts_s


def test_the_experts_of_a_folder_are_counted_by_its_config(tmp_path: Path) -> None:
    """Two layers, one of them with 8 experts of which a token passes through 2, and a shared one."""
    tensors = qwen2_tensors(layers=2, hidden=64, ffn=128, heads=4, kv_heads=2, vocab=1000, tied=True)
    beside = sum(map(math.prod, tensors.values()))
    for expert in range(8):
        for name, shape in (("gate", [32, 64]), ("up", [32, 64]), ("down", [64, 32])):
            tensors[f"model.layers.1.mlp.experts.{expert}.{name}_proj.weight"] = shape
    tensors["model.layers.1.mlp.shared_expert.up_proj.weight"] = [32, 64]
    more = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    folder = write_model(tmp_path / "moe", config={**more, "shared_expert_intermediate_size": 32})
    write_safetensors(folder / "model.safetensors", tensors)
    of_expert, shared = 3 * 32 * 64, 32 * 64
    size = size_of(describe_model(str(folder)))
    assert (size.expert_parameters, size.active_expert_parameters) == (8 * of_expert, 2 * of_expert)
    assert (size.parameters, size.active_parameters) == (
        beside + shared + 8 * of_expert,
        beside + shared + 2 * of_expert,
    )
    other = write_model(tmp_path / "mixtral", config={"num_local_experts": 8, "num_experts_per_tok": 2})
    write_safetensors(other / "model.safetensors", tensors)
    assert size_of(describe_model(str(other))) == size
    text = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({k: v for k, v in text.items() if k != "num_local_experts"}))
    assert size_of(describe_model(str(other))).active_expert_parameters == 8 * of_expert, "at most all of them"
    assert size_of(describe_model(str(write_model(tmp_path / "dense")))).expert_parameters == 0


def test_a_row_that_continues_takes_a_prefill_of_its_prompt_and_half_its_answer() -> None:
    """By hand: 384 tokens on two devices with half of 989 TFLOPS each, and two reduces of half of both ways."""
    found = engine_pace(DENSE, 8, 2, AT, WORK, math.inf)
    assert found is not None
    products = 384 * (2 * 3e9 + 2 * 48 * 2048 * 384) / (2 * 0.5 * 989e12)
    reduced = 2 * 48 * (2 * 0.5 * 2 * 384 * 2048) / (0.8 * 450e9)
    assert found.resume_s == pytest.approx(products + reduced)


@pytest.fixture(scope="module")
def ahead(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the arguments of a run with requests that continue under new weights."""
    folder = tmp_path_factory.mktemp("ahead")
    rows = write_rows(folder / "rows.jsonl", 500)
    sizes = {"layers": 28, "hidden": 1536, "ffn": 8960, "heads": 12, "kv_heads": 2, "vocab": 151936}
    args = [f"model.path={write_model(folder / 'model', **sizes)}", f"data.train_files=[{rows}]"]  # type: ignore[arg-type]
    return [*args, "pipeline.staleness=1", "pipeline.placement=split", "step.prompts_per_step=8"]


def test_a_simulated_request_that_continues_takes_its_time(
    ahead: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    times = ("token_s=0.01", "sequence_s=0.001", "update_s=0.5", "mean_tokens=200", "sigma=0.7", "json=true")
    line = "not counted: keys and values computed anew after a publish"

    def simulated(*more: str) -> tuple[float, str]:
        assert main(["simulate", *ahead, *times, *more]) == 0
        found = json.loads(capsys.readouterr().out)
        one = found["points"][0]["step_s"] if "points" in found else found["runs"][-2]["period_s"]
        return one, found["not_counted"]

    whole = simulated("pipeline.partial_rollout=false", "resume_s=0.3")
    assert whole == simulated("pipeline.partial_rollout=false"), "nothing continues"
    for partial in (("pipeline.partial_rollout=true",), ("grid={pipeline.partial_rollout: [true]}",)):
        (free, free_line), (none, _), (longer, paid_line) = (
            simulated(*partial, *more) for more in ((), ("resume_s=0",), ("resume_s=0.3",))
        )
        assert free == none and longer > 1.05 * free
        assert line in free_line and line not in paid_line
    assert main(["simulate", *ahead, *times, "resume_s=-1"]) == 2
    assert "resume_s=-1: a number, 0 or more" in capsys.readouterr().err


def test_a_planned_run_counts_the_prefill_of_requests_that_continue(
    ahead: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    played = list[Workload]()
    monkeypatch.setattr("verl.planner.placement.replayed", lambda _, work, publishes: played.append(work))
    config = on_devices(load_config([*ahead, "pipeline.partial_rollout=true"]).config, [AT])
    (best, *_), work = best_placements(config, [AT], work_of(config)), work_of(config)
    paced(config, [best], work, lognormal(64, 0.0, 64))
    (of,), engines = played, best.engines[0]
    model = planned_roles(config)[0].model
    pace = engine_pace(model, engines.devices, engines.engine_devices, AT, work, math.inf)
    assert pace is not None and of.partial_rollout and of.resume_s == pytest.approx(pace.resume_s) and of.resume_s > 0
