"""User reward functions in the sandbox: what they are given, what becomes a Score or an Invalid, reward managers."""

from __future__ import annotations

import asyncio
import pickle
import re
import textwrap
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop
from children import children

from verl.reward.base import RewardFn, RewardRequest
from verl.reward.manager import manager_spec
from verl.reward.pool import RewardPool, grader_spec
from verl.reward.shaping import Shaped
from verl.sandbox.messages import CallableSpec
from verl.sandbox.pool import PoolLoad
from verl.sandbox.process import CannotLoad
from verl.types import Invalid, Score, Task

GRADER = """
    import os, sys, time

    def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
        time.sleep(extra_info.get("sleep_s", 0))
        return {"score": (solution_str == ground_truth) + bonus, "pid": os.getpid(), "source": data_source}

    def environment(data_source, solution_str, ground_truth, extra_info=None, key=None):
        found = {name: float(name in os.environ) for name in ("MY_API_KEY", "HF_TOKEN", "PATH", "HOME", "LC_ALL")}
        return {"score": float(key == "from kwargs"), **found}

    async def later(data_source, solution_str, ground_truth, extra_info=None):
        return float(solution_str == ground_truth)

    def light(data_source, solution_str, ground_truth, extra_info=None):
        heavy = ("torch", "numpy", "asyncio", "psutil")
        return {"score": 1.0, **{name: name in sys.modules for name in heavy}}

    def by_word(data_source, solution_str, ground_truth, extra_info=None):
        if solution_str == "crash":
            os._exit(7)
        if solution_str == "memory":
            return len(bytearray(1 << 40))
        if solution_str == "no verdict":
            raise TimeoutError("no verdict")
        if solution_str == "raise":
            raise KeyError("boo")
        if solution_str == "hang":
            time.sleep(60)
        return {"None": None, "nan": float("nan"), "text": "1.0", "dict": {"acc": 1.0}}[solution_str]
"""

MANAGER = """
    class MyManager:
        def __init__(self, config, tokenizer, compute_score, reward_router_address=None):
            import asyncio
            self.loop = asyncio.get_running_loop()
            self.factor = config.reward.get("reward_kwargs", {}).get("factor", 1.0)
            self.compute_score = compute_score

        async def run_single(self, data):
            assert len(data) == 1 and data.batch["responses"].shape[0] == 1
            item = data[0]
            responses = item.batch["responses"]
            valid = item.batch["attention_mask"][-responses.shape[-1]:].sum()
            ids = responses[:valid].tolist()
            text = await self.loop.run_in_executor(None, lambda: "#### " + "".join(map(str, ids)))
            truth = item.non_tensor_batch["reward_model"]["ground_truth"]
            assert data.non_tensor_batch["reward_model"][0]["ground_truth"] == truth
            score = self.compute_score(item.non_tensor_batch["data_source"], text, truth)
            extra = {"acc": score, "n": len(item.batch["prompts"]), "pred": text}
            return {"reward_score": score * self.factor, "reward_extra_info": extra}

    class NoManager:
        pass
"""


@pytest.fixture
def grader(tmp_path: Path) -> str:
    (tmp_path / "manager.py").write_text(textwrap.dedent(MANAGER))
    file = tmp_path / "grader.py"
    file.write_text(textwrap.dedent(GRADER))
    return str(file)


def request(solution: str = "7", *, data_source: str = "openai/gsm8k", **extra: Any) -> RewardRequest:
    return RewardRequest(
        request_id="r", data_source=data_source, solution_str=solution, ground_truth="7", extra_info=extra
    )


def with_pool(spec: CallableSpec, use: Callable[[RewardPool], Awaitable[Any]], **options: Any) -> Any:
    async def run() -> Any:
        pool = RewardPool(spec, **{"num_workers": 1, "timeout_s": 20, **options})
        await pool.start()
        try:
            return await use(pool)
        finally:
            await pool.close()

    result = uvloop.run(run())
    assert not children()
    return result


def score_all(*requests: RewardRequest) -> Callable[[RewardPool], Awaitable[list[Score | Invalid]]]:
    async def use(pool: RewardFn) -> list[Score | Invalid]:
        return list(await asyncio.gather(*map(pool.score, requests)))

    return use


def test_default_grader_scores_by_data_source() -> None:
    got = with_pool(grader_spec(), score_all(request("#### 7"), request("#### 8"), request(data_source="unknown")))
    assert got[:2] == [Score(1.0), Score(0.0)]
    assert got[2].reason == "exception" and "reward.path=" in got[2].detail


def test_functions_kwargs_and_components(grader: str) -> None:
    got = with_pool(grader_spec(grader, kwargs={"bonus": 0.5}), score_all(request(), request("8")))
    assert [g.value for g in got] == [1.5, 0.5]
    assert got[0].components.keys() == {"pid"}
    assert with_pool(grader_spec(grader, "later"), score_all(request(), request("8"))) == [Score(1.0), Score(0.0)]


def test_a_worker_sees_an_allowed_environment_and_its_kwargs(grader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MY_API_KEY", "HF_TOKEN", "LC_ALL"):
        monkeypatch.setenv(name, "C")
    spec = grader_spec(grader, "environment", kwargs={"key": "from kwargs"})
    [got] = with_pool(spec, score_all(request()))
    assert got.value == 1.0
    assert got.components == {"MY_API_KEY": 0.0, "HF_TOKEN": 0.0, "PATH": 1.0, "HOME": 1.0, "LC_ALL": 1.0}


def test_worker_is_light(grader: str) -> None:
    [got] = with_pool(grader_spec(grader, "light"), score_all(request()))
    assert got.components == {"torch": 0.0, "numpy": 0.0, "asyncio": 0.0, "psutil": 0.0}


def test_what_is_no_score_is_an_invalid_with_its_reason_and_text(grader: str) -> None:
    class Unpicklable:
        def __reduce__(self) -> Any:
            raise RuntimeError("not me")

    says = {
        "crash": ("crash", "the grader exited with code 7"),
        "memory": ("memory", "MemoryError"),
        "hang": ("timeout", "no result within reward.timeout_s=1"),
        "no verdict": ("timeout", "TimeoutError: no verdict"),
        "raise": ("exception", "KeyError: 'boo'"),
        "None": (
            "bad_result",
            "the reward function returned None; a number or a dict with a number as score is needed",
        ),
        "nan": ("bad_result", "the reward function returned nan; a score must be finite"),
        "text": ("bad_result", "the reward function returned the text '1.0'"),
        "dict": ("bad_result", "the reward function returned a dict without \"score\" (keys: 'acc')"),
    }
    odd = request("None", x=Unpicklable())

    async def use(pool: RewardPool) -> Any:
        got = await asyncio.gather(*map(pool.score, [*map(request, says), odd]))
        return got, pool.stats

    (*got, unsent), stats = with_pool(grader_spec(grader, "by_word"), use, timeout_s=1, memory_limit_mb=500)
    for word, outcome in zip(says, got, strict=True):
        assert isinstance(outcome, Invalid) and outcome.reason == says[word][0], (word, outcome)
        assert says[word][1] in outcome.detail, (word, outcome)
    assert "grader.py" in got[list(says).index("raise")].detail
    assert unsent == Invalid("exception", "the row cannot be sent to the grader: RuntimeError: not me")
    assert stats.outcomes == {"crash": 1, "memory": 1, "timeout": 2, "exception": 2, "bad_result": 4}


def test_load_errors_name_the_reward_keys(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    cases: list[tuple[str, str, dict[str, Any], str]] = [
        ("", "compute_score", {}, f"reward.path={file}:compute_score: .*bad.py has no 'compute_score'"),
        ("def compute_scores(**k): return 1", "compute_score", {}, "did you mean reward.path=.*bad.py:compute_scores"),
        ("def f(data_source, solution_str): return 1", "f", {}, "cannot be called with .data_source"),
        ("def f(**k): return 1", "f", {"extra_info": 1}, "reward.kwargs has extra_info, which every call sets"),
    ]
    for text, name, kwargs, says in cases:
        file.write_text(text)
        with pytest.raises(CannotLoad, match=says):
            with_pool(grader_spec(str(file), name, kwargs), score_all())
    with pytest.raises(ValueError, match=r"no such file: .*Fix: reward.path=/absolute/path/to/your_reward.py"):
        with_pool(grader_spec(str(tmp_path / "absent.py")), score_all())
    with pytest.raises(ValueError, match=r"reward\.timeout_s=0: must be positive"):
        RewardPool(grader_spec(), timeout_s=0)


def test_a_closed_pool_says_so(grader: str) -> None:
    async def use(pool: RewardPool) -> Any:
        await pool.close()
        return await pool.score(request())

    assert with_pool(grader_spec(grader), use) == Invalid("crash", "the reward pool was closed")


def test_shaped_over_a_pool(grader: str) -> None:
    async def use(pool: RewardPool) -> Score | Invalid:
        long = RewardRequest(
            request_id="r",
            data_source="s",
            solution_str="7",
            ground_truth="7",
            response_tokens=20,
            max_response_tokens=20,
        )
        return await Shaped(pool, buffer_tokens=10).score(long)

    got = with_pool(grader_spec(grader), use)
    assert got.value == 0.0 and got.components["score"] == 1.0 and got.components["overlong_penalty"] == -1.0


def test_reward_manager(grader: str) -> None:
    manager = str(Path(grader).with_name("manager.py"))
    sample = RewardRequest(
        request_id="r",
        data_source="openai/gsm8k",
        solution_str="ignored",
        ground_truth="72",
        prompt_ids=np.array([1, 2, 3]),
        response_ids=np.array([7, 2]),
    )
    spec = manager_spec(manager, "MyManager", reward_kwargs={"factor": 0.5})
    got = with_pool(spec, score_all(sample, sample, request()))
    assert got[:2] == [Score(0.5, {"acc": 1.0, "n": 3.0}, "#### 72")] * 2
    assert got[2].reason == "exception" and "prompt_ids" in got[2].detail
    with pytest.raises(CannotLoad, match=r"no class 'NoManager' with a method run_single"):
        with_pool(manager_spec(manager, "NoManager"), score_all())


def test_what_crosses_to_a_grader_pickles() -> None:
    sample = RewardRequest(
        request_id="r", data_source="s", solution_str="", ground_truth={"target": np.array(["a"], dtype=object)}
    )
    assert pickle.loads(pickle.dumps(sample)).ground_truth["target"].tolist() == ["a"]


def test_the_list_form_of_verls_batch_manager(tmp_path: Path) -> None:
    file = tmp_path / "batch.py"
    file.write_text(
        "def compute_score(data_sources, solution_strs, ground_truths, extra_infos, scale=1.0):\n"
        "    assert all(isinstance(x, list) for x in (data_sources, solution_strs, ground_truths, extra_infos))\n"
        "    rows = zip(solution_strs, ground_truths, extra_infos)\n"
        "    return [{'score': scale * (s == t), 'n': e['n']} for s, t, e in rows]\n"
        "async def later(data_sources, solution_strs, ground_truths, extra_infos):\n"
        "    return [float(s == t) for s, t in zip(solution_strs, ground_truths)]\n"
        "def one(data_sources, solution_strs, ground_truths, extra_infos):\n"
        "    return 1.0\n"
    )
    got = with_pool(grader_spec(str(file), kwargs={"scale": 2.0}), score_all(request(n=3), request("8", n=4)))
    assert got == [Score(2.0, {"n": 3.0}), Score(0.0, {"n": 4.0})]
    assert with_pool(grader_spec(str(file), "later"), score_all(request())) == [Score(1.0)]
    [wrong] = with_pool(grader_spec(str(file), "one"), score_all(request()))
    assert isinstance(wrong, Invalid) and "give a list of 1" in wrong.detail


def test_graders_and_data_proto_under_verls_names(tmp_path: Path) -> None:
    from verl.protocol import DataProto
    from verl.utils.reward_score import default_compute_score, gsm8k, math_dapo, math_reward

    assert default_compute_score("openai/gsm8k", "so #### 7", "7", None, sandbox_fusion_url=None) == 1.0
    assert gsm8k.compute_score("so #### 7", "7", method="strict") == 1.0 and gsm8k.extract_solution("#### 7") == "7"
    assert math_reward.compute_score(r"\boxed{7}", "7") == 1.0 and math_dapo.compute_score("Answer: 7", "7")["acc"]
    view = DataProto(np.array([1]), np.array([2, 3]), {"data_source": "s"})
    assert view[-1:] is view and view[0].non_tensor_batch["data_source"] == "s"
    file = tmp_path / "reward.py"
    file.write_text(
        "from verl.utils.reward_score import default_compute_score, gsm8k\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    wrong = default_compute_score(data_source, solution_str, '8')\n"
        "    return gsm8k.compute_score(solution_str, ground_truth) + wrong\n"
    )
    assert with_pool(grader_spec(str(file)), score_all(request("#### 7"))) == [Score(1.0)]


def test_the_load_of_a_pool_says_how_many_workers_would_do(grader):
    """64 calls of 4 s that come within 60 s keep 2 workers busy for 128 s; 4 are done 8 s after the last came."""
    slow = PoolLoad(workers=2, calls=64, queued_s=64 * 40.0, busy_s=256.0, first_s=100.0, last_s=160.0)
    cases = {
        "slow": (slow, 4),
        "enough": (replace(slow, workers=4), 0),
        "quick": (replace(slow, queued_s=64 * 0.9, busy_s=0.1), 0),
        "idle": (PoolLoad(workers=2), 0),
    }
    assert {name: load.workers_that_would_do for name, (load, _) in cases.items()} == {
        name: wanted for name, (_, wanted) in cases.items()
    }

    async def measured(pool: RewardPool) -> PoolLoad:
        await asyncio.gather(*(pool.score(request(sleep_s=0.1)) for _ in range(4)))
        return pool.take_load()

    load = with_pool(grader_spec(grader), measured)
    assert load.calls == 4 and load.busy_s >= 0.4 and load.queued_s >= 0.1 + 0.2 + 0.3
    assert 0.3 <= load.longest_queued_s <= load.queued_s and load.first_s <= load.last_s


def test_a_rehearsal_refuses_what_never_scores_and_leaves_no_trace(tmp_path):
    task = Task(
        task_id="t", index=3, messages=(), prompt_ids=np.array([1, 2]), data_source="x", ground_truth="7", extra_info={}
    )
    bodies = {
        "return 0.0": "",
        "return float(len(solution_str))": "",
        "return float(solution_str == ground_truth) if solution_str else 1 / 0": "",
        "return 1 / 0 if solution_str else 0.0": "",
        "return float(ground_truth) / len(solution_str.strip('7'))": "",
        "raise KeyError('gold')": "row 3.*'7'.*KeyError",
        "return 'well done'": "well done.*a number",
    }

    async def rehearse(pool: RewardPool) -> str:
        try:
            await pool.rehearse(task)
        except ValueError as error:
            return str(error)
        assert not pool.stats.outcomes and not pool.take_load().calls
        return ""

    for body, pattern in bodies.items():
        path = tmp_path / "mine.py"
        path.write_text(f"def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    {body}\n")
        said = with_pool(grader_spec(str(path)), rehearse)
        assert bool(said) == bool(pattern) and re.search(pattern, said, re.S), (body, said)
