"""The real loop on a tiny model: every part that a real run has."""

import gc
import json
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from each import matrix
from small_runs import metrics_of, small_args, small_run, tensors_of, trained

from verl.cli import main
from verl.config.load import load_config
from verl.driver.launch import run_rl
from verl.planner.recorded import recorded_page, recorded_prediction
from verl.track.samples import read_samples, sample_steps


def test_the_mean_of_graded_rewards_is_called_a_score(tmp_path, tiny_model, arithmetic_data, capsys):
    args = small_args(tmp_path, tiny_model, arithmetic_data, "run.total_steps=1")
    for value, word, other in (("1.188", "score", "acc"), ("1.0", "acc", "score")):
        reward = tmp_path / f"{word}.py"
        named = "compute_score(data_source, solution_str, ground_truth, extra_info=None)"
        reward.write_text(f"def {named}:\n    return {value}\n")
        more = [f"reward.path={reward}", f"run.name={word}"]
        assert main(["train", *args, *more]) == 0
        last = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("1 steps in"))
        assert f"{word}/greedy " in last and f"{other}/greedy" not in last and "share" not in last
        assert main(["eval", *args, *more, f"run.name=e{word}"]) == 0
        said = capsys.readouterr().out
        assert f"\n{word}/greedy " in said and f"{other}/greedy" not in said


def test_a_run_leaves_everything_behind(tmp_path, tiny_model, arithmetic_data, capsys):
    data = arithmetic_data
    before = signal.getsignal(signal.SIGTERM)
    (tmp_path / "cluster.yaml").write_text("- {device: H100, step_ms: 2}\n")
    more = ("track.sinks=[jsonl,tensorboard]", f"track.cluster_file={tmp_path / 'cluster.yaml'}")
    done = small_run(tmp_path, tiny_model, arithmetic_data, *more)
    assert signal.getsignal(signal.SIGTERM) == before, "what comes after the run can be ended again"
    run_dir = tmp_path / "r"
    assert done.steps == 3
    for name in (
        "config.yaml",
        "plan.json",
        "metrics.jsonl",
        "summary.json",
        "report.html",
        "events",
        "samples",
        "checkpoints/step_3/hf",
    ):
        assert (run_dir / name).exists(), name
    found = metrics_of(run_dir)
    assert set(found) == {0, 1, 2, 3}
    for step in (1, 2, 3):
        m = found[step]
        for name in (
            "actor/pg_loss",
            "actor/entropy",
            "actor/grad_norm",
            "mismatch/k3",
            "mismatch/ess",
            "critic/score/mean",
            "response_length/mean",
            "timing_s/rollout",
            "timing_s/update",
            "perf/throughput",
            "sync/canary_mean_abs",
        ):
            assert name in m, name
        assert m["mismatch/max_abs_dlogp"] < 1e-4, "trainer and sampler agree in float32"
        assert m["actor/grad_norm"] > 0
        assert m["pipeline/staleness_max"] == 0
        phases = sum(v for k, v in m.items() if k.startswith("timing_s/") and k != "timing_s/step")
        assert phases == pytest.approx(m["perf/time_per_step"], rel=0.01)
    assert sample_steps(run_dir) == [1, 2, 3]
    written = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert written == [0, 1, 2, 3], "one line per step, the saved one too"
    rows = read_samples(run_dir, 2)
    given = [json.loads(line) for line in Path(data[0]).read_text().splitlines()]
    asked = {row["prompt"][0]["content"]: row["reward_model"]["ground_truth"] for row in given}
    for row in (*rows, *read_samples(run_dir, 3, "eval")):
        question = row.prompt_text.removeprefix("<|user|>").removesuffix("<|end|><|assistant|>")
        assert len(question) < len(row.prompt_text) and row.ground_truth and "<|" not in row.response_text
        assert asked.get(question, row.ground_truth) == row.ground_truth
    assert {row.prompt_text[8:].split("<")[0] for row in rows} <= set(asked)
    page = (run_dir / "report.html").read_text()
    assert f'"truth":{json.dumps(rows[0].ground_truth)}' in page and "\\u003c|user|\\u003e" in page
    assert main(["doctor", str(run_dir)]) == 0
    assert "run: finished, 3 steps" in capsys.readouterr().out
    predicted = recorded_prediction(run_dir)
    assert predicted is not None and {*predicted.seconds} == {"rollout", "update"}
    assert main(["show", str(run_dir)]) == 0
    assert recorded_page(run_dir) in capsys.readouterr().out
    assert all(r.task_id and r.task_id != r.group_id for r in rows) and {r.stop_reason for r in rows} <= {
        "eos",
        "length",
        "stop",
    }
    assert len(rows) == 16 and {r.group_id for r in rows} == {s.split("/")[0] for s in trained(run_dir)[2]}
    for row in rows:
        on = row.response_mask.astype(bool)
        assert np.isfinite(row.tokens["advantages"][on]).all() and np.allclose(
            row.tokens["old_logprobs"][on], row.tokens["rollout_logprobs"][on], atol=1e-4
        )


def test_the_checkpoint_is_a_hugging_face_model_with_equal_logits(tmp_path, tiny_model, arithmetic_data):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    small_run(tmp_path, tiny_model, arithmetic_data[:1])
    folder = tmp_path / "r" / "checkpoints" / "step_3" / "hf"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    trained_weights = tensors_of(tmp_path / "r", 3)
    start = AutoModelForCausalLM.from_pretrained(tiny_model).state_dict()
    assert tokenizer.chat_template
    changed = 0
    for name, value in model.state_dict().items():
        if f"model.{name}" in trained_weights:
            assert torch.equal(value, trained_weights[f"model.{name}"]), name
            changed += not torch.equal(value, start[name])
    assert changed > 5


@matrix(
    "more",
    [
        ("algorithm.kl_loss_coef=0.04",),
        ("step.updates_per_step=2", "step.epochs_per_step=2"),
        ("algorithm.entropy_coef=0.01",),
        ("rollout.temperature=0.7",),
        ("rollout.engine=hf",),
        ("model.engine_options.attention=padded", "model.engine_options.share_prefix=false"),
        ("model.gradient_checkpointing=true",),
        ("pipeline.oversample=0.5",),
        ("pipeline.sync_every=2",),
        ("pipeline.staleness=1",),
        ("pipeline.staleness=0.5", "pipeline.partial_rollout=true"),
        ("reward.overlong_buffer_tokens=4",),
        ("cluster.virtual_ranks=2", "step.updates_per_step=2"),
        ("rollout.replicas=2", "pipeline.staleness=1"),
        ("pipeline.placement=split",),
    ],
    quick=[("rollout.temperature=0.7",), ("pipeline.staleness=1",), ("pipeline.oversample=0.5",)],
    ids=lambda m: ",".join(x.split(".")[-1] for x in m),
)
def test_variants_run(tmp_path, tiny_model, arithmetic_data, more):
    small_run(tmp_path, tiny_model, arithmetic_data[:1], "run.total_steps=2", "track.sinks=[jsonl]", *more)
    found = metrics_of(tmp_path / "r")
    assert set(found) == {1, 2}
    if not any(
        m.startswith(("pipeline.staleness", "pipeline.sync_every")) for m in more
    ):  # those train on older weights
        assert found[2]["mismatch/max_abs_dlogp"] < 1e-4
    assert found[2]["actor/grad_norm"] > 0
    if "algorithm.kl_loss_coef=0.04" in more:
        assert found[1]["actor/kl_loss"] == pytest.approx(0, abs=1e-6) and found[2]["actor/kl_loss"] > 1e-6


@pytest.mark.full("test_lost_replica.py")
def test_two_replicas_sample_what_one_does_and_both_serve(tmp_path, tiny_model, arithmetic_data, monkeypatch):
    """Requests are spread by load, groups stay together, and every replica has every version: draws are those of one
    engine."""
    from verl.rollout.embedded.front import EmbeddedEngine

    served: dict[int, set[str]] = {}
    generate = EmbeddedEngine.generate

    async def noted(self, request):
        served.setdefault(id(self), set()).add(request.prefix_key)
        return await generate(self, request)

    small_run(tmp_path / "one", tiny_model, arithmetic_data[:1])
    monkeypatch.setattr(EmbeddedEngine, "generate", noted)
    small_run(tmp_path / "two", tiny_model, arithmetic_data[:1], "rollout.replicas=2")
    assert len(served) == 2 and not set.intersection(*served.values()), "a group's requests go to one replica"
    for step in (1, 2, 3):
        one, two = (read_samples(tmp_path / n / "r", step) for n in ("one", "two"))
        assert [r.sample_id for r in one] == [r.sample_id for r in two]
        assert {r.version_min for r in two} == {step - 1}
        if step == 1:  # later weights differ by rounding: decode batches have other sizes
            assert [r.response_ids.tolist() for r in one] == [r.response_ids.tolist() for r in two]


@pytest.mark.full("test_resume.py: a cut run equals a straight one bitwise")
def test_two_runs_are_bitwise_equal(tmp_path, tiny_model, arithmetic_data):
    """And what their caller has frozen for the collector is so afterwards, or nothing is."""
    for name in ("a", "b"):
        (gc.freeze if name == "a" else gc.unfreeze)()
        before, seen = gc.get_freeze_count(), []
        config = load_config(small_args(tmp_path / name, tiny_model, arithmetic_data[:1]))
        run_rl(config, quiet=True, on_step=lambda step, values, seen=seen: seen.append(gc.get_freeze_count()))
        gc.collect()
        assert min(seen) > 10_000 and (before == 0) == (name == "b") == (gc.get_freeze_count() == 0)
    gc.freeze()
    a, b = (metrics_of(tmp_path / n / "r") for n in ("a", "b"))
    for step in (1, 2, 3):
        for name in ("actor/pg_loss", "actor/grad_norm", "critic/score/mean", "actor/entropy"):
            assert a[step][name] == b[step][name], (step, name)
    one, two = (tensors_of(tmp_path / n / "r", 3) for n in ("a", "b"))
    assert all(torch.equal(one[n], two[n]) for n in one)


def test_dynamic_sampling_refills_and_stops_with_the_reason(tmp_path, tiny_model, arithmetic_data):
    from verl.driver.rollouts import RunEnded

    flat = tmp_path / "flat.py"
    flat.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 0.0\n")
    with pytest.raises(RunEnded, match="draw budget"):
        small_run(
            tmp_path,
            tiny_model,
            arithmetic_data[:1],
            "algorithm.name=dapo",
            f"reward.path={flat}",
            "algorithm.max_draws_per_group=2",
        )
    small_run(tmp_path / "ok", tiny_model, arithmetic_data[:1], "algorithm.name=dapo", "run.total_steps=2")
    assert metrics_of(tmp_path / "ok" / "r")[2]["groups/zero_variance_share"] < 1


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_publish_that_fails_ends_the_run_at_once_with_its_cause(
    tmp_path, tiny_model, arithmetic_data, staleness, monkeypatch
):
    from verl.rollout.embedded.front import EmbeddedEngine
    from verl.weight_sync.base import SyncError

    real = EmbeddedEngine.score

    async def other(self, ids, **given):
        return await real(self, ids, **given) + (1.0 if self.version == 2 else 0.0)

    monkeypatch.setattr(EmbeddedEngine, "score", other)
    with pytest.raises(SyncError, match="canary"):
        small_run(
            tmp_path,
            tiny_model,
            arithmetic_data[:1],
            "run.total_steps=6",
            f"pipeline.staleness={staleness}",
            "run.wait_timeout_s=30",
        )
