"""Export of a model as a Hugging Face folder, which `AutoModelForCausalLM.from_pretrained` and every serving engine can
load.

config.json, generation config, tokenizer and chat template are copied from the folder that the model was loaded from;
only the weights are new. Each tensor is written when it arrives, so that memory has one tensor and not the model."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from verl.checkpoint.adapter_export import write_adapter
from verl.checkpoint.safetensors_file import DTYPES, Shard, host_bytes
from verl.checkpoint.saved_form import OtherOrder, SavedForm
from verl.checkpoint.score import is_scored, with_score
from verl.config.model_files import FURTHER
from verl.errors import Refused
from verl.models.families import auto_class, family_of
from verl.parameter_set import POLICY_SET, ParameterSet

_COMPANIONS = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py", "LICENSE*")  # beside the weights
_TOKENIZER: tuple[str, ...] = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
)
_TOKENIZER += ("*.tiktoken", "chat_template*")
_OURS = ("config.json", "*.index.json", "adapter_config.json", "trainer_state.json", "training_args*")


@dataclass(frozen=True, slots=True)
class HfExport:
    """An export of a run's weights: the folder also gets every file of `source_dir` that is not weights."""

    source_dir: Path
    """The Hugging Face folder that the model was loaded from."""
    tokenizer_dir: Path | None = None
    """The folder of the tokenizer; None: `source_dir`."""
    chat_template: str | None = None
    """The chat template; None: that of the tokenizer's folder."""
    config_overrides: Mapping[str, Any] = field(default_factory=dict)
    """Fields of config.json with other values than in `source_dir`."""

    def write(
        self, directory: Path, tensors: Iterable[tuple[str, torch.Tensor]], parameters: ParameterSet = POLICY_SET
    ) -> None:
        """Write the folder. tensors: (Hugging Face name, tensor) in any order · parameters: the set that they are of; a
        LoRA set is written as an adapter of `source_dir`. Raise ValueError if the tensors do not cover the set, or if
        tied weights differ."""
        config = _config_of(self.source_dir, self.config_overrides)
        directory.mkdir(parents=True, exist_ok=True)
        if stale := sorted(p.name for p in directory.glob("*.safetensors*")):
            raise Refused(f"{directory} already holds weights ({stale[0]}, ...): export into a new folder")
        _copy_companions(self.source_dir, directory, self.tokenizer_dir, self.chat_template)
        if not parameters.whole:
            for path in _matching(directory, (*_COMPANIONS,)):
                if not any(path.match(p) for p in _TOKENIZER):
                    path.unlink()  # they describe the base
            write_adapter(directory, parameters, self.source_dir.absolute(), tensors)
            return
        _write_json(directory / "config.json", config)
        model = skeleton(directory)
        of_files = _weight_names(self.source_dir)
        form = None if model is None else SavedForm(model, of_files)
        tied = _ties_of(model, config)
        with ExitStack() as open_files:
            every = chain(_as_saved(form, _checked(tensors, tied)), _further_layers(self.source_dir))
            shards, bytes_of = _write_shards(directory, every, open_files)
        _check_names({name for shard in shards for name in shard.names}, tied, form, of_files, self.source_dir)
        stored = max(bytes_of, key=bytes_of.__getitem__)
        _write_json(directory / "config.json", _with_dtype(config, str(stored).removeprefix("torch.")))
        _name_shards(directory, shards)


def _write_shards(
    directory: Path, tensors: Iterable[tuple[str, torch.Tensor]], open_files: ExitStack
) -> tuple[list[Shard], Counter[torch.dtype]]:
    """Write the tensors into shards of one dtype each: within a file every tensor starts at a multiple of its item
    size. Return the shards, and the number of bytes by dtype."""
    filling: dict[torch.dtype, Shard] = {}
    shards: list[Shard] = []
    bytes_of: Counter[torch.dtype] = Counter()
    for name, tensor in tensors:
        shard = filling.get(tensor.dtype)
        if shard is None or not shard.add(name, tensor):
            if shard is not None:
                shard.finish()
            shard = filling[tensor.dtype] = Shard(directory / f"shard-{len(shards)}.part")
            open_files.callback(shard.close)
            shards.append(shard)
            shard.add(name, tensor)
        bytes_of[tensor.dtype] += tensor.nbytes
    for shard in filling.values():
        shard.finish()
    if not shards:
        raise ValueError("there are no tensors to export")
    return shards, bytes_of


def _checked(
    tensors: Iterable[tuple[str, torch.Tensor]], tied: Mapping[str, str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors, tied weights once and under their owner's name. Raise ValueError for a duplicate, a dtype that
    safetensors lacks, or tied weights that differ."""
    seen: set[str] = set()
    digests: dict[str, bytes] = {}
    waiting: dict[str, torch.Tensor] = {}  # owner -> the tensor that arrived under an alias before the owner's own
    owners = set(tied.values())
    for name, tensor in tensors:
        if name in seen:
            raise Refused(f"weight {name} comes twice")
        seen.add(name)
        if tensor.dtype not in DTYPES or tensor.layout != torch.strided:
            raise Refused(f"weight {name} is a tensor of {tensor.dtype}, {tensor.layout}: safetensors has no such type")
        if name in tied or name in owners:
            digests[name] = hashlib.blake2b(host_bytes(tensor)).digest()
        if name not in tied:
            yield name, tensor
        elif tied[name] not in seen:
            waiting[tied[name]] = tensor.detach().clone()
    yield from ((owner, tensor) for owner, tensor in waiting.items() if owner not in seen)
    for alias, owner in tied.items():
        if {alias, owner} <= seen and digests[alias] != digests[owner]:
            raise Refused(
                f"{alias} differs from {owner}, but the model's config ties them, so that one would be lost;"
                ' export with config_overrides={"tie_word_embeddings": False}'
            )


def _as_saved(
    form: SavedForm | None, tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors by the names of a saved folder, experts one by one, as every serving engine reads them. Those
    that are saved in one wait for each other."""
    waiting = dict[str, torch.Tensor]()
    for name, tensor in tensors:
        shape = tuple(tensor.shape)
        try:
            parts = [(name, shape, 0)] if form is None else form.parts(name, shape)
        except OtherOrder:
            assert form is not None
            names = form.together(name)
            waiting[name] = tensor if len(names) == 1 else tensor.detach().clone()
            if waiting.keys() >= {*names}:
                whole = form.saved({one: waiting.pop(one) for one in names})
                yield from ((part, of.contiguous()) for part, of in whole.items())
            continue
        if len(parts) == 1:
            yield parts[0][0], tensor
            continue
        rows = tensor.reshape(-1, shape[-1])
        yield from ((part, rows[row : row + math.prod(of[:-1])].view(of)) for part, of, row in parts)


def _further_layers(source_dir: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of the source folder that predict further tokens, which models of transformers leave out. They
    are kept as they were."""
    for path in sorted(source_dir.glob("*.safetensors")):
        with safe_open(path, "pt") as f:
            yield from ((name, f.get_tensor(name)) for name in f.keys() if name.startswith(FURTHER))  # noqa: SIM118


def _name_shards(directory: Path, shards: list[Shard]) -> None:
    """Rename the shards: one file to model.safetensors, several to numbered names, with an index."""
    if len(shards) == 1:
        shards[0].path.rename(directory / "model.safetensors")
        return
    files = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    for shard, file in zip(shards, files):
        shard.path.rename(directory / file)
    weight_map = {name: file for shard, file in zip(shards, files) for name in shard.names}
    about = {"total_size": sum(s.data_bytes for s in shards)}
    index = {"metadata": about, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(directory / "model.safetensors.index.json", index)


def skeleton(directory: Path) -> torch.nn.Module | None:
    """Build the model of config.json without storage; None if its class is not part of transformers (an export runs no
    code of a model folder)."""
    import transformers

    return skeleton_of(transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False))


def skeleton_of(config: Any) -> torch.nn.Module | None:
    """Build the model of a configuration without storage; None if its class is not part of transformers, and it reads
    text alone."""
    import transformers

    with torch.device("meta"):
        names = config.architectures
        kind: Any = getattr(transformers, names[0], None) if names else None
        if kind is not None:
            found: torch.nn.Module = kind._from_config(config)
        elif not names or family_of(config) is not None:  # a folder may name the class of its own code
            found = auto_class(config).from_config(config)
        else:
            return None
        return with_score(found) if kind is None and names and is_scored(config) else found


def _ties_of(model: torch.nn.Module | None, config: Mapping[str, Any]) -> Mapping[str, str]:
    if model is None:
        if config.get("tie_word_embeddings"):
            raise Refused(
                f"{config.get('architectures')} is not a class of transformers and its embeddings are tied, so their"
                " names are not known: a model of transformers, or one without tie_word_embeddings, can be exported"
            )
        return {}
    return dict(model.all_tied_weights_keys)  # type: ignore[arg-type]


def _check_names(
    names: set[str], tied: Mapping[str, str], form: SavedForm | None, of_files: set[str], source_dir: Path
) -> None:
    """Raise ValueError if weights of the model are missing or there are others: from_pretrained would only warn, and
    start missing weights at random. of_files: the names in `source_dir`."""
    saved = {} if form is None else form.names()
    of_modules = set[str]().union(*saved.values()) if form is not None else of_files
    if not of_modules:
        return
    if foreign := sorted(names - of_modules - of_files):
        raise Refused(f"{len(foreign)} tensors are no weights of the model in {source_dir}, e.g. {foreign[:3]}")
    covered = names.union(*(saved.get(to, {to}) for to, owner in tied.items() if saved.get(owner, {owner}) <= names))
    missing = sorted(of_modules - covered)
    if missing and not (of_files and of_files <= covered):
        raise Refused(f"{len(missing)} weights of the model are missing in the export, e.g. {missing[:3]}")


def _weight_names(folder: Path) -> set[str]:
    names: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as f:
            names |= set(f.keys())
    return names


def _config_of(source_dir: Path, overrides: Mapping[str, Any]) -> dict[str, Any]:
    path = source_dir / "config.json"
    if not path.is_file():
        raise Refused(f"{source_dir} has no config.json: source_dir is the Hugging Face folder of the model")
    config = json.loads(path.read_text())
    for name in ("_name_or_path", "quantization_config"):  # the weights that are written are not quantised
        config.pop(name, None)
    return {**config, **overrides}


def _with_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return the config with `dtype` set in it and in nested configs (text_config, ...); the older name of the key is
    kept where it was used."""
    out = {k: _with_dtype(v, dtype) if k.endswith("_config") and isinstance(v, dict) else v for k, v in config.items()}
    out |= {key: dtype for key in ("dtype", "torch_dtype") if isinstance(config.get(key), str)}
    if "model_type" in config:
        out.setdefault("dtype", dtype)
    return out


def _copy_companions(source_dir: Path, directory: Path, tokenizer_dir: Path | None, template: str | None) -> None:
    _copy(source_dir, directory, _COMPANIONS)
    if tokenizer_dir is not None and tokenizer_dir != source_dir:
        for path in _matching(directory, _TOKENIZER):
            path.unlink()
        _copy(tokenizer_dir, directory, _TOKENIZER)
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
        settings = directory / "tokenizer_config.json"
        if settings.is_file():  # a template in this file might be used instead
            _write_json(settings, {k: v for k, v in json.loads(settings.read_text()).items() if k != "chat_template"})


def _copy(source: Path, target: Path, patterns: tuple[str, ...]) -> None:
    for path in _matching(source, patterns):
        if not any(path.match(p) for p in _OURS):
            shutil.copyfile(path, target / path.name)  # copies the file itself if a hub cache has a link
    if (extra := source / "additional_chat_templates").is_dir():
        shutil.copytree(extra, target / extra.name, dirs_exist_ok=True)


def _matching(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted({p for pattern in patterns for p in folder.glob(pattern) if p.is_file()})


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
