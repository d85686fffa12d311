"""Read the table of verl's keys (`table.tsv`)."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from types import MappingProxyType
from typing import Any, cast, get_args

from verl.algorithms.presets import knobs, written
from verl.config.backends import option_keys
from verl.config.compat.trl import TRAINER
from verl.config.moved import moved_line
from verl.config.overrides import Action
from verl.config.tree import leaves
from verl.errors import Refused
from verl.names import nearest

DISTILLATION: Mapping[str, str] = MappingProxyType(
    {
        "teacher_model_name_or_path": "teacher.path=FOLDER",
        "teacher_model_server_url": "teacher.path=URL",
        "use_teacher_server": "a URL as teacher.path says it",
        "teacher_model_revision": "teacher.path=FOLDER, of the revision that was downloaded",
        "teacher_model_init_kwargs": "a teacher is computed as the policy is (model.dtype, model.engine_options)",
        "beta": "algorithm.kl_loss_coef of GRPO; algorithm.options.beta of algorithm.name=gkd or gkd_topk (0: forward)",
        "lmbda": "algorithm.options.on_policy_share, with algorithm.options.stored_key=COLUMN for the other prompts",
        "seq_kd": "`verl generate` with the teacher, then `verl sft` on its answers",
        "temperature": "rollout.temperature, of both sides; teacher.temperature is the teacher's alone",
        "loss_top_k": "teacher.top_k, of the teacher's likeliest, of algorithm.name=gkd_topk; all: gkd",
        "loss_add_tail": "all other tokens are always one more outcome",
        "reverse_kl_top_1_mode": "of the drawn tokens alone is algorithm.name=opd",
        "use_fused_linear_loss": "logits are never made for more than a chunk of tokens",
        "max_new_tokens": "rollout.max_response_tokens",
        "max_completion_length": "rollout.max_response_tokens",
        "num_generations": "step.samples_per_prompt",
        "disable_dropout": "dropout is off",
        "model_init_kwargs": "model.path, model.dtype and model.trust_remote_code",
        "trust_remote_code": "model.trust_remote_code",
        "shuffle_dataset": "data.shuffle",
        "pad_to_multiple_of": "rows are packed, never padded",
        "chat_template_kwargs": "model.template_kwargs",
        "top_p": "rollout.top_p",
        "top_k": "rollout.top_k",
        "min_p": "rollout.min_p",
        "repetition_penalty": "nothing: what is drawn is the policy's own distribution",
        "generation_kwargs": "rollout.stop, rollout.ignore_eos and the other keys of `verl show config rollout`",
        "cache_implementation": "rollout.engine",
        "ds3_gather_for_generation": "weights are published to the rollout engine (sync.engine)",
        "use_vllm": "rollout.engine=vllm",
        "vllm_mode": "rollout.engine=vllm, beside it rollout.url=URL where one runs already",
        "vllm_enable_sleep_mode": "pipeline.placement=colocated",
        **dict.fromkeys(
            ("vllm_server_base_url", "vllm_server_host", "vllm_server_port"), "rollout.url=http://HOST:PORT"
        ),
        "vllm_server_timeout": "rollout.engine_options={request_timeout_s: 240}, of rollout.engine=vllm",
        "vllm_gpu_memory_utilization": "rollout.engine_options={gpu_memory_utilization: 0.3}, of rollout.engine=vllm",
        "vllm_tensor_parallel_size": "rollout.engine_options={tensor_parallel_size: 2}, of rollout.engine=vllm",
        "vllm_model_impl": "rollout.engine_options={args: {model-impl: transformers}}, of rollout.engine=vllm",
        "vllm_max_model_length": "follows from data.max_prompt_tokens and rollout.max_response_tokens",
        "vllm_group_port": "weights go through shared memory (sync.engine): no port",
        "vllm_structured_outputs_regex": "nothing: answers are not held to a grammar",
        "max_tool_calling_iterations": "agent.max_turns",
        **dict.fromkeys(
            ("log_completions", "num_completions_to_print", "log_unique_prompts"),
            "every answer is in samples/ (track.samples_per_step) and in the report",
        ),
    }
)
"""Our keys for the fields of TRL's GKDConfig and DistillationConfig. They are not aliases: such a field on the command
line is refused, with a message that names our key."""


_ZERO = "nothing: a pass draws no random numbers, or the rollout would sample from another policy"
PEFT: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("peft_config", "use_peft", "load_lora"), "model.lora.rank=32"),
        **dict.fromkeys(("r", "lora_r"), "model.lora.rank"),
        "lora_alpha": "model.lora.alpha",
        "use_rslora": "model.lora.rslora",
        **dict.fromkeys(("target_modules", "lora_target_modules", "layers_to_transform"), "model.lora.targets"),
        "target_parameters": "model.lora.targets",
        "exclude_modules": "model.lora.exclude",
        "lora_dropout": _ZERO,
        "bias": "nothing: only factors are trained (bias=none)",
        "modules_to_save": "model.lora.modules_to_save",
        **dict.fromkeys(("use_dora", "init_lora_weights"), "nothing: plain LoRA starts at the base model"),
        **dict.fromkeys(("task_type", "lora_task_type"), "nothing: it follows from the verb"),
    }
)
"""Our keys for the fields of PEFT's LoraConfig (TRL's `peft_config`), which are refused in the same way."""


@dataclass(frozen=True, slots=True)
class KeyRow:
    """One row of the table. `targets` are our keys; the first lines of table.tsv describe `rule`, `text` and the
    defaults."""

    key: str
    action: Action
    targets: tuple[str, ...] = ()
    rule: str = ""
    default_rl: str = ""
    default_sft: str = ""
    text: str = ""

    @property
    def harmless(self) -> list[str]:
        """The values with which a refused key has no effect."""
        return self.rule.removeprefix("except:").split(",") if self.rule else []

    @property
    def joint(self) -> str:
        """The name of the function of rules.py that reads this key; "" if there is none."""
        return self.rule[1:].partition(":")[0] if self.rule.startswith("@") else ""

    def check(self, value: Any) -> Any:
        """Return `value` as its rule uses it: a number, a switch, or our word for verl's. Raise ValueError for another
        value."""
        kind = self.rule.partition(":")[2]
        if value is None or not kind:
            return value
        if kind in ("number", "switch"):
            if isinstance(value, bool) != (kind == "switch") or not isinstance(value, int | float):
                wanted = "a number" if kind == "number" else "True or False"
                raise Refused(f"{self.key}={value}: expected {wanted}")
            return value
        words = dict(pair.split("=") for pair in kind.split(","))
        found = [ours for theirs, ours in words.items() if same_value(value, theirs)]
        if not found:
            there = "" if self.rule.startswith("map:") else f"not in this version; there are {', '.join(words)}; "
            raise Refused(f"{self.key}={value}: {(there + self.text).removesuffix('; ')}")
        return found[0]


@functools.cache
def key_rows() -> Mapping[str, KeyRow]:
    """Return the row of every key of verl in the table, in its order."""
    text = resources.files("verl.config.compat").joinpath("table.tsv").read_text(encoding="utf-8")
    rows: dict[str, KeyRow] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            cells = line.split("\t")
            key, action, to, *rest = cells + [""] * (7 - len(cells))
            assert len(rest) == 4 and action in get_args(Action), f"table.tsv: {line!r}"
            for name in _spelled_out(key):
                assert name not in rows, f"table.tsv: {name} twice"
                rows[name] = KeyRow(name, cast(Action, action), tuple(to.split(",")) if to else (), *rest)
    return MappingProxyType(rows)


def _spelled_out(key: str) -> Iterator[str]:
    """Expand braces: a.{b,c}.d -> a.b.d, a.c.d."""
    parts = re.split(r"\{([^}]*)\}", key)
    yield from map("".join, itertools.product(*(p.split(",") if i % 2 else [p] for i, p in enumerate(parts))))


def keys_table() -> list[tuple[str, str, str]]:
    """Return (verl's key, action, effect) for `verl show keys`."""
    return [(r.key, r.action, _becomes(r)) for r in key_rows().values()]


def _becomes(row: KeyRow) -> str:
    if row.action == "mapped":
        values = f" ({row.rule.removeprefix('map:')})" if row.rule.startswith("map:") else ""
        return ", ".join(row.targets) + values + (f"; {row.text}" if row.text else "")
    return (f"except at {','.join(row.harmless)}: " if row.action == "refused" and row.rule else "") + row.text


_TEACHER = re.compile(r"(distillation\.teacher_models\.)(?!teacher_model\.)\w+\.")


@functools.lru_cache(maxsize=4096)
def find_row(key: str) -> KeyRow | None:
    """Return the row of `key`, or of the first `prefix.*` that it begins with; None if there is none. Every teacher has
    the rows of `teacher_model`."""
    rows = key_rows()
    if key in rows:
        return rows[key]
    if (one := _TEACHER.match(key)) is not None and (row := find_row(f"{one[1]}teacher_model.{key[one.end() :]}")):
        return replace(row, key=key)
    for row in rows.values():
        if row.key.endswith(".*") and key.startswith(row.key[:-1]):
            tail = key[len(row.key) - 1 :]
            targets = tuple(t[:-1] + tail if t.endswith(".*") else t for t in row.targets)
            return replace(row, key=key, targets=targets)
    return None


def same_value(value: Any, text: str) -> bool:
    """Return True if a parsed value equals `text` of the table (0 and 0.0, None and null, True and true)."""
    if value is None or isinstance(value, bool):
        return text.lower() == {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        try:
            return float(text) == value
        except ValueError:
            return False
    return str(value).lower() == text.lower()


def unknown_key(key: str, origin: str = "", value: str = "VALUE") -> str:
    """Return the line for an unknown key, with the nearest keys of both vocabularies."""
    message = f"unknown key {key!r}" + (f" ({origin})" if origin else "")
    if (moved := moved_line(key, value)) is not None:
        return f"{message}: {moved}"
    below = [name for name in leaves() if name.startswith(f"{key}.")]
    if below:
        return f"{message}: a section; its keys are {', '.join(below)}"
    if (field := key.removeprefix("peft_config.")) in PEFT:
        return f"{message}: PEFT's name; here: {PEFT[field]}"
    rows = key_rows()
    if key in rows and rows[key].action == "mapped":
        return f"{message}: verl's name, only on the command line; here it is {' and '.join(rows[key].targets)}"
    section, _, name = key.rpartition(".")
    ours = {**TRAINER, **DISTILLATION}.get(name, "")
    if ours and (not section or ours.startswith(f"{section}.")) and not (section == "algorithm" and name in knobs()):
        return f"{message}: TRL's name; here: {ours}"
    if section in ("", "algorithm") and name in knobs():
        return f"{message}: write {written(name, value)}"
    theirs = (k for k in rows if not k.endswith(".*") and k not in leaves())
    options = (f"algorithm.options.{name}" for name, option in knobs().items() if option and section == "algorithm")
    near = nearest(key, [*leaves(), *option_keys(), *options, *theirs])
    return f"{message}: " + (f"did you mean {' or '.join(near)}?" if near else "see `verl show config` for all keys")
