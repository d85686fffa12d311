"""The form in which transformers saves the tensors of a model: names, experts one by one, several tensors as one."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from typing import Any

import torch

from verl.errors import Refused


class OtherOrder(Refused):
    """Raised for a tensor that is saved in another order, as the transposed experts of Qwen3-VL, or in one tensor with
    others."""


def made_of(model: Any, names: Iterable[str]) -> tuple[dict[str, tuple[Any, dict[str, list[str]]]], set[str]]:
    """Return how transformers makes the tensors of a model of those in a folder, by the names there: (name in the model
    -> (its conversion, the names in the folder by the patterns of the conversion), tensors that the model lacks)."""
    from transformers import core_model_loading as hf
    from transformers.conversion_mapping import get_model_conversion_mapping

    ways: Any = get_model_conversion_mapping(model)
    renamings = [way for way in ways if isinstance(way, hf.WeightRenaming)]
    converters = [way for way in ways if isinstance(way, hf.WeightConverter)]
    by_pattern = {pattern: way for way in converters for pattern in way.source_patterns}
    wanted, prefix = model.state_dict(), model.base_model_prefix
    made: dict[str, tuple[Any, dict[str, list[str]]]] = {}
    unexpected = set()
    for name in sorted(names, key=hf.dot_natural_key):
        target, pattern = hf.rename_source_key(name, renamings, converters, prefix, wanted)
        if target not in wanted and name in wanted:
            target, pattern = hf.rename_source_key(name, [], [], prefix, wanted)
        if target not in wanted or (pattern is None and target in made):
            unexpected.add(target)
            continue
        way = hf.WeightRenaming(name, target) if pattern is None else by_pattern[pattern]
        made.setdefault(target, (way, {}))[1].setdefault(pattern or name, []).append(name)
    return made, unexpected


class SavedForm:
    """The tensors of a folder as which transformers saves those of a model. It loads them by conversions, and saves
    with each of them reverted, in the reverse order."""

    def __init__(self, model: Any, folder: Collection[str] = ()) -> None:
        """model: a model of transformers that was built from its configuration, without storage · folder: the names in
        another folder, which are used for the tensors of which transformers makes the same."""
        from transformers import core_model_loading as hf
        from transformers.conversion_mapping import get_model_conversion_mapping

        ways: Any = get_model_conversion_mapping(model, add_legacy=False)
        # no folder was loaded: a prefix that some folders have is not added
        back: list[Any] = [way.reverse_transform() for way in reversed(ways) if not isinstance(way, hf.PrefixChange)]
        self._model, self._state = model, model.state_dict()
        self._renamings: list[Any] = [way for way in back if isinstance(way, hf.WeightRenaming)]
        self._converters: list[Any] = [way for way in back if isinstance(way, hf.WeightConverter)]
        in_one = dict[str, list[str]]()
        for name in sorted(self._state, key=hf.dot_natural_key):
            whole, pattern = hf.apply_converters(name, self._converters)
            if pattern is not None:
                in_one.setdefault(whole, []).append(name)
            else:  # some renamings apply to all names behind a first one
                hf.apply_renamings(name, self._renamings)
        self._together = {name: tuple(names) for names in in_one.values() if len(names) > 1 for name in names}
        self._own: Mapping[str, str] = {}
        self._own = self._names_in(folder)

    def together(self, name: str) -> tuple[str, ...]:
        """Return the names of the tensors that are saved in one with this one, itself among them."""
        return self._together.get(name, (name,))

    def saved(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors that a folder has, by their names there. tensors: all that `together` has of one name, in
        its order"""
        from transformers import core_model_loading as hf

        keys = {name: hf.apply_converters(name, self._converters) for name in tensors}
        way = next((way for way in self._converters if way.rename_source_key(next(iter(keys)))[1] is not None), None)
        if way is None:
            return {self._named(name): tensor for name, tensor in tensors.items()}
        for name, (whole, pattern) in keys.items():
            way.add_tensor(whole, name, pattern, tensors[name])
        parts = way.convert(whole, model=self._model, config=self._model.config)
        return {self._named(name): t[0] if isinstance(t, list) else t for name, t in parts.items()}

    def _named(self, name: str) -> str:
        from transformers.core_model_loading import apply_renamings

        name = apply_renamings(name, self._renamings)
        return self._own.get(name, name)

    def names(self) -> dict[str, set[str]]:
        """Return the names in the folder of the tensors as which each one of the model is saved."""
        return {name: {*self.saved({one: self._state[one] for one in self.together(name)})} for name in self._state}

    def _names_in(self, folder: Collection[str]) -> dict[str, str]:
        """Return the names that a folder has for saved tensors, where they are others and transformers makes the same
        of both."""
        if not folder:
            return {}
        (ours, _), (theirs, _) = made_of(self._model, {*chain(*self.names().values())}), made_of(self._model, folder)
        found = dict[str, str]()
        for target, (way, saved) in ours.items():
            given = theirs[target][1] if target in theirs else {}
            converted = hasattr(way, "operations")
            if [*map(len, saved.values())] == [*map(len, given.values())] and (not converted or [*saved] == [*given]):
                found.update(zip(chain(*saved.values()), chain(*given.values())))
        return found

    def parts(self, name: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...], int]]:
        """Return the tensors as which this one is saved (experts one by one), in their order: (name in the folder,
        shape, its first row in this tensor). A row is along the last dimension. Raise OtherOrder if a saved tensor is
        no run of rows of this one."""
        if len(names := self.together(name)) > 1:
            raise OtherOrder(f"{name}: transformers saves it in one tensor with {', '.join({*names} - {name})}")
        if not math.prod(shape):
            return [(name, shape, 0)]
        rows = torch.arange(math.prod(shape[:-1])).view((*shape[:-1], *([1] if shape else [])))
        found = []
        for part, of in self.saved({name: rows}).items():
            first = int(of.reshape(-1)[0])
            run = torch.arange(first, first + of.numel())
            if of.shape[-1:] != rows.shape[-1:] or not torch.equal(of.reshape(-1), run):
                raise OtherOrder(f"{name}: transformers saves it in an order that is none of its rows, as {part}")
            found.append((part, (*of.shape[:-1], *shape[-1:]), first))
        return sorted(found, key=lambda part: part[2])
