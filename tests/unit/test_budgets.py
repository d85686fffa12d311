"""The house stays small enough to read: lines, files, functions."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2] / "verl"
FILES = sorted(ROOT.rglob("*.py"))


def test_the_lines_of_the_house():
    """Lines with something on them; the blank ones that the formatter sets are not counted. 20,000 held what the house
    was rebuilt with; then came what a run is compared with, stops, secrets, verl's scripts and names, more losses.
    What many processes need came then: worker groups on Ray, the sharded engine, the queue over processes (an index and
    its messages, segments of shared memory, Ray, the TransferQueue package), weights in shared memory, runs under
    torchrun, and what is refused and planned before it starts. Then the engine as a server, and servers as engines (a
    client, vLLM, a child that ends with its parent). Then agents: branches, turns, tools, a sandbox for what models
    write. Then teachers, of whom whole distributions are read, several of them, and hints. Then more kinds of server
    (SGLang, TensorRT-LLM, any completions API), and weights in folders for them. Then files that the sandbox's sessions
    start from, and keep. Then what goes wrong in long runs: deaths behind other errors, deadlines in saves and starts,
    replicas that fail for good, tools that hold the interpreter, loops and tools beside the driver. Then servers that
    hang, whose ports are taken, whose requests go on elsewhere with their tokens, that come and go while a run goes on;
    a device for each pool; teachers that lag, hang or stand beside another loss. Then what goes on beside something
    else (requests while weights are read, frozen models while the policy learns), likeliest tokens of our own server,
    experts by the names of a saved folder, and what the failures of a served teacher must not cost. Then versions in an
    object store, and saves beside training under torchrun, weights that pass
    through buckets, also on a GPU and to other hosts, adapters that a server loads, a router of others before SGLang,
    whose answers count by who gave their weights, as the tokens of a lost server do, limits of what a request may
    take, and replicas that wait with their start while others have the device. Then rows as people really write them
    (one normaliser of messages, truths, media, splits, shapes), ends of turns, limits of templates, a list of allowed
    calls and the memory of the host for what models write, a server that answers whatever one caller sends. The plan
    was 35,000 with adapters that are trained, vision and Megatron as well: what those bring has to be taken out
    elsewhere."""
    lines = sum(bool(line.strip()) for path in FILES for line in path.read_text().splitlines())
    assert lines <= 48_400, lines


def test_the_room_of_agent_loops():
    """2,000 lines hold turns, tools, branches and loops beside the driver; what one tool does is in tools/."""
    lines = sum(
        bool(line.strip()) for path in (ROOT / "agent_loop").glob("*.py") for line in path.read_text().splitlines()
    )
    assert lines <= 2_000, lines


FORMS = {"Completion", "Trajectory", "Sample", "Batch", "SampleRow"}
"""An answer: as sampled, as played, as a row of columns (`Sample` is that row with names), packed, recorded."""
NO_FORM_OF_ITS_OWN = {
    "Segment": "what a trajectory and a row are made of",
    "SavedTrajectory": "a trajectory in a checkpoint",
    "AgentLoopOutput": "what a user's loop returns, in verl's words",
    "TokenOutput": "what a user's loop is given, in verl's words",
    "CheckedOutput": "the segments of that output and why it ended: two of the trajectory's fields",
    "Request": "inside an engine: a completion that grows",
    "Drawn": "what a server has answered so far: a completion that grows",
    "SoFar": "what a lost server has answered: the beginning of a completion",
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
