"""The examples run as they are, made short."""

import asyncio
import importlib.util
import json
from pathlib import Path

import pytest
from started import Started, script, short_quickstart

ROOT = Path(__file__).parents[2]


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.full("test_quickstart_tells_its_story; the file is an example")
def test_one_file_grpo_runs_and_is_short():
    example = load("one_file_grpo")
    before, after = example.main(steps=1, warm_up_steps=2)
    assert 0 <= before <= 1 and 0 <= after <= 1
    text = (ROOT / "examples" / "one_file_grpo.py").read_text()
    assert len(text.splitlines()) <= 200 and "import verl" not in text and "from verl" not in text
    assert example.trace(254, 337, "+", False).endswith("#591") and example.trace(254, 337, "+", True).endswith("#581")
    assert example.reward("4+7+0=1,1;#591", 254, 337, "+") == 1.0


def test_custom_flow_runs(tiny_model):
    shares = asyncio.run(load("custom_flow").main(str(tiny_model), rounds=2, problems_per_round=4, n=2))
    assert len(shares) == 2


@pytest.mark.timeout(240)
def test_quickstart_tells_its_story(tmp_path):
    """The whole quickstart with four warm-up steps and two of RL: stages, files, summary. It learns in `make
    quickstart`."""
    args = [f"run.root_dir={tmp_path}", "run.seed=3", "run.total_steps=2", "run.threads=1", "warmup_steps=4"]
    code = Started(args, log := tmp_path / "log", entry=short_quickstart).wait(220)
    assert code == 0, log.read_text()[-4000:]
    home = tmp_path / "quickstart"
    summary = json.loads((home / "summary.json").read_text())
    assert summary["seed"] == 3 and set(summary) >= {
        "greedy_before",
        "greedy_after",
        "sampled_before",
        "sampled_after",
        "seconds",
    }
    assert (home / "report.html").exists() and (home / "checkpoints" / "step_2" / "hf" / "model.safetensors").exists()
    for words in ("held-out accuracy", "before", "after", "report"):
        assert words in log.read_text()


def test_nothing_held_out_is_ever_trained_on(tmp_path):
    from verl.recipes import arithmetic

    sft = arithmetic.write_sft(tmp_path / "sft.jsonl", 500, seed=1, forget_share=0.5)
    train = arithmetic.write_rl(tmp_path / "train.jsonl", 500, seed=2, held=False)
    held = arithmetic.write_rl(tmp_path / "held.jsonl", 50, seed=3, held=True, three_digits=True)
    problems = lambda path, key: {json.loads(line)[key][0]["content"] for line in path.read_text().splitlines()}  # noqa: E731
    kept = problems(held, "prompt")
    assert not kept & problems(sft, "messages") and not kept & problems(train, "prompt") and len(kept) == 50


@pytest.mark.parametrize("forget", [False, True])
def test_traces_follow_their_own_columns(forget):
    import itertools

    from verl.recipes import arithmetic

    for p in itertools.islice(arithmetic.problems(5, held=False), 200):
        trace = arithmetic.trace(p, forget_carries=forget)
        right = arithmetic.compute_score("", trace, str(arithmetic.answer(p)))
        carries = any(part.endswith(",1") for part in arithmetic.trace(p, forget_carries=False).split(";"))
        assert right == (0.0 if forget and carries else 1.0), (p, trace)


def test_custom_flow_without_a_model_says_how_it_is_called(tmp_path):
    process = Started([str(ROOT / "examples" / "custom_flow.py")], log := tmp_path / "log", entry=script)
    assert process.wait(120) == 1
    assert log.read_text().strip().startswith("usage:") and "MODEL_FOLDER" in log.read_text()
