"""A new algorithm is one entry and one function in one file; a user's own loss or estimator must be importable;
whatever is resolved can be pickled."""

import pickle
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from handmade_model import write_model, write_rows

from verl.algorithms import presets
from verl.algorithms.estimators import token_rewards
from verl.algorithms.preference import preference_terms, reward_terms
from verl.algorithms.presets import PRESETS, preference, settled
from verl.algorithms.resolve import resolve
from verl.algorithms.weights import term_weights
from verl.batch import pack
from verl.config.load import load_config, validate
from verl.model_engine.objective import evaluate_terms
from verl.planner.memory import needs_reference
from verl.planner.plan import make_plan
from verl.show import show
from verl.types import Refs, Sample, Segment, ref_of
from verl.workers.compute import step_columns

NEEDED = {"drgrpo": {"horizon_tokens": 3}, "gdpo": {"reward_components": ["a", "b"]}}

TOY = '''
"""A toy algorithm that trains mostly on rewards above their group's mean, by a loss with one setting of its own."""

from dataclasses import dataclass

from verl.algorithms.presets import Preset
from verl.algorithms.settings import knob
from verl.algorithms.specs import KLLoss, LossSpec, GRPO


def leaky(columns, *, leak=0.1):
    from verl.objective import TermValue

    a = columns["advantages"]
    return TermValue(-a.where(a > 0, leak * a) * columns["logprobs"])


@dataclass(frozen=True, kw_only=True)
class Leaky(LossSpec):
    fn: str = "toy_algorithm:leaky"
    leak: float = knob(0.1, option=True, least=0, most=1)


PRESET = Preset("toy", "nobody, 2030.00001", GRPO(normalize_by_std=False), Leaky(leak=0.25), kl_loss=KLLoss(coef=0.5))
'''


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "toy_algorithm.py").write_text(TOY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "toy_algorithm", raising=False)
    import toy_algorithm

    monkeypatch.setitem(presets.PRESETS, "toy", toy_algorithm.PRESET)
    yield toy_algorithm
    sys.modules.pop("toy_algorithm", None)


def step_of(algo, rewards=(1.0, 0.0, 0.5)):
    """One group of answers of two tokens: the batch with advantages and weights, as a Role makes it."""
    rows = []
    for i, reward in enumerate(rewards):
        sampled = Segment(ids=np.array([2, 3]), source="sampled", logprobs=np.full(2, -1.0, np.float32), version=0)
        segments = (Segment(ids=np.array([1]), source="prompt"), sampled)
        rows.append(
            Sample(
                sample_id=str(i),
                trajectory_id=str(i),
                group_id="g",
                purpose="train",
                segments=segments,
                reward=reward,
                components={"a": reward, "b": 1.0},
            )
        )
    batch, refs = pack(rows, share_prefix=False), Refs(ref_of(r) for r in rows)
    columns = step_columns(refs, {"ref_logprobs": torch.full((6,), -1.0, dtype=torch.float64)})
    columns = columns.with_token({"rewards": token_rewards(columns)})
    columns = columns.with_token(algo.advantage(columns))
    return batch.with_columns({**columns.token, **term_weights(columns, algo.terms)})


def test_one_entry_and_one_function_resolve_validate_plan_show_and_train(toy, tmp_path, capsys):
    """The whole toy is in its one file; its name is in no other file."""
    folder = tmp_path / "m"
    folder.mkdir()
    rows = write_rows(folder / "rows.jsonl", 200)
    base = [f"model.path={write_model(folder / 'model')}", f"data.train_files={rows}", "algorithm.name=toy"]
    config = load_config(base).config
    validate(config)
    assert needs_reference(config) and make_plan(config).algorithm == "toy"
    with pytest.raises(ValueError, match=r"algorithm.options.leak=2: must be >= 0 and <= 1"):
        settled("toy", {"leak": 2})
    with pytest.raises(ValueError, match="set at least 2"):
        validate(load_config([*base, "step.samples_per_prompt=1"]).config)

    assert show(["algorithm=toy"]) == 0 and show(["algorithms"]) == 0
    shown = capsys.readouterr().out
    assert "toy: nobody, 2030.00001" in shown and "toy_algorithm:leaky" in shown and "leak" in shown

    algo = pickle.loads(pickle.dumps(resolve("toy", {"leak": 0.5, "clip_high": 0.3})))
    assert [t.name for t in algo.terms] == ["pg_loss", "kl_loss"] and algo.settings()["leak"] == 0.5
    assert [n[:3] for n in algo.needs(1)] == [("ref_logprobs", "ref", "logprobs")]
    batch = step_of(algo)
    logprobs = torch.full((6,), -1.0, dtype=torch.float64, requires_grad=True)
    loss, metrics = evaluate_terms(algo.terms, batch, {"logprobs": logprobs})
    loss.backward()
    expected = -torch.tensor([0.5, 0.5, -0.25, -0.25, 0, 0], dtype=torch.float64) / 6
    torch.testing.assert_close(logprobs.grad, expected)
    assert metrics["kl_loss"].value == 0.0


def test_options_of_a_new_entry_are_known_options(toy, tmp_path):
    assert presets.knobs()["leak"] is True and "leak" in presets.unknown_option("lek")
    assert "leak" not in {k for k, option in presets.knobs().items() if not option}


def test_everything_that_is_resolved_can_be_pickled():
    broken = {}
    more = {"off_policy_delta": 0.5, "entropy_coef": 0.01, "kl_loss_coef": 0.1, "positive_nll_coef": 0.1}
    bypass = {"bypass": True, "loss": "reinforce", "correction": "truncate", "correction_high": 2.0}
    for name in PRESETS:
        for given in ({}, more, bypass):
            algo = resolve(name, {**NEEDED.get(name, {}), **given})
            again = pickle.loads(pickle.dumps(algo))
            if again.settings() != algo.settings() or [t.name for t in again.terms] != [t.name for t in algo.terms]:
                broken[name] = given
    for name in presets.PREFERENCES:
        pickle.loads(pickle.dumps(preference_terms(name)))
    pickle.loads(pickle.dumps(reward_terms(margin=True)))
    assert not broken, broken


def test_needs_are_rows_of_column_role_and_output_in_order():
    old, ref, values = ("old_logprobs", "actor", "logprobs"), ("ref_logprobs", "ref", "logprobs"), "old_values"

    def needs(preset, updates):
        return tuple(need[:3] for need in preset.needs(updates))

    assert settled("grpo", {"kl_loss_coef": 0.0}).needs(1) == ()
    assert needs(settled("grpo", {"kl_loss_coef": 0.0}), 2) == (old,)
    assert needs(settled("grpo"), 1) == (ref,) and needs(settled("rloo"), 1) == (ref, old)
    assert needs(settled("otb"), 1) == (old, ("sum_pi_squared", "actor", "sum_pi_squared"))
    assert needs(settled("ppo"), 1) == (ref, old, (values, "critic", "values"))
    assert settled("ppo").roles() == {"ref", "critic"} and settled("dapo").roles() == set()


def test_settings_replace_single_ones_and_are_checked():
    algo = resolve("grpo", {"aggregation": "token-mean", "kl_loss_coef": 0.0, "clip_high": 0.3, "lam": None})
    assert [(t.name, t.aggregate) for t in algo.terms] == [("pg_loss", "token-mean")]
    assert algo.settings()["clip_high"] == 0.3 and algo.kl_loss is None
    assert resolve("grpo", {"cov_ratio": 0.1}).loss == PRESETS["grpo"].loss, "a recipe may set what others read"
    swapped = settled("dapo", {"loss": "gspo"}).loss
    assert (swapped.clip_high, swapped.aggregation) == (0.28, "token-mean"), "what both losses have stays"
    wrong = []
    for given, words in (
        ({"aggregation": "mean"}, "algorithm.aggregation=mean: unknown"),
        ({"loss": "ppo"}, "algorithm.loss=ppo: unknown"),
        ({"clip_low": 1.0}, "algorithm.clip_low=1.0: must be >= 0 and below 1"),
        ({"clip_dual": 0.5}, "dual clip needs a bound above 1"),
        ({"kl_loss_form": "k9"}, "algorithm.kl_loss_form=k9: unknown"),
        ({"on_exhausted": "wait"}, "there are: stop, smaller"),
        ({"loss": "no_such_module_x:f"}, "is it on PYTHONPATH"),
        ({"loss": "math:pi"}, "is a float, not a function"),
        ({"advantage": "math:no_such"}, "module 'math' has no 'no_such'"),
        ({"aggregation": "seq-mean-token-sum-norm"}, "algorithm.horizon_tokens is missing"),
        ({"clip_hihg": 0.1}, "unknown"),
    ):
        with pytest.raises(ValueError) as refused:
            resolve("grpo", given)
        wrong += [] if words in str(refused.value) else [(words, str(refused.value))]
    assert not wrong, wrong
    with pytest.raises(ValueError, match="algorithm.name=dapoo: unknown; did you mean dapo"):
        resolve("dapoo")
    with pytest.raises(ValueError, match="preference.loss=dop: unknown"):
        preference("dop")
    with pytest.raises(ValueError, match="preference.options.label_smoothin.*did you mean label_smoothing"):
        preference_terms("dpo", options={"label_smoothin": 0.1})


OWN = """
import torch


def loss(columns):
    return -columns["advantages"] * columns["logprobs"]


def advantage(columns):
    return {"advantages": torch.full((len(columns.mask),), 3.0, dtype=torch.float64)}


def reads(columns):
    return columns["old_logprob"]


def reads_reference(columns):
    return columns["ref_logprobs"] - columns["logprobs"]


def made():
    def inner(columns):
        return columns["logprobs"]

    return inner


nameless = lambda columns: columns["logprobs"]
inner = made()
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_algorithm.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_algorithm", raising=False)
    import own_algorithm

    yield own_algorithm
    sys.modules.pop("own_algorithm", None)


def test_a_users_own_loss_and_advantage(own):
    by_name = {"loss": "own_algorithm:loss", "advantage": "own_algorithm:advantage"}
    for given in (by_name, {"loss": own.loss, "advantage": own.advantage}):
        algo = pickle.loads(pickle.dumps(resolve("dapo", given)))
        batch = step_of(algo)
        logprobs = torch.full((6,), -1.0, dtype=torch.float64, requires_grad=True)
        loss, _ = evaluate_terms(algo.terms, batch, {"logprobs": logprobs})
        assert float(loss.detach()) == pytest.approx(3.0)
    assert settled("ppo", {"advantage": "own_algorithm:advantage"}).needs(1)[-1].column == "old_values"


def test_a_local_function_is_refused_before_a_model_loads(own):
    for key in ("loss", "advantage"):
        for given in ("own_algorithm:nameless", "own_algorithm:inner", own.inner, lambda c: c["logprobs"]):
            with pytest.raises(ValueError, match=rf"algorithm.{key}=.* must be importable: define it with `def`"):
                resolve("grpo", {key: given})


def test_a_column_that_nobody_writes_is_refused_with_those_there_are(own, monkeypatch):
    with pytest.raises(
        ValueError, match=r"'old_logprob', which nobody writes; did you mean old_logprobs\?; there are: log"
    ):
        resolve("grpo", {"loss": "own_algorithm:reads"})
    with pytest.raises(ValueError, match=r"'ref_logprobs', which nobody writes \(a KL term has it made"):
        resolve("dapo", {"loss": "own_algorithm:reads_reference"})
    resolve("grpo", {"loss": "own_algorithm:reads_reference"})
    entry = replace(
        PRESETS["grpo"], name="toy", estimator=replace(PRESETS["otb"].estimator, inputs=("judge_logprobs",))
    )
    monkeypatch.setitem(presets.PRESETS, "toy", entry)
    with pytest.raises(ValueError, match="reads the column 'judge_logprobs', which nobody writes; did you mean"):
        settled("toy")
    values = replace(PRESETS["grpo"], name="toy", estimator=PRESETS["ppo"].estimator)
    monkeypatch.setitem(presets.PRESETS, "toy", values)
    with pytest.raises(ValueError, match="reads the column 'old_values', which nobody writes"):
        settled("toy")
