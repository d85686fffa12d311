"""The change table of docs/design is true: each change here is made in a copy of verl, in the files that its row names
and in no other, and then used by the product: a small run, or a turn that is played."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import verl

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "docs" / "design" / "README.md").read_text()

METRIC = {
    "driver/measure.py": {
        '    for name in sorted({name for t in train for name in t.components} - {"score"}):\n': (
            '    out["toy/even_share"] = Metric(sum(t.total_tokens % 2 == 0 for t in train), len(train), "sequence")\n'
        )
    }
}
ROW = {
    "data/formats.py": {
        '    elif "question" in row and "answer" in row:\n        question, answer = gsm8k_texts(row, where)\n'
        "        messages = (": (
            '    elif "toy_asks" in row:\n'
            '        messages, truth = ({"role": "user", "content": row["toy_asks"]},), row["toy_wants"]\n'
        )
    }
}
CALLS = {
    "chat/parsing.py": {
        "        # Kimi-K2: ": (
            '        "toy": Format(*("<<", ">>", "json", {}, _NAMED, _OBJECT), marks=("<<", \'"name"\')),\n'
        )
    }
}
LOSS = {
    "algorithms/losses.py": {
        "def gspo(columns: Columns": (
            "def toy(columns: Columns, *, leak: float = 0.1) -> TermValue:\n"
            '    a = columns["advantages"]\n'
            '    return TermValue(-a.where(a > 0, leak * a) * columns["logprobs"])\n\n\n'
        )
    },
    "algorithms/specs.py": {
        "@dataclass(frozen=True, kw_only=True)\nclass DPPO(Clipped):\n": (
            "@dataclass(frozen=True, kw_only=True)\nclass Toy(LossSpec):\n"
            '    fn: str = "verl.algorithms.losses:toy"\n'
            "    leak: float = knob(0.1, option=True, least=0, most=1)\n\n\n"
        )
    },
    "algorithms/presets.py": {
        '    Preset("gspo", ': '    Preset("toy", "nobody, 2030.00001", GRPO, specs.Toy(leak=0.25)),\n'
    },
}
KEY = {
    "config/schema.py": {
        "    seed: int = 0\n    total_steps": "    toy_scale: PositiveInt = adjustable(3)  # Of a toy.\n"
    },
    "driver/run.py": {
        "        step.log(self.reward_metrics())\n": (
            "        from verl.types import Metric\n\n"
            '        step.log({"toy/scale": Metric(self.config.run.toy_scale, 1, "step")})\n'
        )
    },
}
VERB = {
    "rollout/base.py": {
        '    async def score_top(self, ids: np.ndarray, top: int) -> Scores:\n        raise ValueError("score_top': (
            "    async def toy_rank(self, ids: np.ndarray) -> int:\n"
            '        raise ValueError("toy_rank: this rollout engine has none")\n\n'
        ),
        '    async def pause(self, mode: PauseMode = "keep") -> None:\n        """Stop sampling': (
            "    async def toy_rank(self, ids: np.ndarray) -> int:\n"
            '        """Return the length of a sequence."""\n        ...\n\n'
        ),
    },
    "rollout/wrapper.py": {
        '    async def drop_set(self, name: str) -> None:\n        await self.forward("drop_set"': (
            "    async def toy_rank(self, ids: np.ndarray) -> int:\n"
            '        return int(await self.forward("toy_rank", ids))\n\n'
        )
    },
    "rollout/embedded/front.py": {
        "    async def score_top(self, ids: np.ndarray, top: int) -> Scores:\n": (
            "    async def toy_rank(self, ids: np.ndarray) -> int:\n        return len(ids)\n\n"
        )
    },
}
CHANGES = {
    # the row of the table -> the edits, how many files they may be
    "metric of a step": (METRIC, 1),
    "format of dataset rows": (ROW, 1),
    "format of tool calls": (CALLS, 1),
    "advantage estimator, loss per token": (LOSS, 3),
    "configuration key": (KEY, 2),
    "method of rollout engines": (VERB, 3),
}

USER = '''
"""The user of all of them: one run, and one turn."""

import json
import sys
from dataclasses import replace
from pathlib import Path

home, model = Path(sys.argv[1]), sys.argv[2]
import verl

assert Path(verl.__file__).parent == home / "verl"
import numpy as np
from small_runs import metrics_of, small_run

from verl.driver.run import Run

rows = home / "rows.jsonl"
rows.write_text("".join(json.dumps({"toy_asks": f"{n}+1=", "toy_wants": str(n + 1)}) + "\\n" for n in range(10, 26)))
toys = ("algorithm.name=toy", "algorithm.options.leak=0.5", "run.toy_scale=7", "run.total_steps=1")
finish, ranks, through = Run.finish, [], []


async def finished(self, step, refs):
    await finish(self, step, refs)
    ranks.append(await self.rollout.toy_rank(np.arange(5)))
    through.append(type(self.rollout).__name__)


Run.finish = finished
small_run(home / "runs", model, [rows], *toys, "rollout.replicas=2")
assert ranks == [5] and through == ["Router"], (ranks, through)
found = metrics_of(home / "runs" / "r")[1]
print(json.dumps({k: found[k] for k in ("toy/even_share", "toy/scale", "actor/grad_norm")}))

from test_tool_agent import MULTIPLY, kit_of, played, text_of
from tools import HERMES

from verl.chat.parsing import FORMATS, TurnParser, format_of

template = HERMES.replace("<tool_call>", "<<").replace("</tool_call>", ">>")
tokenizer, kit = kit_of([MULTIPLY], template)
kit = replace(kit, parser=TurnParser(FORMATS[format_of(template)]))
call = '<<{"name": "multiply", "arguments": {"a": 12, "b": 34}}>>'
_, _, manager, turn, _ = played([MULTIPLY], f"Let me see. {call}", "It is 408.", made=(tokenizer, kit))
counts = [manager.counts[name] for name in ("tool_calls", "malformed_calls")]
print(json.dumps([*counts, *text_of(tokenizer, turn.segments, "env")]))
'''


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_made_where_the_table_says(change):
    edits, most = CHANGES[change]
    (row,) = [line for line in TABLE.splitlines() if line.startswith(f"| {change}")]
    named = row.split(" | ")[1]
    assert len(edits) <= most
    readers = {"driver/run.py"}  # "the code that uses it"
    assert not [file for file in edits.keys() - readers if f"`{file}`" not in named], named


@pytest.mark.slow
def test_what_was_added_there_alone_is_used_by_a_run_and_by_a_turn(tmp_path, tiny_model):
    shutil.copytree(Path(verl.__file__).parent, tmp_path / "verl", ignore=shutil.ignore_patterns("__pycache__"))
    for edits, _ in CHANGES.values():
        for file, texts in edits.items():
            text = (tmp_path / "verl" / file).read_text()
            for before, new in texts.items():
                assert text.count(before) == 1, (file, before)
                text = text.replace(before, new + before)
            (tmp_path / "verl" / file).write_text(text)
    (tmp_path / "user.py").write_text(USER)
    paths = [str(tmp_path), str(ROOT / "tests"), str(ROOT / "tests" / "unit")]
    command = [sys.executable, str(tmp_path / "user.py"), str(tmp_path), str(tiny_model)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    found, turn = (json.loads(line) for line in done.stdout.splitlines() if re.match(r"[\[{]", line))
    assert found["toy/scale"] == 7 and 0 <= found["toy/even_share"] <= 1
    assert found["actor/grad_norm"] > 0
    assert turn[:2] == [1, 0] and "408" in turn[2], "the call was read and played"
