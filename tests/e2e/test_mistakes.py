"""Mistakes of a new user: one clear line, non-zero exit, before anything expensive, nothing lost."""

import json
import shutil
import subprocess
import sys

import pytest
from small_runs import metrics_of, small_args, small_run

from verl.cli import main
from verl.config.load import load_config
from verl.config.tree import changed
from verl.driver.assemble import tasks_of
from verl.driver.setup import load_tokenizer_of
from verl.workers.group import first_cause


def refused(capsys, args, *words, code=2):
    assert main(["train", *args]) == code
    last = capsys.readouterr().err.strip().splitlines()[-1]
    for word in words:
        assert word in last, last
    return last


@pytest.fixture
def args(tmp_path, tiny_model, arithmetic_data):
    return lambda *more: small_args(tmp_path, tiny_model, arithmetic_data[:1], *more)


def test_wrong_verb_and_wrong_key(capsys, args):
    assert main(["trian"]) == 2 and "did you mean 'train'" in capsys.readouterr().err
    refused(capsys, args("rollout.temprature=1"), "rollout.temprature", "did you mean rollout.temperature")
    refused(capsys, args("step.prompts_per_step=many"), "step.prompts_per_step", "many")


def test_impossible_sizes_and_combinations(capsys, args):
    refused(capsys, args("step.updates_per_step=3"), "updates_per_step")
    refused(capsys, args("step.samples_per_prompt=1"), "samples_per_prompt")
    refused(capsys, args("rollout.top_p=0.9"), "top_p")
    refused(capsys, args("step.max_tokens_per_microbatch=8"), "max_tokens_per_microbatch")
    refused(capsys, args("rollout.max_response_tokens=4000"), "positions")
    refused(capsys, args("algorithm.name=Dr.GRPO"), "did you mean drgrpo")


def test_missing_files_and_folders(capsys, args, tmp_path):
    refused(capsys, args(f"data.train_files=[{tmp_path}/none.jsonl]"), "none.jsonl")
    refused(capsys, args(f"model.path={tmp_path}/none"), "none")
    refused(capsys, args(f"reward.path={tmp_path}/none.py"), "none.py")


def test_a_malformed_row_names_file_line_and_reason(capsys, args, tmp_path, arithmetic_data):
    lines = arithmetic_data[0].read_text().splitlines()
    lines[6] = lines[6][:-5]
    broken = tmp_path / "broken.jsonl"
    broken.write_text("\n".join(lines))
    refused(capsys, args(f"data.train_files=[{broken}]"), "broken.jsonl", "7")


def test_a_tokenizer_without_chat_template(capsys, args, tmp_path, tiny_model):
    folder = tmp_path / "bare"
    shutil.copytree(tiny_model, folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    refused(capsys, args(f"model.path={folder}"), "chat template", "model.chat_template")


@pytest.mark.parametrize(
    "text,words",
    [
        ("def compute_score(a):\n  retrun 1\n", ("SyntaxError",)),
        ("def other(a):\n    return 1\n", ("compute_score",)),
        ("import no_such_module\n", ("no_such_module",)),
    ],
)
def test_a_reward_file_that_does_not_load(capsys, args, tmp_path, text, words):
    path = tmp_path / "bad_reward.py"
    path.write_text(text)
    refused(capsys, args(f"reward.path={path}"), *words)


def test_a_grader_that_always_fails_is_refused_before_a_model_is_loaded(capsys, args, tmp_path, monkeypatch):
    monkeypatch.setattr("verl.driver.assemble.workers_of", lambda *args: pytest.fail("a model was loaded"))
    for body, words in (("raise KeyError('gold')", ("KeyError", "for its own ground truth")), ("pass", ("None",))):
        path = tmp_path / "reward.py"
        path.write_text(f"def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    {body}\n")
        refused(capsys, args(f"reward.path={path}", f"run.name={words[0]}"), "reward.path", "row 0", *words)


def test_a_grader_that_fails_on_what_is_sampled_stops_with_the_reasons(capsys, args, tmp_path):
    path = tmp_path / "reward.py"
    path.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    if solution_str not in ('', ground_truth):\n        raise KeyError('gold')\n    return 0.0\n"
    )
    refused(capsys, args(f"reward.path={path}"), "had no valid reward", "KeyError", code=1)


def test_rows_that_ask_for_a_judge_need_one(args, capsys, tmp_path, arithmetic_data):
    rows = [json.loads(line) for line in arithmetic_data[0].read_text().splitlines()]
    rows[3]["reward_model"] = {**rows[3].get("reward_model", {}), "style": "model", "ground_truth": "4"}
    judged = tmp_path / "judged.jsonl"
    judged.write_text("\n".join(map(json.dumps, rows)))
    for files in ("train", "eval"):
        asked = args(f"data.{files}_files=[{judged}]", "reward.path=null")
        assert "reward.model=FOLDER" in refused(capsys, asked, "judged.jsonl:4", "style=model", "reward.path=FILE")
    config = load_config(args(f"data.train_files=[{judged}]", "reward.path=null")).config
    config = changed(config, {"reward.model": "a folder"})
    assert len(tasks_of(config, load_tokenizer_of(config))[0]) == len(rows)
    assert main(["train", *args(f"data.train_files=[{judged}]", "run.total_steps=1")]) == 0
    assert set(metrics_of(tmp_path / "r")) == {1}


def test_a_killed_grader_costs_one_sample(args, tmp_path):
    """The grader segfaults on the first answer to every third prompt: the trajectory is tried again, the run
    continues."""
    path = tmp_path / "reward.py"
    path.write_text(
        "import ctypes, pathlib\n"
        f"seen = pathlib.Path({str(tmp_path)!r})\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    mark = seen / f'crashed_{extra_info[\"index\"]}'\n"
        "    if extra_info['index'] % 3 == 0 and not mark.exists():\n"
        "        mark.touch()\n"
        "        ctypes.string_at(0)\n"
        "    return 1.0 / (1 + len(solution_str))\n"
    )
    assert main(["train", *args(f"reward.path={path}", "run.total_steps=2", "data.shuffle=false")]) == 0
    assert list(tmp_path.glob("crashed_*")), "the grader did crash"
    assert set(metrics_of(tmp_path / "r")) == {1, 2}


def test_a_disk_that_fills_up_is_a_warning_and_the_old_checkpoint_stays(args, tmp_path, monkeypatch, capsys):
    from verl.checkpoint.store import CheckpointStore, DiskFull

    real = CheckpointStore._check_space

    def check(self, needed):
        if any(p.name == "step_1" for p in self.directory.iterdir()) and not any(
            p.name == "full_once" for p in tmp_path.iterdir()
        ):
            (tmp_path / "full_once").touch()
            raise DiskFull(28, "no space left on device: 0 B free")
        return real(self, needed)

    monkeypatch.setattr(CheckpointStore, "_check_space", check)
    assert main(["train", *args("run.save_every_steps=1", "run.keep_last_checkpoints=5")]) == 0
    assert "checkpoint of step 2 was not written" in capsys.readouterr().out
    assert {p.name for p in (tmp_path / "r" / "checkpoints").iterdir()} == {"step_1", "step_3"}


def test_a_mismatch_of_sampler_and_trainer_stops_the_run(args, capsys, monkeypatch):
    from verl.rollout.embedded.front import EmbeddedEngine

    real = EmbeddedEngine.generate

    async def off(self, request_id, prompt_ids, sampling, **inputs):
        from dataclasses import replace

        done = await real(self, request_id, prompt_ids, sampling, **inputs)
        return replace(done, logprobs=done.logprobs - 3.0)

    monkeypatch.setattr(EmbeddedEngine, "generate", off)
    refused(capsys, args("sync.canary=false"), "mismatch", code=1)


def test_plan_loads_nothing(args, capsys):
    code = (
        "import sys; from verl.cli import main; c = main(['plan', *sys.argv[1:]]);"
        "sys.exit(9 if 'torch' in sys.modules or 'transformers' in sys.modules else c)"
    )
    done = subprocess.run([sys.executable, "-c", code, *args()], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "4 prompts x 4 = 16 trajectories" in done.stdout and "peak" in done.stdout


def test_the_first_cause_is_the_last_line_and_is_recorded(args, tmp_path, capsys, monkeypatch):
    from verl.model_engine.torch_engine import TorchEngine

    def broken(self):
        raise RuntimeError("the optimizer broke")

    monkeypatch.setattr(TorchEngine, "optim_step", broken)
    assert main(["train", *args()]) == 1
    assert capsys.readouterr().err.strip().splitlines()[-1] == "error: RuntimeError: the optimizer broke"
    (record,) = (tmp_path / "r" / "crash").glob("*.json")
    assert json.loads(record.read_text())["first_cause"] == "the optimizer broke"


def test_a_key_from_the_environment_is_in_no_file_of_a_run_that_failed(
    tmp_path, tiny_model, arithmetic_data, monkeypatch
):
    (tmp_path / "judge.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, key=None):\n"
        "    if solution_str in ('', ground_truth):  # the call before the run\n        return 0.0\n"
        "    raise PermissionError(f'401 for {key}')\n"
    )
    monkeypatch.setenv("JUDGE_KEY", "sk-very-secret-0123")
    judge = (f"reward.path={tmp_path}/judge.py", 'reward.kwargs={key: "${oc.env:JUDGE_KEY}"}')
    with pytest.raises(Exception, match="sk-very-secret"):  # the call had it
        small_run(tmp_path, tiny_model, arithmetic_data[:1], *judge, "pipeline.max_attempts=1")
    files = [path for path in (tmp_path / "r").rglob("*") if path.is_file()]
    assert any(path.parent.name == "crash" for path in files) and "config.yaml" in [path.name for path in files]
    assert [path for path in files if b"sk-very-secret" in path.read_bytes()] == []
    assert "${oc.env:JUDGE_KEY}" in (tmp_path / "r" / "config.yaml").read_text()


def test_a_chain_of_causes_that_bites_its_tail_has_a_first_one():
    first, second = ValueError("first"), RuntimeError("second")
    first.__cause__, second.__cause__ = second, first
    assert first_cause(second) is first
