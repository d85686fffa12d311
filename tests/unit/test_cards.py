"""The algorithm cards: generated parts as the specs say, launch lines accepted, every example solved by the product."""

import math
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from bench import cards
from verl.algorithms.corrections import correct
from verl.algorithms.estimators import token_rewards
from verl.algorithms.losses import kl_penalty, token_divergence
from verl.algorithms.presets import PRESETS, settled
from verl.algorithms.resolve import resolve
from verl.algorithms.weights import term_weights
from verl.batch import Columns
from verl.config.load import load_config, validate
from verl.show import show

FOLDER = Path(__file__).parents[2] / "docs" / "algorithms"
NEEDED = {"drgrpo": {"horizon_tokens": 3}, "gdpo": {"reward_components": ["a", "b"]}}
NEEDED |= {"intellect_ipo": {"clip_low": 0.15, "clip_high": 0.15}}  # 0.2 would be the very bound of the example
TEACHER = torch.tensor([0.6, 0.5, 0.8], dtype=torch.float64)
WORDS = {
    "sqrt": math.sqrt,
    "exp": math.exp,
    "ln": math.log,
    "max": max,
    "min": min,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
}


def by_hand(text: str) -> float:
    return float(eval(text, {"__builtins__": {}}, WORDS))


def test_the_pages_are_what_the_specs_say():
    made = cards.pages(FOLDER)
    assert sorted(p.name for p in FOLDER.iterdir()) == sorted(made)
    stale = [name for name, text in made.items() if (FOLDER / name).read_text() != text]
    assert not stale, f"{stale}: run python bench/cards.py docs/algorithms"


def test_main_renews_what_is_not_true_any_more(tmp_path):
    copy = shutil.copytree(FOLDER, tmp_path / "docs")
    page = copy / "vapo.md"
    page.write_text(
        page.read_text().replace("| loss | ppo_clip |", "| loss | other |").replace("algorithm.name=vapo", "x")
    )
    assert cards.main([str(copy)]) == 0 and page.read_text() == (FOLDER / "vapo.md").read_text()
    assert cards.main([]) == 2
    page.write_text("# VAPO\n")
    with pytest.raises(AssertionError, match="the page has no part between"):
        cards.pages(copy)


# -- the example of every page -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Solved:
    """The results of verl for the example: [3] each."""

    columns: Columns
    losses: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    total: float


def solve(name: str) -> Solved:
    """The example through the preset's estimator, terms and weights, critic's included; nothing is rounded."""
    algo = resolve(name, NEEDED.get(name))
    f64 = torch.float64
    score = torch.tensor([1.0, 0.0], dtype=f64)
    old = torch.tensor([0.5, 0.5, 0.4], dtype=f64).log()
    columns = Columns(
        token={
            "old_logprobs": old,
            "ref_logprobs": old,
            "rollout_logprobs": torch.full((3,), 0.5, dtype=f64).log(),
            "old_values": torch.full((3,), 0.5, dtype=f64),
            "side/turn": torch.tensor([0, 1, 0]),
            "side/turn_reward": torch.zeros(3),
            "side/turn_state": torch.tensor([7, 8, 7]),
            "sum_pi_squared": torch.tensor([0.5, 0.5, 0.52], dtype=f64),
            "teacher_logprobs": TEACHER.log(),
            "teacher_topk": torch.stack([TEACHER, 1 - TEACHER], -1).log(),
        },
        sequence={
            "score": score,
            "group": torch.zeros(2, dtype=torch.int64),
            "valid": torch.tensor([True, True]),
            "positive": score > 0,
            "baseline": torch.full((2,), 0.5, dtype=f64),
            "component/a": score,
            "component/b": torch.ones(2, dtype=f64),
        },
        sequence_of=torch.tensor([0, 0, 1]),
        num_sequences=2,
        mask=torch.tensor([True, True, True]),
    )
    if algo.correction is not None:
        if algo.correction.bypass:
            columns = columns.with_token({"old_logprobs": columns["rollout_logprobs"]})
        weighed = correct(columns, algo.correction)
        columns = columns.with_token({k: v for k, v in weighed.items() if isinstance(v, torch.Tensor)})
    kl = algo.kl_reward
    penalty = kl_penalty(columns, coef=kl.coef, form=kl.form)[0] if kl else None
    columns = columns.with_token({"rewards": token_rewards(columns, penalty)})
    columns = columns.with_token(algo.advantage(columns))
    terms = (*algo.terms, *algo.value_terms)
    weights = {k.removeprefix("w/"): v for k, v in term_weights(columns, terms).items()}
    now = torch.tensor([0.7, 0.5, 0.3], dtype=f64).log()
    at = torch.stack([now.exp(), 1 - now.exp()], -1).log()  # a vocabulary of two
    apart = {"logprobs_at": at, "divergence": token_divergence(at, columns["teacher_topk"], 0.5)}
    apart |= dict.fromkeys(("teacher_agreement", "teacher_entropy"), TEACHER)  # figures, which are on no page
    columns = columns.with_token({"logprobs": now, "values": columns["old_values"], **apart})
    losses = {t.name: torch.where(weights[t.name] != 0, t.fn(columns).values, 0.0) for t in terms}
    total = float(sum((weights[t.name] * losses[t.name]).sum() for t in algo.terms))
    return Solved(columns, losses, weights, total)


def tables(page: str) -> list[dict[str, list[str]]]:
    """Every table of three tokens on a page, column by column."""
    out = []
    for head, body in re.findall(r"^\| (token \|.*)\|\n\| ---.*\n((?:\|.*\n?)+)", page, flags=re.M):
        rows = [[c.strip() for c in line.strip("|").split(" | ")] for line in body.strip().splitlines()]
        out.append(dict(zip([h.strip() for h in head.split(" | ")], map(list, zip(*rows)), strict=True)))
    return out


def number(x: float) -> str:
    return f"{x:.4f}".replace("-0.0000", "0.0000")


def wrong_columns(page: str, solved: Solved, critic: bool) -> list[str]:
    """Return the columns in which the printed numbers, or the arithmetic by hand, differ from verl's."""
    columns = {n: solved.columns[n] for n in ("advantages", "rewards")}
    values = {"reward": columns["rewards"], "advantage": columns["advantages"], "weight": solved.weights["pg_loss"]}
    values |= {**solved.losses, "loss": solved.losses["pg_loss"]}
    if critic:
        values |= {"return": solved.columns["returns"], "value loss": solved.losses["vf_loss"]}
    seen, wrong = set(), []
    for table in tables(page):
        for name, cells in table.items():
            key = name.removesuffix(" by hand")
            if name == "token":
                continue
            seen.add(key)
            exact = values[key].tolist()
            said = [by_hand(c) for c in cells] if name != key else None
            if said is None and cells != [number(x) for x in exact]:
                wrong.append(f"{name}: {cells}, not {exact}")
            if said is not None and said != pytest.approx(exact, rel=2e-4, abs=1e-5):
                wrong.append(f"{name}: {said}, not {exact}")
    unsolved = (values.keys() - {"pg_loss", "vf_loss"}) - seen
    return wrong + [f"{name} has no column" for name in unsolved]


def test_every_example_is_solved_by_the_product_as_by_hand():
    wrong = {}
    for name, preset in PRESETS.items():
        page, solved = (FOLDER / f"{name}.md").read_text(), solve(name)
        found = wrong_columns(page, solved, preset.critic is not None)
        text, printed = re.search(r"^Loss: `(.*)` = (.*)\.$", page, flags=re.M).groups()
        if by_hand(text) != pytest.approx(solved.total, rel=1e-4, abs=2e-5) or printed != number(solved.total):
            found.append(f"loss {by_hand(text)} and {printed}, not {solved.total}")
        if preset.critic:
            mean = number(float((solved.weights["vf_loss"] * solved.losses["vf_loss"]).sum()))
            found += [] if f"The critic's loss is their mean, {mean}." in page else [f"the critic's loss is {mean}"]
        if found:
            wrong[name] = found
    assert not wrong, wrong


def test_the_check_sees_a_wrong_number():
    page, solved = (FOLDER / "vapo.md").read_text(), solve("vapo")
    assert not wrong_columns(page, solved, True)
    for old, new in (
        ("| 0.5 / 0.5 |", "| 0.6 / 0.5 |"),
        ("| 0.8000 |", "| 0.8001 |"),
        ("0.5 + 0.5 | 1.0000", "0.5 | 1.0000"),
    ):
        assert old in page and len(wrong_columns(page.replace(old, new, 1), solved, True)) == 1
    assert "value loss has no column" in wrong_columns(page.split("| token | return")[0], solved, True)


# -- command lines and `verl show` -------------------------------------------------------------------------------------


def test_the_launch_lines_are_accepted():
    for name, preset in PRESETS.items():
        for line in cards.launch(preset):
            given = [a.replace("DIR", "model").replace("FILE", "rows.jsonl") for a in line.split()[2:]]
            resolved = load_config(given)
            assert resolved.config.algorithm.name == name
            with pytest.raises(ValueError) as refused:
                validate(resolved.config)
            assert all("no such file" in x or "no such folder" in x for x in str(refused.value).splitlines()), refused


def shown(capsys, *args) -> dict[str, tuple[str, str]]:
    """Setting -> (value, where it is from) as `verl show` prints it."""
    assert show(list(args)) == 0
    rows = [re.split(r"\s{2,}", line.strip()) for line in capsys.readouterr().out.splitlines()[2:-1]]
    return {r[0].removeprefix("options."): (r[1], r[2]) for r in rows if len(r) > 2}


def test_show_prints_every_resolved_setting(capsys):
    for name in PRESETS:
        found = shown(capsys, f"algorithm={name}")
        settings = settled(name, NEEDED.get(name)).settings()
        assert set(found) == set(settings), name
        assert found["loss"] == (settings["loss"], "paper")
        assert {where for _, where in found.values()} <= {"paper", "preset", "given", "needed"}


def test_show_tells_where_vapos_settings_are_from(capsys):
    found = shown(capsys, "algorithm=vapo", "algorithm.clip_high=0.3", "algorithm.options.length_adaptive_alpha=0.1")
    assert found["clip_high"] == ("0.3", "given") and found["length_adaptive_alpha"] == ("0.1", "given")
    assert found["positive_nll_coef"] == ("0.1", "paper") and found["critic_warmup_steps"] == ("50", "paper")
    assert found["clip_low"] == ("0.2", "preset") and "cov_ratio" not in found, "what vapo does not read is not shown"
    assert shown(capsys, "algorithm=drgrpo")["horizon_tokens"] == ("1024", "preset")


def test_show_names_the_nearest_algorithm():
    with pytest.raises(ValueError, match="did you mean vapo"):
        show(["algorithm=vappo"])
