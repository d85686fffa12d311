"""Engines on Megatron-Core for tests, beside the cases of tests/distributed."""

from __future__ import annotations

import functools
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import BUDGET, EXPERTS, HEADS, MODELS, OUTPUTS, SIZES, TAUGHT, Case, model, share
from safetensors.torch import load_file, save_file
from test_split import TEACHER, TOP_K
from torch import Tensor
from transformers import AutoModelForCausalLM

from verl.checkpoint.score import WEIGHT as SCORE
from verl.model_engine.base import EngineContext, TeacherHead
from verl.model_engine.layout import Layout
from verl.model_engine.megatron import MegatronEngine, build
from verl.model_engine.megatron_options import Options
from verl.model_engine.optim import OptimSpec

with warnings.catch_warnings():  # imported before a rank is forked
    warnings.simplefilter("ignore")
    import megatron.core.distributed
    import megatron.core.models.gpt
    import megatron.core.optimizer
    import megatron.core.pipeline_parallel  # noqa: F401


def deeper(made: Callable[[], Any]) -> Any:
    """A model as this one, with twice as many layers."""
    config = made().config
    config.num_hidden_layers, config.layer_types = 2 * config.num_hidden_layers, None
    return AutoModelForCausalLM.from_config(type(config).from_dict(config.to_dict()))


LAYOUTS = {
    "one": Layout(),
    "TP": Layout(world_size=2, tensor=2),
    "PP": Layout(world_size=2, pipeline=2),
    "DP": Layout(world_size=2),
    "EP": Layout(world_size=2, expert=2),
    "TP x PP": Layout(world_size=4, tensor=2, pipeline=2),
    "TP x DP": Layout(world_size=4, tensor=2),
    "PP x DP": Layout(world_size=4, pipeline=2),
    "TP x EP": Layout(world_size=4, tensor=2, expert=2),
    "PP x EP": Layout(world_size=4, pipeline=2, expert=2),
    "EP over TP": Layout(world_size=2, tensor=2, expert=2),
    "EP over TP x DP": Layout(world_size=4, tensor=2, expert=4),
    "PP x VP": Layout(world_size=2, pipeline=2),
    "PP x VP x DP": Layout(world_size=4, pipeline=2),
    "TP x ETP": Layout(world_size=2, tensor=2),
    "DP x ETP": Layout(world_size=2),
    "TP x EP x ETP": Layout(world_size=4, tensor=2, expert=2),
}
OF_LAYOUT: dict[str, dict[str, Any]] = {"PP x VP": {"virtual_stages": 2}, "PP x VP x DP": {"virtual_stages": 2}}
OF_LAYOUT |= {name: {"expert_tensor": 2} for name in ("TP x ETP", "DP x ETP", "TP x EP x ETP")}
FOUR, FOUR_BIASES, FOUR_EXPERTS = "qwen3, four layers", "llama, four layers", "qwen3, experts, four layers"
"""Models with layers for two chunks on two stages."""
for _name, _of in ((FOUR, "qwen3, tied"), (FOUR_BIASES, "llama, biases"), (FOUR_EXPERTS, EXPERTS)):
    MODELS[_name] = functools.partial(deeper, MODELS[_of])


def options_of(layout: str, *, distributed: bool = False) -> Options:
    """The options of a layout of the table above."""
    return Options(distributed_optimizer=distributed, **OF_LAYOUT.get(layout, {}))


def folder(name: str, scored: bool = False) -> Path:
    """The folder of a model of the cases, with the score head that they have: made before ranks are forked."""
    return _folder(name, scored)


@functools.cache
def teacher() -> TeacherHead:
    """The folder of the head of the cases' teacher."""
    kept = tempfile.TemporaryDirectory()
    _FOLDERS.append(kept)
    (Path(kept.name) / "config.json").write_text("{}")
    save_file({"lm_head.weight": TEACHER.head.weight}, Path(kept.name) / "model.safetensors")
    return TeacherHead(Path(kept.name), TEACHER.beta, TEACHER.temperature)


@functools.cache
def _folder(name: str, scored: bool) -> Path:
    kept = tempfile.TemporaryDirectory()
    _FOLDERS.append(kept)
    model(name).save_pretrained(kept.name)
    file = Path(kept.name) / "model.safetensors"
    if scored:
        head = torch.randn(1, SIZES["hidden_size"], generator=torch.Generator().manual_seed(1))
        save_file(load_file(file) | {SCORE: head}, file, metadata={"format": "pt"})
    return Path(kept.name)


_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []


def built(name: str, role: str, layout: Layout, *, options: Options | None = None, **given: Any) -> MegatronEngine:
    """This rank's engine of a model of the cases."""
    trained, head = role in ("actor", "critic", *TAUGHT), HEADS.get(role, "lm")
    context: dict[str, Any] = dict(
        folder=folder(name, head != "lm"),
        head=head,
        teacher=teacher() if role in TAUGHT else None,
        top_k=TOP_K,
        dtype="float32",
        optim=OptimSpec(lr=1e-2) if trained else None,
        max_tokens_per_microbatch=BUDGET,
        layout=layout,
    )
    found = build(options or Options(distributed_optimizer=False), EngineContext(**context | given))
    assert isinstance(found, MegatronEngine)
    return found


def gradients(e: MegatronEngine) -> dict[str, Tensor]:
    """Whole, of all stages, by Hugging Face names."""
    every = {n: p.main_grad for n, p in e.local.parameters.items() if p.requires_grad}
    pieces = e.local.trained_pieces()
    here = {n: e.local.wrapped(p, e.local.part(p, every)) for n, p in pieces.items()}
    names = [n for n in e.local._delivery if n in e.local.trained_names()]
    found = {n: e.local.delivered(n, here.get(n)).clone() for n in names}
    head = [{n: every[n].clone() for n in every if n.startswith("value_head.")}]
    dist.broadcast_object_list(head, group=e.local.column, group_src=e.local.last_stage)
    return found | head[0]


def on_rank(case: Case, rank: int, **given: Any) -> dict[str, Any]:
    """As `cases.on_rank`, by Megatron."""
    rows, batch, count = share(case, rank)
    e = built(case.model, case.role, case.layout, **given)
    if case.role in OUTPUTS:
        return {"rows": rows, "columns": e.infer(batch, OUTPUTS[case.role]), "whole": {}, "metrics": {}}
    out = e.forward_backward(batch, case.batch()[2], count)
    return {"rows": rows, "columns": dict(out.columns), "whole": gradients(e), "metrics": out.metrics}
