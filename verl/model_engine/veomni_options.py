"""Find configurations that the VeOmni engine cannot run, before it starts. This imports no torch and no VeOmni."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from verl.config.backends import layout_of
from verl.config.model_files import describe_model
from verl.config.schema import Config
from verl.model_engine.faults import model_folders, sharded_faults
from verl.model_engine.layout import use
from verl.model_engine.lora_spec import trained_by
from verl.workers.pools import Pool

FAMILIES_TRIED = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""The model types that were compared with the single process."""


def families_fault(model_type: str) -> str:
    """Return a line if a family was not compared; "" if it was."""
    if model_type in FAMILIES_TRIED:
        return ""
    able = f"({', '.join(FAMILIES_TRIED)} were)"
    return f"model.engine=veomni: {model_type} was not compared with one process {able}; use model.engine=sharded"


def veomni_faults(config: Config, pools: Mapping[str, Pool], roles: Mapping[str, str]) -> Iterator[str]:
    """Yield a line per fault."""
    yield from sharded_faults(config, pools, roles)
    layout = layout_of(config)
    sizes = {"tensor": layout.tensor, "pipeline": layout.pipeline, "context": layout.context, "expert": layout.expert}
    for name, size in sizes.items():
        if size > 1:
            fix = "use parallel.sequence or data ranks, or another model.engine"
            yield f"parallel.{name}={size} with model.engine=veomni: it shards weights and the heads of rows; {fix}"
    if layout.data % layout.replicate:
        fix = f"copies divide the {layout.data} data ranks; {use(layout.data)}"
        yield f"parallel.replicate={layout.replicate} with model.engine=veomni: {fix}"
    if trained_by(config.model.lora) is not None:
        yield "model.lora with model.engine=veomni: factors were not compared; leave it out, or use sharded"
    for key, path in model_folders(config):
        try:
            kind = describe_model(path).model_type
        except ValueError:
            continue  # another check reports it
        if line := families_fault(kind):
            yield f"{key}={path}: {line}"
