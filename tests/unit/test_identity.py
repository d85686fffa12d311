"""The keys that define a run and those that may change: every key is in one class; contents are compared, not their
places."""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from handmade_model import write_model, write_rows

from verl.config import backends
from verl.config.load import load_config
from verl.config.tree import leaves
from verl.driver.identity import CONTENT, compare, identity_of, may_change


@pytest.fixture
def made(tmp_path):
    write_model(tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl", 4)
    (tmp_path / "grade.py").write_text("def compute_score(*a, **k):\n    return 1.0\n")

    def identity(*more: str, command: str = "train"):
        own = [f"model.path={tmp_path}/model", f"data.train_files=[{tmp_path}/rows.jsonl]"]
        return identity_of(load_config([*own, f"reward.path={tmp_path}/grade.py", *more]), command)

    return identity


def test_every_key_is_in_exactly_one_class():
    listed = {key for key in leaves() if may_change(key)}
    assert set(CONTENT) <= set(leaves()), "a key that does not exist"
    assert not listed & set(CONTENT) and not may_change("run.sed")
    defines = set(leaves()) - listed - set(CONTENT)
    assert all(
        key in defines for key in leaves() if key.startswith(("algorithm.", "preference.")) and key not in CONTENT
    )
    for key in ("run.seed", "model.dtype", "rollout.temperature", "step.prompts_per_step", "pipeline.staleness"):
        assert key in defines, key
    for key in ("run.total_steps", "optim.lr", "model.engine_options", "parallel.tensor", "track.sinks", "serve.port"):
        assert key in listed, key


def test_what_differs_is_said_by_key(made):
    start = made()
    cases = [
        # more settings, keys that make it another run, keys that may change
        ((), [], []),
        (("algorithm.name=rloo",), ["algorithm.name"], []),
        (("rollout.temperature=0.7", "optim.lr=1e-3"), ["rollout.temperature"], ["optim.lr"]),
        (("step.prompts_per_step=8",), ["step.prompts_per_step"], []),
        (("algorithm.clip_high=0.4",), ["algorithm.clip_high"], []),
        (("algorithm.clip_high=0.2",), [], []),  # the preset's own
        (
            ("run.total_steps=9", "run.threads=1", "model.device=cpu", "track.sinks=[jsonl]"),
            [],
            ["run.total_steps", "run.threads", "model.device", "track.sinks"],
        ),
        (("reward.kwargs.x=1",), ["reward.kwargs"], []),
        (("model.dtype=float32",), ["model.dtype"], []),
        (("optim.name=muon",), ["optim.name"], []),
    ]
    wrong = []
    for more, others, changed in cases:
        found, allowed = compare(start, made(*more))
        # a preset may bring several settings of its own
        named = {line.partition(":")[0] for line in found}
        if not set(others) <= named or (not others and named) or set(allowed) != set(changed):
            wrong.append((more, found, allowed))
    assert not wrong, wrong
    assert compare(start, made(command="eval"))[0][0].startswith("verb: ")


def test_an_engine_names_the_options_that_a_run_may_change(made, monkeypatch):
    row = replace(backends.ROLLOUT["native"], may_change=("max_prefill_tokens",))
    prefill, cache = "rollout.engine_options.max_prefill_tokens", "rollout.engine_options.prefix_cache_tokens"
    was, now = made(), made(f"{prefill}=16", f"{cache}=0")
    assert compare(was, now)[0] == [] and list(compare(was, now)[1]) == ["rollout.engine_options"], "sizes of caches"
    noise = "rollout.engine_options.noise_sigma_start"
    assert compare(made(f"{noise}=0.1"), made(f"{noise}=0.2"))[0] == [f"{noise}: 0.1 -> 0.2"]
    monkeypatch.setitem(backends.ROLLOUT, "native", row)
    assert compare(was, now) == ([f"{cache}: 65536 -> 0"], {})
    others, changed = compare(was, made(f"{prefill}=16"))
    assert others == [] and list(changed) == ["rollout.engine_options"]
    assert compare(was, made("rollout.engine=hf"))[0] == [], "another engine has other options"


def test_pools_may_change_but_for_what_is_computed_there(made):
    def placed(**pool):
        said = ", ".join(f"{k}: {v}" for k, v in {"ranks": 1, **pool}.items())
        return made("cluster.backend=ray", f"cluster.pools={{aside: {{{said}}}}}", "cluster.roles={ref: aside}")

    other, changed = compare(placed(), placed(cpus_per_rank=2))
    assert not other and list(changed) == ["cluster.pools"]
    other, _ = compare(placed(), placed(dtype="bfloat16"))
    assert other == ['cluster.dtypes: null -> {"ref": "bfloat16"}']


def test_contents_count_and_their_places_do_not(made, tmp_path):
    start = made()
    shutil.copytree(tmp_path / "model", tmp_path / "moved")
    shutil.copy(tmp_path / "rows.jsonl", tmp_path / "other_name.jsonl")
    shutil.copy(tmp_path / "grade.py", tmp_path / "grade2.py")
    moved = (f"model.path={tmp_path}/moved", f"data.train_files=[{tmp_path}/other_name.jsonl]")
    assert compare(start, made(*moved, f"reward.path={tmp_path}/grade2.py")) == ([], {})
    missed = []
    for path, key in (
        (tmp_path / "rows.jsonl", "data.train_files"),
        (tmp_path / "grade.py", "reward.path"),
        (tmp_path / "model" / "config.json", "model.path"),
        (next((tmp_path / "model").glob("*.safetensors")), "model.path"),
        (tmp_path / "model" / "tokenizer_config.json", "model.tokenizer_path"),
    ):
        before = path.read_bytes()
        path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]) if path.suffix == ".safetensors" else before + b"\n")
        others, changed = compare(start, made())
        if [line.partition(":")[0] for line in others] != [key] or "another content" not in others[0] or changed:
            missed.append((path.name, others, changed))
        path.write_bytes(before)
    assert not missed, missed


def test_a_secret_of_the_environment_is_kept_as_a_hash(made, monkeypatch):
    monkeypatch.setenv("GRADER_KEY", "sesame")
    with_key = made("reward.kwargs.key=${oc.env:GRADER_KEY}")
    assert "sesame" not in str(with_key)
    assert compare(with_key, made("reward.kwargs.key=${oc.env:GRADER_KEY}")) == ([], {})


def test_a_module_is_hashed_without_being_imported(made, tmp_path, monkeypatch):
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (tmp_path / "my_package" / "losses.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    start = made("reward.path=my_package.losses")
    (tmp_path / "my_package" / "losses.py").write_text("x = 2\n")
    assert "reward.path" in compare(start, made("reward.path=my_package.losses"))[0][0]


def test_code_of_verl_itself_is_compared_by_its_name(made, tmp_path):
    """Another version may have changed a module of verl; a run that names it is still the same run."""
    (tmp_path / "tools.py").write_text("x = 1\n")
    tools = f"agent.tools=[{tmp_path}/tools.py,verl.tools.mcp]"
    start = made("reward.path=verl.recipes.arithmetic", tools)
    older = type(start)(start.values, {**start.contents, "reward.path": " of then"}, start.defaults)
    mine, ours = older.contents["agent.tools"].split("\n")
    older.contents["agent.tools"] = f"{mine}\n of then"
    assert mine != ours and compare(older, start) == ([], {})
    assert compare(older, made("reward.path=verl.recipes.arithmetic:compute_score", tools)) == ([], {})
    other = made("reward.path=verl.recipes.tool_arithmetic", tools)
    assert [line.partition(":")[0] for line in compare(older, other)[0]] == ["reward.path"]
    (tmp_path / "tools.py").write_text("x = 2\n")
    (said,) = compare(older, made("reward.path=verl.recipes.arithmetic", tools))[0]
    assert said.startswith("agent.tools") and "another content" in said, "the user's own"


def test_a_module_is_the_same_however_the_command_was_started(tmp_path):
    """`python -m verl` finds verl in the working directory, the script `verl` where it is installed."""
    said = []
    for folder in (Path(__file__).parents[2], tmp_path):
        code = "from verl.driver.identity import CONTENT; from verl.config.load import load_config;"
        code += "c = load_config(['model.path=/m', 'reward.path=verl.recipes.arithmetic']).config;"
        code += "print(CONTENT['reward.path'](c))"
        said.append(subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True).stdout)
    assert said[0] == said[1] and len(said[0].split()[-1]) == 64, said


def test_a_value_that_is_written_otherwise_is_the_same(made):
    low, high = (made("algorithm.correction=truncate", f"algorithm.options.correction_high={x}") for x in ("2", "2.0"))
    assert compare(low, high) == ([], {})
    assert compare(low, made("algorithm.correction=truncate", "algorithm.options.correction_high=3"))[0]


def test_what_is_left_out_is_the_same_as_its_default_given(made, tmp_path):
    ppo = ("algorithm.name=ppo",)
    cases = [  # verb, what both give, what one of them leaves out, what would be another run
        ("train", (), "algorithm.loss=ppo_clip", "algorithm.loss=gspo"),
        ("train", ("algorithm.name=dppo_kl",), "algorithm.loss=dppo_kl", "algorithm.loss=ppo_clip"),
        ("train", ("run.seed=3",), "data.seed=3", "data.seed=4"),
        ("train", ("model.dtype=float32",), "rollout.dtype=float32", "rollout.dtype=bfloat16"),
        ("train", (), "eval.max_response_tokens=1024", "eval.max_response_tokens=9"),
        ("train", ppo, f"critic.path={tmp_path}/model", f"critic.path={tmp_path}/other"),
        ("dpo", (), "algorithm.loss=ppo_clip", "algorithm.loss=gspo"),
        ("dpo", (), "preference.beta=0.1", "preference.beta=0.2"),
        ("dpo", ("preference.loss=simpo",), "preference.beta=2", "preference.beta=2.5"),
        ("dpo", (), "preference.options.label_smoothing=0", "preference.options.label_smoothing=0.1"),
        (
            "dpo",
            ("preference.loss=ipo",),
            "preference.options={average: true, wpo: false}",
            "preference.options.average=false",
        ),
    ]
    write_model(tmp_path / "other")
    (tmp_path / "other" / "config.json").write_text((tmp_path / "other" / "config.json").read_text() + "\n")
    wrong = []
    for verb, both, left_out, other in cases:
        start, given, another = (
            made(*both, command=verb),
            made(*both, left_out, command=verb),
            made(*both, other, command=verb),
        )
        key = other.partition("=")[0]
        for a, b in ((start, given), (given, start)):
            if compare(a, b) != ([], {}):
                wrong.append((left_out, compare(a, b)))
        if not any(key.startswith(line.partition(":")[0]) for line in compare(start, another)[0]):
            wrong.append((other, compare(start, another)))
    assert not wrong, wrong


def test_a_loss_of_the_users_own_is_its_source(made, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "ppo_clip.py").write_text("x = 1\n")  # a module called as a loss of verl's is no loss
    start, own = made(), made("algorithm.loss=ppo_clip:pull")
    assert "algorithm.loss" in [line.partition(":")[0] for line in compare(start, own)[0]]
    (tmp_path / "ppo_clip.py").write_text("x = 2\n")
    assert compare(start, made("algorithm.loss=ppo_clip")) == ([], {})
    assert "another content" in compare(own, made("algorithm.loss=ppo_clip:pull"))[0][0]


def test_who_plays_and_with_what_is_compared_and_an_older_run_had_neither(made, tmp_path):
    (tmp_path / "tools.py").write_text("x = 1\n")
    tools = ("agent.loop=tool_agent", f"agent.tools=[{tmp_path / 'tools.py'}]")
    start, played = made(), made(*tools)
    assert [line.partition(":")[0] for line in compare(start, played)[0]] == ["agent.loop", "agent.tools"]
    assert compare(played, made("agent.loop=tool_agent@driver", tools[1])) == ([], {}), "wherever it is played"
    assert compare(start, made("agent.loop=single_turn@driver")) == ([], {})
    (tmp_path / "tools.py").write_text("x = 2\n")
    (said,) = compare(played, made(*tools))[0]
    assert said.startswith("agent.tools") and "another content" in said
    assert compare(played, made(*tools[:1], tools[1], "agent.tool_timeout_s=3"))[1].keys() == {"agent.tool_timeout_s"}
    older = {key: value for key, value in start.values.items() if not key.startswith("agent.")}
    before = type(start)(older, start.contents)
    assert compare(before, start) == ([], {}) and compare(before, made(*tools, "agent.max_turns=3"))[0]


def test_a_setting_of_the_algorithm_that_an_older_run_did_not_record_has_its_default(made):
    """A run of an earlier version continues: a default computes what was computed before the setting existed."""
    was = made("algorithm.name=grpo")
    for key in ("algorithm.singleton", "algorithm.epsilon"):
        del was.values[key]
    was.defaults = {}
    assert compare(was, made("algorithm.name=grpo")) == ([], {})
    changed = made("algorithm.name=grpo", "algorithm.options.singleton=raw")
    assert [line.partition(":")[0] for line in compare(was, changed)[0]] == ["algorithm.singleton"]
