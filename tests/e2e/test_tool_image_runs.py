"""`verl train` with a tool that returns images: an image of the row, an answer, an image of the tool, an answer."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_runs import launch, metrics_of, saved, small_args, state_of, trained, wait_for
from tool_images import tool_file, tool_folder
from vision import IMAGE, png

from verl.agent_loop.tool_agent import ToolAgentLoop
from verl.config.load import load_config
from verl.driver.launch import run_rl
from verl.driver.saved_images import images_of_tools
from verl.track.events import read_events
from verl.track.samples import read_samples
from verl.transfer_queue.media import MemoryMedia

REWARD = """
import pathlib
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    files = extra_info["images"] + extra_info.get("tool_images", [])  # missing in the rehearsal
    assert all(pathlib.Path(f).read_bytes().startswith(b"\\x89PNG") for f in files)
    return {"score": float(sum(map(ord, solution_str)) % 7), "files": len(files)}
"""
SIZES = ((12, 8), (8, 8), (16, 8), (8, 12))
STOPS = f"rollout.stop_token_ids={[*range(5, 45)]}"
"""A random model ends its turns soon, so that there is room for an image."""


def args_of(root: Path, folder: Path, *more: str, calls: int = 1) -> list[str]:
    tools = tool_file(root / "look.py", calls=calls)
    (root / "reward.py").write_text(REWARD)
    images = [[png(*size, k)] for k, size in enumerate(SIZES)]
    prompts = [[{"role": "user", "content": f"<image>{k}?"}] for k in range(len(SIZES))]
    pq.write_table(pa.table({"prompt": prompts, "images": images, "ground_truth": ["1"] * 4}), root / "rows.parquet")
    given = ("data.max_prompt_tokens=48", f"reward.path={root / 'reward.py'}", f"agent.tools=[{tools}]", *more)
    own = ("run.total_steps=2", "rollout.max_response_tokens=72", "agent.format=hermes", STOPS)
    return small_args(root, folder, [root / "rows.parquet"], *own, *given)


@pytest.mark.parametrize("loop", ["tool_agent@driver", "tool_agent"])
def test_images_of_tools_train(loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the driver and in a process of their own: what is trained is what was sampled, and nothing is kept."""
    stores, make = list[MemoryMedia](), MemoryMedia.__init__
    monkeypatch.setattr(MemoryMedia, "__init__", lambda self: (make(self), stores.append(self))[0])
    monkeypatch.setattr("verl.agent_loop.tool_agent.ToolAgentLoop._parse", ToolAgentLoop._parse)  # the tool sets it
    folder = tool_folder(tmp_path / "model", "qwen3_vl")
    assert run_rl(load_config(args_of(tmp_path, folder, f"agent.loop={loop}")), quiet=True).steps == 2
    metrics = metrics_of(tmp_path / "r")
    assert all(metrics[step]["mismatch/max_abs_dlogp"] < 1e-5 < metrics[step]["actor/grad_norm"] for step in (1, 2))
    rows = [row for step in (1, 2) for row in read_samples(tmp_path / "r", step)]
    assert all(row.components["files"] == 2 for row in rows), rows[0]
    assert all(IMAGE in row.response_ids[row.response_mask == 0] for row in rows)
    assert all(len(store) == 0 for store in stores) and not (tmp_path / "r" / "tool_images").exists()
    assert all(e.data["images"] == 1 for e in read_events(tmp_path / "r", {"tool"}))


LOOP = """
from PIL import Image

from verl.agent_loop.base import AgentLoopBase, AgentLoopOutput


class Looks(AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        asked, images = [dict(m) for m in kwargs["raw_prompt"]], list(kwargs["images"])
        ids = await self.apply_chat_template(asked, images=images)
        assert ids == list(kwargs["prompt_ids"]), "the prompt of the row"
        given = {"prompt_ids": ids, "sampling_params": {**sampling_params, "max_tokens": 4}, "image_data": images}
        first = await self.server_manager.generate(kwargs["request_id"], **given)
        number = sum(first.token_ids)
        shown = Image.new("RGB", (8, 8), (number % 256, 7 * number % 256, 31 * number % 256))
        more = [{"role": "user", "content": [{"type": "image", "image": shown}, {"type": "text", "text": "now?"}]}]
        images += (await self.process_vision_info(more))["images"]
        added = await self.apply_chat_template(more, images=images[-1:], remove_system_prompt=True)
        ids = [*ids, *first.token_ids, *added]
        given = {"prompt_ids": ids, "sampling_params": {**sampling_params, "max_tokens": 4}, "image_data": images}
        second = await self.server_manager.generate(kwargs["request_id"], **given)
        behind = [*first.token_ids, *added, *second.token_ids]
        mask = [1] * len(first.token_ids) + [0] * len(added) + [1] * len(second.token_ids)
        return AgentLoopOutput(list(kwargs["prompt_ids"]), behind, mask, num_turns=3)
"""


@pytest.mark.parametrize("loop", ["looks.py:Looks@driver", "looks.py:Looks"])
def test_images_of_a_loop_of_the_users_own_train(loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of tools: what is trained is what was sampled, and nothing is kept."""
    stores, make = list[MemoryMedia](), MemoryMedia.__init__
    monkeypatch.setattr(MemoryMedia, "__init__", lambda self: (make(self), stores.append(self))[0])
    (tmp_path / "looks.py").write_text(LOOP)
    folder = tool_folder(tmp_path / "model", "qwen3_vl")
    args = [a for a in args_of(tmp_path, folder) if not a.startswith("agent.")]
    assert run_rl(load_config([*args, f"agent.loop={tmp_path}/{loop}"]), quiet=True).steps == 2
    metrics = metrics_of(tmp_path / "r")
    assert all(metrics[step]["mismatch/max_abs_dlogp"] < 1e-5 < metrics[step]["actor/grad_norm"] for step in (1, 2))
    rows = [row for step in (1, 2) for row in read_samples(tmp_path / "r", step)]
    assert all(row.components["files"] == 2 for row in rows), rows[0]
    assert all((row.response_ids[row.response_mask == 0] == IMAGE).sum() == 4 for row in rows)
    assert all(len(store) == 0 for store in stores) and not (tmp_path / "r" / "tool_images").exists()


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_images_of_groups_in_flight(tmp_path: Path) -> None:
    """The tool is not called again for them: their content is that of the checkpoint."""
    ahead = ("pipeline.staleness=1", "run.total_steps=6", "run.save_every_steps=1", "run.grace_s=1")
    args, log = args_of(tmp_path, tool_folder(tmp_path / "model", "qwen3_vl"), *ahead), tmp_path / "log"
    out = tmp_path / "r"
    process = launch(args, log)
    wait_for(lambda: process.poll() is not None or saved(out) >= 2, 200, "step 2")
    process.kill()
    process.wait(30)
    step = saved(out)
    groups = state_of(out, step).groups
    images = set().union(*map(images_of_tools, groups))
    assert images and all(g.complete for g in groups if images_of_tools(g)), log.read_text()[-3000:]
    assert launch(args, log).wait(200) == 0, log.read_text()[-3000:]
    assert sorted(trained(out)) == [1, 2, 3, 4, 5, 6]
    inflight = {g.group_id for g in groups}
    later = {row.group_id for k in (step + 1, step + 2) for row in read_samples(out, k)}
    assert inflight & later and not (out / "tool_images").exists()
