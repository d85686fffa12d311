"""The allowed imports between packages, read from the source."""

import ast
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "verl"
FILES = sorted(ROOT.rglob("*.py"))
STARTERS = ("subprocess", "multiprocessing", "concurrent.futures.process", "pty", "asyncio.subprocess")
START_CALLS = (
    *("os.fork", "os.forkpty", "os.system", "os.popen", "os.posix_spawn", "os.posix_spawnp"),
    *("asyncio.create_subprocess_exec", "asyncio.create_subprocess_shell", "concurrent.futures.ProcessPoolExecutor"),
)
MAY_START_PROCESSES = {  # outside sandbox/, and why: none of them runs a user's function
    "accel/cpu/kernels.py": "the C compiler, once per machine",
    "processes/child.py": "a guard, for any command that ends with this process",
    "processes/guard.py": "the command of a guard",
    "data/parallel.py": "none: it has the pipes of multiprocessing",
    "planner/grid.py": "more processes of its own, for points of a grid",
}
COMPONENTS = ("model_engine", "rollout", "weight_sync", "transfer_queue", "agent_loop", "reward")
ELSEWHERE = ("rollout/vllm_plugin/verl_weights.py",)  # runs in vLLM's environment, inside vLLM
OPTIONAL = (
    "ray",
    "vllm",
    "sglang",
    "tensorrt_llm",
    "megatron",
    "veomni",
    "peft",
    "wandb",
    "flash_attn",
    "triton",
    "s3fs",
    "mcp",
    "renderers",
    "av",
)
NEVER = ("bitsandbytes", "torchao", "adam_mini", "apollo_torch")
"""Packages whose formats and formulas are ours too: tests compare with them, and no run needs one."""


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path, *, top_level: bool) -> frozenset[str]:
    """Modules that a file imports; with `top_level` only those that importing the file imports."""
    tree = parsed(path)
    skipped: set[int] = set()
    for node in ast.walk(tree) if top_level else ():
        later = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        typed = isinstance(node, ast.If) and any(
            isinstance(n, ast.Name) and n.id == "TYPE_CHECKING" for n in ast.walk(node.test)
        )
        if (later or typed) and id(node) not in skipped:
            skipped |= {id(n) for n in ast.walk(node)}
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return frozenset(found)


def room(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return parts[0].removesuffix(".py")


def test_import_rules():
    broken = []
    for path in FILES:
        try:
            keeps_the_rules(path)
        except AssertionError as error:
            broken.append(f"{path.relative_to(ROOT)}: {error}")
    assert not broken, "\n".join(broken)


def keeps_the_rules(path: Path) -> None:
    here = room(path)
    every, top = imports(path, top_level=False), imports(path, top_level=True)
    torch_free = here in (
        "types",
        "columns",
        "bounds",
        "config",
        "errors",
        "data",
        "reward",
        "sandbox",
        "chat",
        "cli",
        "show",
        "doctor",
        "track",
        "report",
    )
    if torch_free:
        assert not {m for m in top if m.split(".")[0] in ("torch", "transformers")}, "no torch at module level here"
    if here in ("types", "columns", "bounds", "config", "errors"):
        assert not {m for m in every if m.split(".")[0] in ("torch", "transformers")}
    if here == "algorithms":
        allowed = (
            "verl.algorithms",
            "verl.types",
            "verl.columns",
            "verl.bounds",
            "verl.batch",
            "verl.errors",
            "verl.names",
            "verl.objective",
        )
        assert all(m.startswith(allowed) for m in every if m.startswith("verl")), every
        assert not any(m.startswith("torch.distributed") for m in every)
        if path.name in ("settings.py", "specs.py", "filters.py", "presets.py"):
            words = ("verl.algorithms", "verl.columns", "verl.errors", "verl.names", "verl.types")
            assert all(m.startswith(words) for m in every if m.startswith("verl"))
            assert not {m for m in every if m.split(".")[0] in ("torch", "transformers")}, "configuration reads these"
    if here == "objective":
        assert all(m in ("verl.batch", "verl.types") for m in every if m.startswith("verl")), every
    if here in COMPONENTS:
        assert not {m for m in every if m.startswith("verl.driver")}
        others = {
            m for m in every if m.split(".")[0] == "verl" and len(m.split(".")) > 2 and m.split(".")[1] in COMPONENTS
        }
        assert all(m.split(".")[1] == here or m.endswith(".base") for m in others), others
    if here == "driver" and path.name not in (
        "assemble.py",
        "assemble_fleet.py",
        "assemble_images.py",
        "assemble_loops.py",
        "assemble_rewards.py",
    ):  # they know backends
        allowed = (".base", ".rows", ".sender", ".optim", ".lora_spec")
        concrete = {m for m in every if m.split(".")[1:2] and m.split(".")[1] in COMPONENTS and not m.endswith(allowed)}
        assert not concrete, concrete
        if path.name not in ("setup.py", "worker_setup.py", "stages.py", "state.py"):
            assert not {m for m in every if m.split(".")[0] == "torch"}, "no tensor in the controller"
    if here == "processes":  # guards run before anything is installed, in interpreters without site packages
        assert all(m.startswith(("verl.processes", "verl.leftovers")) for m in every if m.startswith("verl")), every
        assert {m.split(".")[0] for m in every} <= {*sys.stdlib_module_names, "verl"}, every
    if here == "accel":
        allowed = (
            "verl.accel",
            "verl.nn.precision",
            "verl.nn.quant",
            "verl.nn.flash",
            "verl.nn.torch_compat",
            "verl.wire",
        )
        assert all(m.startswith(allowed) for m in every if m.startswith("verl")), every
    if path.relative_to(ROOT).as_posix() in ELSEWHERE:
        assert not {m for m in every if m.split(".")[0] == "verl"}, "there is no verl there"
        return
    used = {m.split(".")[0] for m in every} & set(OPTIONAL)
    if path.parent.name == "cuda":  # the kernels themselves: only `decode_ops` imports them, where there is Triton
        top = frozenset(m for m in top if m.split(".")[0] != "triton")
    assert not {m.split(".")[0] for m in top} & set(OPTIONAL), "optional packages are imported on use"
    assert not {m.split(".")[0] for m in every} & set(NEVER), "references of tests are not imported"
    if "ray" in used:
        at = path.relative_to(ROOT).as_posix()
        assert at.startswith("workers/ray/") or at in ("transfer_queue/ray.py", "transfer_queue/package.py"), at


def test_the_controller_has_no_branch_per_engine_or_algorithm():
    for path in (ROOT / "driver").glob("*.py"):
        text = path.read_text()
        for branch in ("if engine ==", "if algorithm ==", ".engine ==", "algorithm.name =="):
            assert branch not in text, f"{path.name}: {branch}"


def test_only_the_sandbox_starts_processes_and_it_knows_no_rewards():
    """User code runs in sandbox/ and nowhere else: it can be killed, is limited, and ends with its parent."""
    found, knows = {}, []
    for path in FILES:
        here, tree = path.relative_to(ROOT).as_posix(), parsed(path)
        modules = {m for m in imports(path, top_level=False) if m.startswith(STARTERS)}
        froms = {f"{n.module}.{a.name}" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names}
        calls = froms | {ast.unparse(n) for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
        starts = {c for c in calls if c.startswith((*START_CALLS, "os.exec", "os.spawn", *STARTERS))}
        if modules | starts and room(path) != "sandbox":
            found[here] = sorted(modules | starts)
        if room(path) == "sandbox":
            ours = {m for m in imports(path, top_level=False) if m.split(".")[0] == "verl" and "sandbox" not in m}
            knows += [m for m in ours if m not in ("verl.errors", "verl.leftovers") and "processes" not in m]
    assert not {here: what for here, what in found.items() if here not in MAY_START_PROCESSES}
    assert found.keys() == MAY_START_PROCESSES.keys(), "an exception that is not needed any more"
    assert not knows, "sandbox/ knows nothing of what runs in it"


@pytest.mark.parametrize("command", [["--help"], ["show", "keys"], ["show", "recipes"]], ids=" ".join)
def test_help_and_tables_import_no_torch(command):
    code = f"import sys; from verl.cli import main; main({command!r}); bad = [m for m in ('torch', 'transformers') if m in sys.modules]; sys.exit(9 if bad else 0)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0


def test_no_module_has_mutable_globals():
    """Module-level lists, dicts and sets are read-only tables (annotated Mapping/Sequence/tuple, or never assigned
    into)."""
    for path in FILES:
        tree = parsed(path)
        names = {
            t.id
            for node in tree.body
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.List | ast.Dict | ast.Set)
            for t in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(t, ast.Name)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Global):
                raise AssertionError(f"{path}: global {node.names}")
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
                        inside = target.value.id in names and any(target is x for x in ast.walk(node))
                        local = _is_local(tree, node, target.value.id)
                        assert not (inside and not local), (
                            f"{path}:{node.lineno} writes into the module's {target.value.id}"
                        )


def _is_local(tree: ast.Module, node: ast.AST, name: str) -> bool:
    for f in ast.walk(tree):
        if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef) and any(n is node for n in ast.walk(f)):
            stores = {n.id for n in ast.walk(f) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
            if name in stores or name in {a.arg for a in f.args.args}:
                return True
    return False


def circles() -> set[frozenset[str]]:
    """Return the groups of modules that import each other, through imports of any kind: at the top, inside functions,
    and for types alone."""
    names = {_module_name(path): path for path in sorted(ROOT.rglob("*.py"))}
    graph = {name: _imported(path, names) - {name} for name, path in names.items()}

    def reach(start: str) -> set[str]:
        seen, left = set(), [start]
        while left:
            for name in graph[left.pop()] - seen:
                seen.add(name)
                left.append(name)
        return seen

    reached = {name: reach(name) for name in graph}
    return {frozenset(b for b in reached[a] if a in reached[b]) for a in graph if a in reached[a]}


def _module_name(path: Path) -> str:
    return ".".join(("verl", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


def _imported(path: Path, names: Mapping[str, Path]) -> set[str]:
    """Return the modules of the house that this file imports anywhere."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {name if (name := f"{node.module}.{a.name}") in names else node.module for a in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
    return found & names.keys()


def test_no_modules_import_each_other():
    assert not (found := circles()), found
