"""The house stays small enough to read: lines, files, functions."""

import ast
import re
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2] / "verl"
SIZES = ROOT.parent / "docs" / "design" / "size.md"
FILES = sorted(ROOT.rglob("*.py"))


def held_lines(paths: Iterable[Path]) -> int:
    """Return how many lines of these files are not blank."""
    return sum(bool(line.strip()) for path in paths for line in path.read_text().splitlines())


def test_the_page_of_sizes_is_true():
    """Each room with more than 300 lines has a row, with its lines to within a tenth and a reason."""
    rooms: dict[str, list[Path]] = {}
    for path in FILES:
        first = path.relative_to(ROOT).parts[0]
        rooms.setdefault(first if (ROOT / first).is_dir() else "other", []).append(path)
    small = [name for name, paths in rooms.items() if name != "other" and held_lines(paths) <= 300]
    rooms["other"] += [path for name in small for path in rooms.pop(name)]
    rows = re.findall(r"^\| (\w+) \| (\d+) \| (.+) \|$", SIZES.read_text(), re.MULTILINE)
    assert {name for name, _, _ in rows} == rooms.keys()
    wrong = {name: held_lines(rooms[name]) for name, n, _ in rows if not 0.9 < held_lines(rooms[name]) / int(n) < 1.1}
    assert not wrong, f"{SIZES}: write what they are now: {wrong}"


def test_the_room_of_agent_loops():
    """2,000 lines hold turns, tools, branches and loops beside the driver; what one tool does is in tools/."""
    lines = held_lines((ROOT / "agent_loop").glob("*.py"))
    assert lines <= 2_000, lines


FORMS = {"Completion", "Trajectory", "Sample", "Batch", "SampleRow"}
"""An answer: as sampled, as played, as a row of columns (`Sample` is that row with names), packed, recorded."""
NO_FORM_OF_ITS_OWN = {
    "Segment": "what a trajectory and a row are made of",
    "SavedTrajectory": "a trajectory in a checkpoint",
    "AgentLoopOutput": "what a user's loop returns, in verl's words",
    "TokenOutput": "what a user's loop is given, in verl's words",
    "CheckedOutput": "the segments of that output and why it ended: two of the trajectory's fields",
    "ActiveRequest": "inside an engine: a completion that grows",
    "ServerAnswer": "what a server has answered so far: a completion that grows",
    "PartialAnswer": "what a lost server has answered: the beginning of a completion",
}


def test_one_answer_has_at_most_five_forms():
    """Every class that holds sampled tokens with their log-probs, or segments of them."""
    found = {"Batch"}  # its columns are by name
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                names = {
                    n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
                }
                tokens = names & {"ids", "token_ids", "response_ids"}
                probs = any(name.replace("_", "").endswith("logprobs") for name in names)
                if (tokens and probs) or "segments" in names:
                    found.add(node.name)
    assert found - NO_FORM_OF_ITS_OWN.keys() == FORMS and len(FORMS) <= 5
    assert NO_FORM_OF_ITS_OWN.keys() <= found


def test_a_file_holds_one_idea_and_a_function_fits_a_screen():
    long_files = {p.name: n for p in FILES if (n := len(p.read_text().splitlines())) > 500}
    assert not long_files, long_files
    by_hand = [p.name for p in FILES if "fmt: " in p.read_text()]
    assert not by_hand, f"ruff format decides: {by_hand}"
    long_functions = {
        f"{path.relative_to(ROOT)}: {node.name}": node.end_lineno - node.lineno + 1
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno - node.lineno + 1 > 65
    }
    assert not long_functions, long_functions
