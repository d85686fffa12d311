"""Find configurations that the VeOmni engine cannot run, before it starts. This imports no torch and no VeOmni."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from verl.config.adapter import teacher_models
from verl.config.backends import layout_of
from verl.config.model_files import describe_model
from verl.config.schema import Config
from verl.model_engine.faults import sharded_faults
from verl.model_engine.layout import use
from verl.workers.pools import Pool

FAMILIES_TRIED = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""The model types that were compared with the single process."""

VERSIONS = {"veomni": "0.1.12", "transformers": "5.9."}
"""The package versions with which the engine was run, by the start of the version."""


def families_fault(model_type: str) -> str:
    """Return a line if a family was not compared; "" if it was."""
    if model_type in FAMILIES_TRIED:
        return ""
    able = f"({', '.join(FAMILIES_TRIED)} were)"
    return f"model.engine=veomni: {model_type} was not compared with one process {able}; use model.engine=sharded"


def veomni_faults(config: Config, pools: Mapping[str, Pool], roles: Mapping[str, str]) -> Iterator[str]:
    """Yield a line per fault."""
    yield from sharded_faults(config, pools, roles)
    for name in ("tensor", "pipeline", "context", "expert"):
        if (size := getattr(config.parallel, name)) > 1:
            fix = "use parallel.sequence or data ranks, or another model.engine"
            yield f"parallel.{name}={size} with model.engine=veomni: it shards weights and the heads of rows; {fix}"
    layout, rank = layout_of(config), config.model.lora.get("rank")
    if layout.data % layout.replicate:
        fix = f"copies divide the {layout.data} data ranks; {use(layout.data)}"
        yield f"parallel.replicate={layout.replicate} with model.engine=veomni: {fix}"
    if rank:
        yield f"model.lora.rank={rank} with model.engine=veomni: factors were not compared; use model.engine=sharded"
    for path in (config.model.path, config.critic.path, config.reward.model, *teacher_models(config).values()):
        if path is None:
            continue
        try:
            kind = describe_model(path).model_type
        except ValueError:
            continue  # another check reports it
        if line := families_fault(kind):
            yield f"{line} (model.path={path})"
