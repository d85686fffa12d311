"""Every snippet of README and docs is executed: bash and python blocks in order, page by page, beside a model and rows.

The code that runs is that of this checkout, as a user has it: installed, and called from another folder. Where another
checkout is the installed one, or none is, this one goes first on PYTHONPATH. Plain training lines behind the README's
share one import of everything: a shell has nothing to do in them.
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
from started import Started
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


PLAIN = re.compile(r"verl (train|sft|rm|dpo) [^$|&;<>*?~`\\]*")


@pytest.mark.timeout(240)
@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_snippets(page, folder, environment, tmp_path):
    here = tmp_path / "work"
    shutil.copytree(folder, here)
    for language, text in BLOCK.findall(page.read_text()):
        named = re.match(r"# file: (\S+)\n", text)
        if language == "sh":  # make targets: they exist and expand
            for line in filter(None, (part.split("#")[0].strip() for part in text.splitlines())):
                assert (
                    subprocess.run([*line.split(), "-n"], cwd=ROOT, capture_output=True, timeout=60).returncode == 0
                ), line
        elif named:
            (here / named[1]).write_text(text)
        elif language == "bash":
            for line in filter(None, map(str.strip, text.splitlines())):
                if "cluster.backend=ray" in line and find_spec("ray") is None:
                    continue
                if PLAIN.fullmatch(line) and page.name != "README.md":
                    code = Started(shlex.split(smaller(line))[1:], log := tmp_path / "log", cwd=here).wait(200)
                    assert code == 0, f"{line}\n{log.read_text()[-3000:]}"
                    continue
                done = subprocess.run(
                    ["bash", "-c", smaller(line)],
                    cwd=here,
                    env=environment,
                    capture_output=True,
                    text=True,
                    timeout=200,
                )
                assert done.returncode == 0, f"{line}\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}"
        elif language == "python":
            done = subprocess.run(
                [sys.executable, "-c", text], cwd=here, env=environment, capture_output=True, text=True, timeout=200
            )
            assert done.returncode == 0, f"{text}\n{done.stderr[-2500:]}"
        else:
            assert language in ("", "text"), f"{page.name}: a block of {language!r} would never be run"


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
