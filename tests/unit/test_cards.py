"""The algorithm cards: as generated, one per row, and their hand-solved numbers are those of the row's own code."""

import math
from pathlib import Path

import pytest

from verl.algorithms import cards
from verl.algorithms.table import TABLE, Row, resolve
from verl.config.load import load_config, validate
from verl.show import show

FOLDER = Path(__file__).parents[2] / "docs" / "algorithms"
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


def test_the_pages_are_what_the_table_says():
    made = cards.pages()
    assert sorted(p.name for p in FOLDER.iterdir()) == sorted(made)
    for name, text in made.items():
        assert (FOLDER / name).read_text() == text, f"{name}: run python -m verl.algorithms.cards docs/algorithms"


def test_main_writes_every_page(tmp_path):
    assert cards.main([str(tmp_path / "new")]) == 0
    assert {p.name for p in (tmp_path / "new").iterdir()} == {"README.md", *(f"{n}.md" for n in TABLE)}
    assert cards.main([]) == 2


@pytest.mark.parametrize("name", TABLE)
def test_the_example_solved_by_hand(name):
    solved, hand = cards.solve(name), cards.HAND[name]
    close = {"rel": 2e-4, "abs": 1e-5}
    assert [by_hand(x) for x in hand.advantages] == pytest.approx(solved.columns["advantages"].tolist(), **close)
    assert [by_hand(x) for x in hand.losses] == pytest.approx(solved.losses["pg_loss"].tolist(), **close)
    assert by_hand(hand.total) == pytest.approx(solved.total, rel=1e-4, abs=2e-5)
    algo = resolve(name, cards.NEEDED.get(name))
    assert set(hand.terms) == {t.name for t in algo.terms} - {"pg_loss"}, "a term of the row that no hand has solved"
    for term, text in hand.terms.items():
        assert [by_hand(x) for x in text] == pytest.approx(solved.losses[term].tolist(), **close)
    assert (hand.returns is not None) == algo.critic
    if hand.returns and hand.values:
        assert [by_hand(x) for x in hand.returns] == pytest.approx(solved.columns["returns"].tolist(), **close)
        assert [by_hand(x) for x in hand.values] == pytest.approx(solved.losses["vf_loss"].tolist(), **close)


@pytest.mark.parametrize("name", TABLE)
def test_the_launch_lines_are_accepted(name):
    for line in cards._launch(name):
        given = [a.replace("DIR", "model").replace("FILE", "rows.jsonl") for a in line.split()[2:]]
        resolved = load_config(given)
        assert resolved.config.algorithm.name == name
        with pytest.raises(ValueError) as refused:
            validate(resolved.config)
        assert all("no such file" in x or "no such folder" in x for x in str(refused.value).splitlines()), refused.value


def test_every_text_belongs_to_a_row():
    for mapping in (cards.TITLES, cards.WHEN, cards.HAND):
        assert set(mapping) == set(TABLE)
    for mapping in (cards.RECOMMENDED, cards.WHY_RECOMMENDED, cards.ALSO):
        assert set(mapping) <= set(TABLE)
    assert set(cards.RECOMMENDED) == set(cards.WHY_RECOMMENDED)
    assert {q for found in cards.DEFECTS.values() for q in found} <= set(cards.QUIRKS)


def shown(capsys, *args) -> dict[str, tuple[str, str]]:
    """Setting -> (value, where it is from) as `verl show` prints it."""
    assert show(list(args)) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:-1]]
    return {r[0]: (" ".join(r[1:-1]), r[-1]) for r in rows if len(r) > 2}


@pytest.mark.parametrize("name", TABLE)
def test_show_prints_every_resolved_setting(name, capsys):
    found = shown(capsys, f"algorithm={name}")
    assert set(found) == set(Row.__dataclass_fields__) - {"source", "notes"}
    assert found["loss"] == (TABLE[name].loss, "paper")
    assert {where for _, where in found.values()} <= {"paper", "preset", "given", "needed"}


def test_show_tells_where_vapos_settings_are_from(capsys):
    found = shown(capsys, "algorithm=vapo", "algorithm.clip_high=0.3", "algorithm.options.length_adaptive_alpha=0.1")
    assert found["clip_high"] == ("0.3", "given") and found["length_adaptive_alpha"] == ("0.1", "given")
    assert found["positive_nll_coef"] == ("0.1", "paper") and found["critic_warmup_steps"] == ("50", "paper")
    assert found["cov_ratio"] == ("0.0002", "preset")
    assert shown(capsys, "algorithm=drgrpo")["horizon_tokens"] == ("1024", "needed")


def test_show_names_the_nearest_algorithm():
    with pytest.raises(ValueError, match="did you mean 'vapo'"):
        show(["algorithm=vappo"])
