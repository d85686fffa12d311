"""The modules of a model whose weights ranks gather and drop together."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from verl.model_engine.sharded_copy import accumulate_in_float32
from verl.models.families import family_of


class GatheredRoot(nn.Module):
    """The module that FSDP wraps as a whole. A pass of the engine runs as a method of it: only then does FSDP gather
    the weights that belong to no layer (embeddings, last norm, heads) before the pass."""

    def __init__(self, model: nn.Module, value_head: nn.Module | None) -> None:
        super().__init__()
        self.model, self.value_head = model, value_head
        self._no_split_modules: list[str] = list(getattr(model, "_no_split_modules", None) or ())

    def run(self, fn: Any, *args: Any) -> Any:
        """Return fn(*args), a pass, with the weights of the root gathered."""
        accumulate_in_float32(self)
        return fn(*args)


def layers_of(model: Any) -> list[nn.Module]:
    """Return the layers of a model."""
    kinds: Any = model._no_split_modules or ()
    return [module for module in model.modules() if type(module).__name__.removeprefix("FSDP") in kinds]


def gathered_units(model: Any) -> list[nn.Module]:
    """Return the layers of a model, and then the modules that encode images, of which weights are outside of layers."""
    family, modules = family_of(model.config), dict(model.base_model.named_modules())
    encoder = [] if family is None else [modules[name] for name in family.encoder if name in modules]
    return [*layers_of(model), *encoder]


def shard_unit(module: nn.Module, mesh: DeviceMesh | None) -> None:
    """Shard the weights of a module over the ranks of a mesh. It gets another class, for which transformers has to know
    what it records: towers return states of their layers in this way."""
    from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

    fully_shard(module, mesh=mesh)
    if recorded := getattr(module, "_can_record_outputs", None):
        _CAN_RECORD_REGISTRY[module] = recorded  # type: ignore[index]
