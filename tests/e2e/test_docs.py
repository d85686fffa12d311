"""Every snippet of README and docs is executed: bash and python blocks in order, page by page, beside a model and rows.

The code that runs is that of this checkout, as a user has it: installed, and called from another folder. Where another
checkout is the installed one, or none is, this one goes first on PYTHONPATH. Lines of the README and of the page for
users of verl run in a shell; plain lines and programs on other pages share one import of everything, since they need no
shell.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from each import each, matrix
from started import Started, beside_modules, program
from tokens import bpe_tokenizer

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from verl.models import tiny

    data = ROOT / "tests" / "data"
    rows = [json.loads(line) for line in (data / "gsm8k_train.jsonl").read_text().splitlines()]
    tokenizer = bpe_tokenizer((r["question"] + r["answer"] for r in rows), vocab_size=512)
    made = tmp_path_factory.mktemp("docs")
    tiny.save(
        tiny.qwen3(tokenizer, hidden=32, layers=2, heads=2, kv_heads=1, ffn=64, max_positions=2048),
        tokenizer,
        made / "model",
    )
    short = [r for r in rows if len(r["question"]) < 160][:80]
    (made / "gsm8k.jsonl").write_text("".join(json.dumps(r) + "\n" for r in short))
    (made / "gsm8k_test.jsonl").write_text("".join(json.dumps(r) + "\n" for r in short[:4]))
    (made / "my_reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(len(solution_str) % 3)\n"
    )
    return made


@pytest.fixture(scope="module")
def environment(folder) -> dict[str, str]:
    made = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_WAIT_POLICY": "passive"}
    made.pop("PYTHONPATH", None)
    code = "import verl; print(verl.__file__)"
    found = subprocess.run([sys.executable, "-c", code], cwd=folder, env=made, capture_output=True, text=True)
    if found.stdout.strip() != str(ROOT / "verl" / "__init__.py"):
        made["PYTHONPATH"] = str(ROOT)
    return made


SMALL = (
    " step.prompts_per_step=4 step.samples_per_prompt=2 step.updates_per_step=1 rollout.max_response_tokens=8"
    " data.max_prompt_tokens=300 run.threads=1 model.dtype=float32 data.cache_dir=cache reward.num_workers=1"
)


def smaller(line: str) -> str:
    """The command with small sizes for what it does not say itself, and a server that ends with its page."""
    line = line.replace("verl serve ", "timeout 200 verl serve run.threads=1 model.dtype=float32 ")
    if not re.search(r"\bverl (train|sft)", line) or "--replay" in line:
        return line
    given = set(re.findall(r"([\w.]+)=", line))
    return line + "".join(f" {s}" for s in SMALL.split() if s.partition("=")[0] not in given)


PLAIN = re.compile(r"verl (train|sft|rm|dpo|plan|simulate|show|completion) [^$|&;<>*?~`\\]*")
PROGRAM = re.compile(r"python (\w+\.py)")
BESIDE = "PYTHONPATH=$PWD:$PYTHONPATH "


def typed(command: list[str], here: Path, environment: dict[str, str]) -> tuple[int, str]:
    """Return the exit code, and the end of the output."""
    done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, timeout=200)
    return done.returncode, f"{done.stdout[-1500:]}\n{done.stderr[-2500:]}"


def forked(args: list[str], here: Path, **given) -> tuple[int, str]:
    """As `typed`, of a process that has made the imports."""
    log = here.parent / "log"
    return Started(args, log, cwd=here, **given).wait(200), log.read_text()[-4000:]


def run_line(line: str, page: Path, here: Path, environment: dict[str, str]) -> None:
    if "cluster.backend=ray" in line and find_spec("ray") is None:
        return
    if page.name != "README.md" and PLAIN.fullmatch(line):
        code, said = forked(shlex.split(smaller(line))[1:], here)
    elif line.startswith(BESIDE) and PLAIN.fullmatch(command := line.removeprefix(BESIDE)):
        modules = {"PYTHONPATH": f"{here}:{os.environ.get('PYTHONPATH', '')}"}
        code, said = forked(shlex.split(smaller(command))[1:], here, env=modules, entry=beside_modules)
    elif found := PROGRAM.fullmatch(line):
        code, said = forked([(here / found[1]).read_text()], here, entry=program)
    else:
        code, said = typed(["bash", "-c", smaller(line)], here, environment)
    assert code == 0, f"{line}\n{said}"


LONG = (ROOT / "README.md", ROOT / "docs/from_verl.md")
RUN = [page for page in PAGES if re.search(r"^```(bash|python)\n", page.read_text(), re.MULTILINE)]


@pytest.mark.timeout(240)
@matrix("page", RUN, quick=[page for page in RUN if page not in LONG], ids=lambda p: str(p.relative_to(ROOT)))
def test_snippets(page, folder, environment, tmp_path):
    here = tmp_path / "work"
    shutil.copytree(folder, here)
    for language, text in BLOCK.findall(page.read_text()):
        named = re.match(r"# file: (\S+)\n", text)
        if named:
            (here / named[1]).write_text(text)
        elif language == "bash":
            for line in filter(None, map(str.strip, re.sub(r"\\\n\s*", " ", text).splitlines())):
                run_line(line, page, here, environment)
        elif language == "python":
            if page.name == "README.md":
                code, said = typed([sys.executable, "-c", text], here, environment)
            else:
                code, said = forked([text], here, entry=program)
            assert code == 0, f"{text}\n{said}"


@each("page", PAGES)
def test_every_block_is_run_or_text(page):
    for language, text in BLOCK.findall(page.read_text()):
        if language == "sh":  # make targets: they exist and expand
            for line in filter(None, (part.split("#")[0].strip() for part in text.splitlines())):
                done = subprocess.run([*line.split(), "-n"], cwd=ROOT, capture_output=True, timeout=60)
                assert done.returncode == 0, line
        elif not (page in RUN and text.startswith("# file: ")):
            runs = language in ("bash", "python") and page in RUN
            assert runs or language in ("", "text"), f"a block of {language!r} would never be run"


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_named_files_and_tests_exist():
    """Files of the repository on every page, and in the table of failures each rule's tests by file and function."""
    missing = []
    for page in PAGES:
        text = page.read_text()
        named = re.findall(r"`((?:verl|tests|bench|examples)/[\w./]+)`", text)
        if page.name == "failures.md":
            for file, _, test in re.findall(
                r"`((?:unit|numerics|contracts|faults|e2e|distributed)/\w+\.py)(::(\w+))?`", text
            ):
                named.append(f"tests/{file}")
                if test and f"def {test}(" not in (ROOT / "tests" / file).read_text():
                    missing.append(f"{page.name}: {file}::{test}")
        missing += [f"{page.name}: {name}" for name in named if not (ROOT / name).exists()]
    assert not missing, missing
