"""Hugging Face folders of which each rank reads its own part.

The model is built without storage and sharded; then each rank reads its part of each tensor from the safetensors files,
which are mapped. Names, conversions (experts that are many tensors in a folder and one in transformers), ties, buffers
and all values are exactly those of `from_pretrained`."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from verl.checkpoint.loadable import BUILD_ERRORS, cannot_load, check_loadable
from verl.checkpoint.saved_form import made_of
from verl.config.model_files import quantised_in
from verl.errors import Refused
from verl.model_engine.hf_model import refuse_other_weights
from verl.models.families import auto_class
from verl.nn.quant import QuantisedTensor, read_quantised
from verl.nn.transformers_compat import loading_report

Index = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class _Made:
    """The conversion of tensors of a folder into tensors of the model."""

    transform: Any
    """The conversion of transformers."""
    sources: Mapping[str, Sequence[str]]
    """Names in the folder, by transformers' patterns."""
    targets: tuple[str, ...]
    """Names in the model."""

    def make(self, read: Callable[[str], Tensor], config: Any, *, row: int | None = None) -> dict[str, Tensor]:
        """Return all targets by name. row: return only this row [1, ...] of the one target that is stacked from lists
        of tensors."""
        rows = slice(None) if row is None else slice(row, row + 1)
        for pattern, names in self.sources.items():
            for name in names[rows]:
                self.transform.add_tensor(self.targets[0], name, pattern, read(name))
        found = self.transform.convert(self.targets[0], config=config)
        return {name: t[0] if isinstance(t, list) else t for name, t in found.items()}

    @property
    def copied(self) -> str | None:
        """The name of the folder's tensor that is copied unchanged to the target; None: the target is converted."""
        return None if hasattr(self.transform, "operations") else next(iter(self.sources.values()))[0]

    @property
    def stacked(self) -> bool:
        """True if each row of the target is made of one tensor of each list, as for experts."""
        from transformers.core_model_loading import Concatenate, MergeModulelist

        first, *rest = self.transform.operations
        merged = isinstance(first, MergeModulelist) and first.dim == 0
        return merged and all(isinstance(op, Concatenate) and op.dim > 0 for op in rest)


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A causal LM in float32 without storage for its parameters (its buffers have storage), and the files that they are
    read from."""

    model: Any
    files: Mapping[str, Path]
    """The file of each tensor in the folder."""
    made: Sequence[_Made]
    """How the model's tensors are made of those in the folder."""
    spare: Collection[str]
    """Weights that the folder lacks and that are not trained; they are drawn at random."""
    quantised: Collection[str] = ()
    """The weights that the folder has quantised; `fill` dequantises them."""

    def fill(self, into: Mapping[str, Tensor]) -> None:
        """Read this rank's parts of these tensors from the files, in place. into: by the model's names; a tied tensor
        has several."""
        filled: set[int] = set()
        with ExitStack() as stack:
            open_files = {path: stack.enter_context(safe_open(path, "pt")) for path in {*self.files.values()}}

            def read(name: str, index: Index = ()) -> Tensor:
                file = open_files[self.files[name]]
                if name in self.quantised:
                    return _codes_of(name, self.files, open_files).dequantised(torch.float32)[index]
                found: Tensor = file.get_slice(name)[index] if index else file.get_tensor(name)
                return found.to(torch.float32) if found.is_floating_point() else found

            for made in self.made:
                here = {name: into[name] for name in made.targets if name in into}
                self._fill(made, here, read)
                filled |= {id(t) for t in here.values()}
        for name in into.keys() & self.spare:
            noise = torch.Generator().manual_seed(0)
            std = self.model.config.get_text_config().initializer_range
            mine, index = part_and_place(into[name])
            mine.copy_(torch.empty(into[name].shape).normal_(std=std, generator=noise)[index])
            filled.add(id(into[name]))
        assert not (left := [name for name, t in into.items() if id(t) not in filled]), left

    def codes(self, target: str) -> QuantisedTensor | None:
        """Return a weight of the model as the folder has it quantised; None if it does not."""
        source = next(made.copied for made in self.made if target in made.targets)
        if source is None or source not in self.quantised:
            return None
        with ExitStack() as stack:
            return _codes_of(
                source, self.files, {p: stack.enter_context(safe_open(p, "pt")) for p in {*self.files.values()}}
            )

    def _fill(self, made: _Made, here: Mapping[str, Tensor], read: Callable[..., Tensor]) -> None:
        parts = {name: part_and_place(t) for name, t in here.items()}
        if not any(mine.numel() for mine, _ in parts.values()):
            return
        if made.copied is not None:
            for mine, index in parts.values():
                mine.copy_(read(made.copied, index))
        elif made.stacked:
            ((mine, index),) = parts.values()
            for i in range(index[0].start, index[0].stop):
                (row,) = made.make(read, self.model.config, row=i).values()
                mine[i - index[0].start].copy_(row[0][index[1:]])
        else:
            found = made.make(read, self.model.config)
            for name, (mine, index) in parts.items():
                mine.copy_(found[name][index])


def _codes_of(name: str, files: Mapping[str, Path], open_files: Mapping[Path, Any]) -> QuantisedTensor:
    """Read a quantised weight of a folder."""
    return read_quantised(name.removesuffix(".weight"), lambda one: open_files[files[one]].get_tensor(one), files)


def part_and_place(t: Tensor) -> tuple[Tensor, Index]:
    """Return this rank's part of a tensor, in its own storage, and the slices of the whole that it covers."""
    if not isinstance(t, DTensor):
        return t.detach(), tuple(slice(0, size) for size in t.shape)
    whole: Any = t
    mine: Tensor = whole.detach().to_local()
    sizes, starts = compute_local_shape_and_global_offset(t.shape, t.device_mesh, t.placements)
    assert mine.numel() == 0 or tuple(sizes) == tuple(mine.shape), (sizes, mine.shape, t.placements)
    return mine, tuple(slice(start, start + size) for start, size in zip(starts, mine.shape, strict=True))


def open_skeleton(
    path: Path,
    *,
    trust_remote_code: bool = False,
    needs_lm_head: bool = True,
    quantised: bool = False,
    make: Callable[[Any], Any] | None = None,
) -> Skeleton | None:
    """Open a folder as `load_causal_lm` does, with the same errors, but read no weight. Return None for a folder
    without safetensors, or one without weights that transformers would initialise. quantised: the folder may have
    weights that bitsandbytes quantised · make: returns the float32 model of a configuration; None: transformers
    does."""
    if not (path / "config.json").is_file() or not any(path.glob("*.safetensors")):
        return None
    config = check_loadable(path, trust_remote_code=trust_remote_code, quantised=quantised)
    if not (stored := _stored(path)):
        return None
    files = {name: file for name, (file, _) in stored.items()}
    codes = quantised_in(stored) if quantised else {}
    for name, others in codes.items():
        shape = _shape_of(name, files)
        stored = {one: t for one, t in stored.items() if one not in others}
        stored[name] = files[name], torch.empty(shape, device="meta")
    try:
        with torch.device("meta"):
            given = {"dtype": torch.float32, "trust_remote_code": trust_remote_code}
            model: Any = auto_class(config).from_config(config, **given) if make is None else make(config)
        made, unexpected, wrong = _plan(model, {name: t for name, (_, t) in stored.items()})
    except BUILD_ERRORS as e:
        raise cannot_load(path, e) from e
    if wrong:
        raise Refused(
            f"model.path={path}: {len(wrong)} weights are not those that config.json describes, e.g. {wrong[0]}; take "
            "both from the same model"
        )
    made = _tied(model, files, made)
    missing, unexpected, made_up = _faults(model, {name for m in made for name in m.targets}, unexpected)
    spare = refuse_other_weights(path, model, missing, unexpected, needs_lm_head=needs_lm_head)
    if made_up:
        return None
    _make_buffers(model)
    return Skeleton(model, files, made, spare, frozenset(codes))


def _shape_of(name: str, files: Mapping[str, Path]) -> tuple[int, ...]:
    """Return the shape of a quantised weight of a folder."""
    with ExitStack() as stack:
        return _codes_of(name, files, {p: stack.enter_context(safe_open(p, "pt")) for p in {*files.values()}}).shape


def _stored(path: Path) -> dict[str, tuple[Path, Tensor]]:
    """Return (file, tensor without storage) of each tensor of a folder, by name: from the files that transformers
    chooses; empty if there are none."""
    whole, index = path / "model.safetensors", path / "model.safetensors.index.json"
    files = {whole} if whole.is_file() else set()
    if not files and index.is_file():
        files = {path / file for file in json.loads(index.read_text())["weight_map"].values()}
    found = {}
    for file in sorted(files):
        with safe_open(file, "pt") as f:
            for name in f.keys():  # noqa: SIM118 - not a mapping
                found[name] = file, torch.empty(f.get_slice(name).get_shape(), device="meta")
    return found


def _plan(model: Any, stored: Mapping[str, Tensor]) -> tuple[list[_Made], set[str], list[str]]:
    """Return (how the model's tensors are made, tensors of the folder that the model lacks, errors in the others).
    Conversions are tried on tensors without storage."""
    planned, unexpected = made_of(model, stored)
    wanted = model.state_dict()
    made, wrong = [], []
    for target, (way, sources) in planned.items():
        tried = _Made(way, sources, (target,))
        try:
            found = tried.make(stored.__getitem__, model.config)
        except BUILD_ERRORS as e:
            number = sum(map(len, sources.values()))
            wrong.append(f"{target} cannot be made of {number} tensors ({' '.join(str(e).split())[:200]})")
            continue
        made.append(_Made(way, sources, (target, *(name for name in found if name != target))))
        for name, t in found.items():
            if name not in wanted or t.shape != wanted[name].shape:
                by_config = list(wanted[name].shape) if name in wanted else "nothing"
                wrong.append(f"{name} is {list(t.shape)} in the weights and {by_config} by config.json")
    return made, unexpected, wrong


def _tied(model: Any, files: Mapping[str, Path], made: Sequence[_Made]) -> list[_Made]:
    """Return the conversions without the second of two tied tensors that the folder has both. If they differ, untie
    them."""
    of = {name: m for m in made for name in m.targets}
    dropped: set[int] = set()
    for alias, owner in dict(model.all_tied_weights_keys).items():
        both = [m.copied for m in (of.get(alias), of.get(owner)) if m is not None and m.copied is not None]
        if len(both) < 2:
            continue
        with ExitStack() as stack:
            a, b = (stack.enter_context(safe_open(files[name], "pt")).get_tensor(name) for name in both)
            same = torch.equal(a, b)
        if same:
            dropped.add(id(of[alias]))
        else:
            holder, _, leaf = alias.rpartition(".")
            parent = model.get_submodule(holder)
            parent._parameters[leaf] = nn.Parameter(torch.empty_like(parent._parameters[leaf]))
            del model.all_tied_weights_keys[alias]
    return [m for m in made if id(m) not in dropped]


def _faults(model: Any, found: set[str], unexpected: set[str]) -> tuple[set[str], set[str], bool]:
    """Return (missing weights, tensors that the model lacks, True if transformers would initialise some missing
    weights)."""
    for alias, owner in model.all_tied_weights_keys.items():
        if owner in found or alias in found:
            found |= {alias, owner}
    missing = {*model.state_dict()} - found
    values = loading_report(missing, unexpected)
    model._adjust_missing_and_unexpected_keys(values)
    return values.missing_keys, values.unexpected_keys, values.missing_keys != missing


def _make_buffers(model: Any) -> None:
    """Give the buffers storage, and the unsaved ones their values, as transformers does after loading: its
    initialisation skips tensors that are marked as loaded."""
    saved = {*model.state_dict()}
    for name, buffer in list(model.named_buffers()):
        holder, _, leaf = name.rpartition(".")
        model.get_submodule(holder)._buffers[leaf] = torch.empty_like(buffer, device="cpu")
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        if name in saved:
            t._is_hf_initialized = True
    model.initialize_weights()
