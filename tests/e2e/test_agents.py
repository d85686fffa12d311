"""Whole runs with trajectories of several turns: a model that has learned to call its tool, a loop of the user's with
branches, and a run that was cut between steps."""

from __future__ import annotations

import json

import numpy as np
import pytest
from each import FULL_GRID
from serving import CONTROLLED, WITH_KEY, server_process
from shared import made_once
from small_runs import metrics_of, same_tensors, small_args, tensors_of, trained
from taught import TOOLS, args, teach
from tools import hermes_tokenizer, multiply

from verl.agent_loop.load_tools import function_as_tool
from verl.config.load import load_config
from verl.driver.launch import run_rl
from verl.driver.replay import replay
from verl.show import show
from verl.track.events import read_events
from verl.track.samples import read_samples

LOOP = """
from verl.agent_loop.base import AgentLoopBase, AgentLoopOutput


class Rewrites(AgentLoopBase):
    \"\"\"Two answers; the second after a history without the first one's last token. A third that nobody uses.\"\"\"

    async def run(self, sampling_params, **kwargs):
        prompt, ask = list(kwargs["prompt_ids"]), self.server_manager.generate
        request, short = kwargs["request_id"], {**sampling_params, "max_tokens": 4}
        one = await ask(request + "a", prompt_ids=prompt, sampling_params=short)
        history = [*prompt, *one.token_ids[:1], prompt[-1]]
        two = await ask(request + "b", prompt_ids=history, sampling_params=short)
        await ask(request + "c", prompt_ids=prompt, sampling_params=short)
        first = AgentLoopOutput(prompt, one.token_ids, [1] * len(one.token_ids))
        ids = [*history[len(prompt) :], *two.token_ids]
        mask = [1] * len(one.token_ids[:1]) + [0] + [1] * len(two.token_ids)
        return [first, AgentLoopOutput(prompt, ids, mask, num_turns=4)]
"""


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """(model folder, folder of rows and reward): a tiny model that mostly calls `multiply` and reads its result."""
    folder = made_once(tmp_path_factory, "taught", teach)
    return folder / "model", folder


@pytest.mark.slow
def test_a_run_with_a_tool_trains_what_was_sampled_between_its_results(tmp_path, taught, capsys):
    run_rl(load_config(args(tmp_path, taught, *TOOLS, "run.total_steps=2")), quiet=True)
    metrics = metrics_of(tmp_path / "r")
    assert sum(m["agent/tool_calls"] for m in metrics.values()) > 4 and metrics[1]["num_turns/max"] >= 4
    assert {"agent/tool_errors", "agent/env_tokens", "agent/discarded_tokens", "agent/tool_s"} < metrics[1].keys()
    assert all(m["mismatch/k3"] < 1e-6 for m in metrics.values()), "what was trained is what was sampled"
    tokenizer, rows = hermes_tokenizer(), read_samples(tmp_path / "r", 1)
    called = [row for row in rows if 0 in row.response_mask]
    assert len(called) > 4
    for row in called:
        env = tokenizer.decode(row.response_ids[row.response_mask == 0])
        cut = env.count("<|im_start|>user") - env.count("<|im_start|>assistant")
        assert ("<tool_response>" in env and cut == 0) or row.stop_reason == "context_full"
        assert np.isfinite(row.tokens["rollout_logprobs"][row.response_mask == 1]).all()
        assert np.isnan(row.tokens["rollout_logprobs"][row.response_mask == 0]).all()
    assert max(m["critic/score/max"] for m in metrics.values()) == 1.0
    assert metrics[1]["agent/turn_limit_share"] < 1 and 0 <= metrics[1]["agent/tool_error_share"] <= 1
    events = list(read_events(tmp_path / "r", {"turn", "tool"}))
    tools = [e.data for e in events if e.kind == "tool"]
    assert len(tools) >= sum(m["agent/tool_calls"] for m in metrics.values()) > 0
    assert {d["name"] for d in tools} >= {"multiply"} and all(d["took_s"] >= d["queue_s"] >= 0 for d in tools)
    one = tools[0]["trajectory"]
    mine = [e.data for e in events if e.data["trajectory"] == one]
    assert all(a["start_s"] <= b["start_s"] for a, b in zip(mine, mine[1:]))
    assert mine[0]["parse_s"] >= 0 and mine[0]["tokens"] > 0 and mine[0]["number"] == 0
    assert show([str(tmp_path / "r"), f"trajectory={one}"]) == 0
    page = capsys.readouterr().out
    assert one in page and "multiply" in page and "█" in page and page.count("turn ") >= 2
    with pytest.raises(ValueError, match="no turns of trajectory=g0"):
        show([str(tmp_path / "r"), "trajectory=g0"])


@pytest.mark.slow
def test_a_cut_run_with_turns_equals_a_straight_one_bitwise(tmp_path, taught):
    """The straight one's tools run beside the driver, the other's in it: that is no other run."""
    run_rl(load_config(args(tmp_path / "straight", taught, *TOOLS)), quiet=True)
    here = (*TOOLS, "agent.loop=single_turn@driver")

    def crash(step: int, values: object) -> None:
        if step == 1:
            raise OSError("pulled the plug")

    with pytest.raises(OSError, match="pulled the plug"):
        run_rl(load_config(args(tmp_path / "cut", taught, *here)), quiet=True, on_step=crash)
    run_rl(load_config(args(tmp_path / "cut", taught, *here)), quiet=True)
    straight, cut = tmp_path / "straight" / "r", tmp_path / "cut" / "r"
    assert trained(straight) == trained(cut)
    same_tensors(tensors_of(straight, 3), tensors_of(cut, 3))
    for one, other in zip(read_samples(straight, 3), read_samples(cut, 3), strict=True):
        assert one.response_ids.tolist() == other.response_ids.tolist()


@pytest.mark.full("test_rollout_served.py")
def test_a_run_with_a_tool_over_http_is_the_run_in_process(tmp_path, taught):
    """Ids go to a server and come back as they are: no turn of it is another one."""
    more = (*TOOLS, "run.total_steps=2")
    run_rl(load_config(args(tmp_path / "here", taught, *more)), quiet=True)
    with server_process(taught[0], tmp_path / "serve.log", *CONTROLLED) as (_, url):
        served = ("rollout.engine=server", f"rollout.url={url}", WITH_KEY)
        run_rl(load_config(args(tmp_path / "there", taught, *more, *served)), quiet=True)
    here, there = tmp_path / "here" / "r", tmp_path / "there" / "r"
    metrics, calls = metrics_of(there), [metrics_of(run)[2]["agent/tool_calls"] for run in (here, there)]
    assert trained(here) == trained(there) and calls[0] == calls[1] > 0
    assert all(m["mismatch/k3"] < 1e-6 for m in metrics.values())
    for step in (1, 2):
        for one, other in zip(read_samples(here, step), read_samples(there, step), strict=True):
            assert (one.sample_id, one.stop_reason) == (other.sample_id, other.stop_reason)
            assert one.response_ids.tolist() == other.response_ids.tolist()
            assert one.response_mask.tolist() == other.response_mask.tolist()
    same_tensors(tensors_of(here, 2), tensors_of(there, 2))


@pytest.mark.slow
def test_a_loop_of_the_user_s_with_branches_is_trained(tmp_path, tiny_model, arithmetic_data):
    (tmp_path / "loop.py").write_text(LOOP)
    loop = f"agent.loop={tmp_path / 'loop.py'}:Rewrites"
    run_rl(load_config(small_args(tmp_path, tiny_model, arithmetic_data[:1], loop)), quiet=True)
    rows, metrics = read_samples(tmp_path / "r", 2), metrics_of(tmp_path / "r")
    by: dict[str, list] = {}
    for row in rows:
        by.setdefault(row.trajectory_id, []).append(row)
    assert any(len(own) == 2 for own in by.values()) and {len(own) for own in by.values()} <= {1, 2}
    for first, *second in by.values():
        assert first.response_mask.all() and first.sample_id.endswith("#0")
        for row in second:
            assert row.response_mask.tolist()[:2] == [0, 0], "its first token is trained in the first row"
            assert row.reward == first.reward
    assert all(m["agent/discarded_tokens"] > 0 and m["mismatch/k3"] < 1e-6 for m in metrics.values())


@pytest.mark.slow
def test_rewards_of_turns_reach_the_advantages_of_their_tokens(tmp_path, tiny_model, arithmetic_data):
    """Two turns in two rows, the first with a reward by its text; a third turn that no row uses."""
    loop = tmp_path / "pays.py"
    third, paid = 'await ask(request + "c"', "manager.credit(len(set(one.token_ids)) / 4, turn=0)"
    text = LOOP.replace(third, f"{paid}\n        {third}").replace("Rewrites", "Pays")
    loop.write_text(text.replace("prompt, ask =", "manager = self.server_manager\n        prompt, ask ="))
    given = ("algorithm.name=turn_discount", "algorithm.options.turn_discount=0.5", "algorithm.normalize_by_std=false")
    more = ("run.total_steps=1", f"agent.loop={loop}:Pays", "algorithm.kl_loss_coef=null")
    run_rl(load_config(small_args(tmp_path, tiny_model, arithmetic_data[:1], *given, *more)), quiet=True)
    returns: dict[str, list[float]] = {}
    found: list[tuple[str, float, np.ndarray]] = []
    for row in sorted(read_samples(tmp_path / "r", 1), key=lambda row: row.sample_id):
        if row.purpose == "train":
            mine = row.tokens["advantages"][row.response_mask.astype(bool)]
            first = not row.sample_id.endswith("#1")
            value = row.reward if not first else len(set(row.response_ids.tolist())) / 4 + 0.5 * row.reward
            returns.setdefault(row.group_id, []).append(value)
            found.append((row.group_id, value, mine))
    assert len(found) > 16 and any(len(set(values)) > 2 for values in returns.values())
    for group, value, mine in found:
        np.testing.assert_allclose(mine, value - np.mean(returns[group]), atol=1e-5)


WORTH = "len(set({text})) / 4 - {k}"
PAYS = f"""
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    paid = [{WORTH.format(text="t", k="k")} for k, t in enumerate(extra_info["turn_texts"])]
    return {{"score": float(len(solution_str)), "turn_rewards": paid}}
"""


@pytest.mark.parametrize("name", ["turn_discount", "gigpo", "turn_ppo"] if FULL_GRID else ["gigpo"])
def test_a_reward_function_pays_turns_as_a_loop_does(tmp_path, tiny_model, arithmetic_data, capsys, name):
    """The same rewards from both give the same advantages; without any they are others. A replay has them."""
    credits = ""
    for k, answer in enumerate(("one", "two", "three")):
        worth = WORTH.format(text=f"read({answer}.token_ids, skip_special_tokens=True)", k=k)
        credits += f"\n        manager.credit({worth}, turn={k})"
    third = 'await ask(request + "c", prompt_ids=prompt, sampling_params=short)'
    paying = LOOP.replace(
        "prompt, ask =", "manager, read = self.server_manager, self.tokenizer.decode\n        prompt, ask ="
    )
    paying = paying.replace(third, f"three = {third}{credits}")
    for file, text in (("plain.py", LOOP), ("pays.py", paying), ("reward.py", PAYS)):
        (tmp_path / file).write_text(text)
    (tmp_path / "scores.py").write_text(PAYS.replace('"turn_rewards"', '"other"'))

    def advantages(root: str, loop: str, reward: str) -> dict[str, list[float]]:
        given = (f"algorithm.name={name}", "run.total_steps=1", f"agent.loop={tmp_path / loop}:Rewrites@driver")
        more = ("algorithm.kl_loss_coef=null", f"reward.path={tmp_path / reward}")
        run_rl(load_config(small_args(tmp_path / root, tiny_model, arithmetic_data[:1], *given, *more)), quiet=True)
        return {
            row.sample_id: np.nan_to_num(row.tokens["advantages"]).tolist()
            for row in read_samples(tmp_path / root / "r", 1)
        }

    by_loop = advantages("loop", "pays.py", "scores.py")
    by_function = advantages("function", "plain.py", "reward.py")
    assert by_loop == by_function and any(any(values) for values in by_loop.values())
    assert by_function != advantages("none", "plain.py", "scores.py")
    assert replay([f"run.root_dir={tmp_path / 'function'}", "run.name=r"], 1) == 0, capsys.readouterr().out


def test_a_row_that_names_what_is_not_there_is_refused(tmp_path, taught):
    for more, said in (
        ((), "agent_name='tool_agent', and this run has single_turn"),
        (("agent.loop=tool_agent",), "without a"),
    ):
        with pytest.raises(ValueError, match=said):
            run_rl(load_config(args(tmp_path, taught, *more)), quiet=True)


BROKEN = """
import os, time
from pathlib import Path

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse


class Multiply(BaseTool):
    async def execute(self, instance_id, parameters, does="", **kwargs):
        once = Path(__file__).with_name("once")
        if does == "exit":
            os._exit(9)
        if does == "block" and not once.exists():
            once.touch()
            while True:
                time.sleep(1)
        return ToolResponse(text=str(parameters["a"] * parameters["b"])), 0.0, {}
"""


@pytest.mark.full("faults/test_loop_process.py")
def test_of_a_row_that_ends_the_loop_process_and_one_that_blocks_it_once_only_the_first_is_lost(
    tmp_path, taught, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "blocking_tool.py").write_text(BROKEN)
    schema = dict(function_as_tool(multiply).schema)
    listed = {"class_name": "blocking_tool.Multiply", "config": {"type": "native"}, "tool_schema": schema}
    (tmp_path / "tools.yaml").write_text(json.dumps({"tools": [listed]}))
    lines = map(json.loads, (taught[1] / "rows.jsonl").read_text().splitlines())
    asked = {line["prompt"][0]["content"]: line for line in lines}
    for name, does in (("5x5", "exit"), ("2x2", "block"), ("3x4", "")):
        asked[name]["tools_kwargs"] = {"multiply": {"execute_kwargs": {"does": does}}}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(asked[n]) + "\n" for n in ("5x5", "2x2", "3x4")))
    sizes = ("step.prompts_per_step=2", "step.samples_per_prompt=2", "run.total_steps=1", "pipeline.max_attempts=1")
    given = (f"agent.tools=[{tmp_path / 'tools.yaml'}]", "agent.tool_timeout_s=1", "rollout.temperature=0.1")
    rows = (f"data.train_files=[{tmp_path / 'rows.jsonl'}]", f"data.cache_dir={tmp_path / 'cache'}")
    limits = ("agent.max_turns=2", "pipeline.max_invalid_share=0.6")
    run_rl(load_config(args(tmp_path, taught, *given, *sizes, *limits, *rows)), quiet=True)
    assert (tmp_path / "once").exists(), "it was blocked"
    scored = [e.data for e in read_events(tmp_path / "r", {"scored"})]
    wrong = [data for data in scored if set(data["outcomes"]) != {"ok"}]
    assert len(scored) == 3 and len(wrong) == 1 and "failed" in wrong[0]["outcomes"]
    assert all("is gone: it ended with exit code or signal 9" in error for error in wrong[0]["errors"])
    metrics = metrics_of(tmp_path / "r")[1]
    lost = wrong[0]["outcomes"].count("failed")
    assert metrics["groups/failed"] == 1 and metrics["reward/invalid_share"] == pytest.approx(lost / 6)
    prompts = {hermes_tokenizer().decode(row.prompt_ids) for row in read_samples(tmp_path / "r", 1)}
    assert len(prompts) == 2 and not any("5x5" in text for text in prompts)
