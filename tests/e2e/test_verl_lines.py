"""Public command lines of verl's start: each makes a step with a tiny model, tiny rows and the engines of here
(`model.engine=torch` for those of Megatron and VeOmni too)."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from adapters import write_adapter
from small_runs import metrics_of
from transformers import AutoConfig, Qwen3ForSequenceClassification, Qwen3MoeConfig, Qwen3MoeForCausalLM
from verl_lines import Line, public_lines, write_places, write_seeing
from vision import png

from verl.config.compat import rules
from verl.config.load import load_config
from verl.driver.launch import run_rl, run_supervised
from verl.models import tiny
from verl.recipes import tool_arithmetic

QUICK = (
    "retool/run_qwen35",
    "cispo_trainer",
    "ppo_trainer_megatron",
    "run_qwen2_7b_sft",
    "colocate_async",
    "lora/run_qwen3_8b_merge",
    "lora/run_qwen2_5_vl",
)
"""One of each kind, in every run; those of LoRA with the slow tests; the others with FULL_GRID=1."""
SLOW = QUICK[0]
SMALL = (
    *(
        "data.max_prompt_tokens=600",
        "rollout.max_response_tokens=6",
        "step.prompts_per_step=2",
        "step.updates_per_step=1",
    ),
    *("step.max_tokens_per_microbatch=2048", "run.total_steps=1", "run.eval_before=false", "run.eval_after=false"),
    *("run.eval_every_steps=0", "run.save_every_steps=0", "run.threads=1", "run.name=r", "run.wait_timeout_s=100"),
    *(
        "model.dtype=float32",
        "model.device=cpu",
        "model.engine=torch",
        "rollout.engine=native",
        "track.sinks=[jsonl]",
        "reward.num_workers=1",
        "data.truncation=left",
    ),
    *("data.max_rows=8", "data.max_eval_rows=2", "data.num_workers=0", "eval.samples_per_prompt=1", "run.resume=auto"),
    *("data.max_tokens_per_row=600", "data.filter_overlong_prompts=false"),
)
"""Values that are smaller here; the algorithm, its rewards and its schedule are the script's own."""


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Make a file or folder for each word of the lines that is a placeholder."""
    folder = tmp_path_factory.mktemp("places")
    tokenizer = tiny.character_tokenizer(
        [chr(i) for i in range(32, 127)] + ["\n"], template=tool_arithmetic.CHAT_TEMPLATE
    )
    sizes = {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "ffn": 64, "max_positions": 32768}
    made = {"MODEL": tiny.save(tiny.qwen3(tokenizer, seed=1, **sizes), tokenizer, folder / "model")}
    config = AutoConfig.from_pretrained(made["MODEL"])
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "layer_types": None}
    sparse = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**config.to_dict(), **experts, "model_type": "qwen3_moe"}))
    made["SPARSE"] = tiny.save(sparse, tokenizer, folder / "sparse")
    config = AutoConfig.from_pretrained(made["MODEL"], num_labels=1, pad_token_id=0)
    made["CLASSIFIER"] = tiny.save(Qwen3ForSequenceClassification(config), tokenizer, folder / "classifier")
    made |= {"ADAPTER": write_adapter(folder / "adapter", made["MODEL"], size=0.01)}
    made |= {"SEEING": write_seeing(folder / "seeing"), "IMAGES": folder / "images.parquet"}
    seen = [{"role": "user", "content": "<image>0?"}]
    ends = {"data_source": "openai/gsm8k", "reward_model": {"style": "rule", "ground_truth": "1"}}
    rows_of_images = [{"prompt": seen, "images": [png(12, 8, k)], **ends} for k in range(8)]
    pq.write_table(pa.Table.from_pylist(rows_of_images), made["IMAGES"])
    made |= write_places(folder)
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{n}+{n}="}],
            "data_source": "openai/gsm8k",
            "reward_model": {"style": "rule", "ground_truth": str(2 * n)},
            "extra_info": {"index": n},
        }
        for n in range(40)
    ]
    turns = [[*row["prompt"], {"role": "assistant", "content": "4"}] for row in rows]
    for name, listed in (("TRAIN", rows), ("VAL", rows[:4]), ("TURNS", [{"messages": t} for t in turns])):
        made[name] = folder / f"{name.lower()}.jsonl"
        made[name].write_text("\n".join(map(json.dumps, listed)))
    return made


def has_lora(line: Line) -> bool:
    return any(re.search(r"lora.rank=[1-9]", arg) for arg in line.args)


def small(line: Line, places: dict[str, Path], root: Path) -> list[str]:
    """The line with paths of here and small sizes. Keys of ours win over the script's."""
    paths = {**places, "TRAIN": places["TURNS"], "VAL": places["TURNS"]} if line.kind == "sft" else places
    args = line.with_paths(paths)
    more = [f"run.root_dir={root}", f"data.cache_dir={root / 'cache'}", *SMALL]
    keys = {arg.lstrip("+").partition("=")[0]: arg.partition("=")[2] for arg in line.args}
    if any(key.endswith("reward_model.enable") and value == "True" for key, value in keys.items()):
        more.append(f"reward.model={places['CLASSIFIER']}")
    if line.kind == "rl":
        more.append(f"reward.path={places['GRADER']}")
        more.append(f"step.samples_per_prompt={min(3, int(keys.get('actor_rollout_ref.rollout.n', 1)))}")
    if has_lora(line):
        more.append("model.lora.rank=4")  # of the small model
    if "data.val_files" not in keys:
        more.append(f"data.eval_files=[{places['VAL']}]")
    return [*args, *more]


@pytest.fixture(autouse=True)
def without_trackers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "find_spec", lambda name: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


TAKEN = [line for line in public_lines() if not line.reason]


def cases() -> list[object]:
    full = pytest.mark.full("the quick ones are of each kind, and tests/unit/test_compat.py takes all of them")
    marks = {line: () if any(part in line.name for part in QUICK) else full for line in TAKEN}
    of_lora = {line for line in TAKEN if has_lora(line) or any("lora_adapter_path" in arg for arg in line.args)}
    later = (line for line in TAKEN if SLOW in line.name or (line in of_lora and marks[line] is full))
    marks |= dict.fromkeys(later, pytest.mark.slow)
    return [pytest.param(line, id=line.name, marks=marks[line]) for line in TAKEN]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("line", cases())
def test_a_public_line_starts_and_makes_a_step(line: Line, places: dict[str, Path], tmp_path: Path) -> None:
    args = small(line, places, tmp_path)
    said = load_config(args, verl_defaults=line.kind).config
    if said.reward.overlong_buffer_tokens:
        args += ["reward.overlong_buffer_tokens=2", "algorithm.options.overlong_tokens=null"]
    if 0 < said.pipeline.staleness < 0.5:  # of two prompts it is less than one
        args.append("pipeline.staleness=0.5")
    resolved = load_config(args, verl_defaults=line.kind)
    finished = run_rl(resolved, quiet=True) if line.kind == "rl" else run_supervised(resolved, "sft")
    (step,) = metrics_of(finished.dir).values()
    assert finished.steps == 1
    losses = [value for name, value in step.items() if "loss" in name or "grad_norm" in name]
    assert losses and all(value == value for value in losses), step
