"""The modules of a model whose weights ranks gather and drop together."""

from __future__ import annotations

from typing import Any

from torch import nn

from verl.models.families import family_of


def layers_of(model: Any) -> list[nn.Module]:
    """Return the layers of a model."""
    kinds: Any = model._no_split_modules or ()
    return [module for module in model.modules() if type(module).__name__.removeprefix("FSDP") in kinds]


def gathered_units(model: Any) -> list[nn.Module]:
    """Return the layers of a model, and then the modules that encode images, of which weights are outside of layers."""
    family, modules = family_of(model.config), dict(model.base_model.named_modules())
    encoder = [] if family is None else [modules[name] for name in family.encoder if name in modules]
    return [*layers_of(model), *encoder]
