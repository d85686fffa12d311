"""The house stays small enough to read: lines, files, functions."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2] / "verl"
FILES = sorted(ROOT.rglob("*.py"))


def test_the_lines_of_the_house():
    """Lines with something on them; the blank ones that the formatter sets are not counted."""
    lines = sum(bool(line.strip()) for path in FILES for line in path.read_text().splitlines())
    assert lines <= 20_000, lines


def test_a_file_holds_one_idea_and_a_function_fits_a_screen():
    long_files = {p.name: n for p in FILES if (n := len(p.read_text().splitlines())) > 500}
    assert not long_files, long_files
    long_functions = {
        f"{path.relative_to(ROOT)}: {node.name}": node.end_lineno - node.lineno + 1
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno - node.lineno + 1 > 65
    }
    assert not long_functions, long_functions
