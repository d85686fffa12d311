"""A tiny model that was taught to call its tool, and a run over it, for tests with and without servers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from small_runs import small_args
from tools import hermes_tokenizer, multiply

from verl.agent_loop.load_tools import function_as_tool
from verl.chat.conversation import render_conversation
from verl.chat.template import audit_template

TOOLS = (f"agent.tools=[{Path(__file__).parent / 'tools.py'}]", "agent.max_turns=4")
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str.rstrip().endswith(ground_truth)), "turns": float(extra_info["num_turns"])}
"""


def teach(folder: Path) -> None:
    """Into it: model, rows and reward. The model mostly calls `multiply` and reads its result."""
    import torch

    from verl.models import tiny

    tokenizer = hermes_tokenizer()
    schemas, audit = [dict(function_as_tool(multiply).schema)], audit_template(tokenizer)
    pairs = [(a, b) for a in range(2, 6) for b in range(2, 6)]
    rows, lines = [], []
    for a, b in pairs:
        asked = {"role": "user", "content": f"{a}x{b}"}
        call = {"type": "function", "function": {"name": "multiply", "arguments": {"a": a, "b": b}}}
        said = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": str(a * b)}]
        whole = [asked, *said, {"role": "assistant", "content": str(a * b)}]
        rows += render_conversation(tokenizer, whole, audit, {}, tools=schemas)
        lines.append({"prompt": [asked], "ground_truth": str(a * b), "agent_name": "tool_agent"})
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "reward.py").write_text(REWARD)
    model = tiny.qwen3(tokenizer, hidden=64, layers=2, heads=2, kv_heads=1, ffn=128, max_positions=1024)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    width = max(len(r.ids) for r in rows)
    ids = torch.tensor(np.array([np.pad(r.ids, (0, width - len(r.ids))) for r in rows]))
    mask = torch.tensor(np.array([np.pad(r.mask, (0, width - len(r.mask))) for r in rows]))
    for step in range(70):
        some = slice(step % 2, None, 2)
        logits = model(input_ids=ids[some, :-1]).logits
        shown = mask[some, 1:]
        loss = torch.nn.functional.cross_entropy(logits[shown], ids[some, 1:][shown])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    tiny.save(model, tokenizer, folder / "model")


def args(root: Path, taught: tuple[Path, Path], *more: str) -> list[str]:
    """Return the arguments of a run with the model of `teach`, and the folder of its other files."""
    model, folder = taught
    sizes = ("data.max_prompt_tokens=400", "rollout.max_response_tokens=250", "step.max_tokens_per_microbatch=4096")
    given = (f"reward.path={folder / 'reward.py'}", "run.save_every_steps=1", "optim.lr=1e-4", *sizes, *more)
    return small_args(root, model, (folder / "rows.jsonl",), *given)
