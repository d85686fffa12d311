"""The table of mutants fits the code: a mutant that cannot be planted proves nothing."""

import ast
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from mutants import MUTANTS, ROOT


def test_every_mutant_can_be_planted_and_changes_a_line_that_runs():
    faults = []
    for mutant in MUTANTS:
        text = (ROOT / "verl" / mutant.file).read_text()
        if text.count(mutant.old) != 1:
            faults.append(f"{mutant.file}: {mutant.old!r} stands there {text.count(mutant.old)} times")
            continue
        compile(text.replace(mutant.old, mutant.new), mutant.file, "exec")
        faults += [
            f"{mutant.tests}: no {t}" for t in mutant.tests.split() if not (ROOT / t.partition("::")[0]).exists()
        ]
    assert not faults, "\n".join(faults)
    assert len(MUTANTS) >= 108


def test_every_name_of_a_group_of_tests_has_one_meaning():
    """A second assignment would let mutants run the tests of others, and live."""
    tree = ast.parse((ROOT / "tests" / "mutants.py").read_text())
    targets = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
    names = [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
    assert "LOOK_AHEAD" in names
    assert not [name for name, count in Counter(names).items() if count > 1]
