"""Facts of a model from its Hugging Face folder, read without torch or transformers: config.json, the headers of the
safetensors files and tokenizer_config.json."""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from verl.config.row_states import RowStates, row_states
from verl.config.unchanged import file_while_unchanged, while_unchanged
from verl.errors import Refused
from verl.models.families import FAMILIES, name_of

EXPERT = re.compile(r"\.experts\.\d+\.(?:gate_proj|up_proj|w1|w3|(down_proj|w2))\.")
DTYPE_NAMES: Mapping[str, str] = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "spiece.model")
_WANTED = "a Hugging Face folder (config.json, safetensors, tokenizer)"
FORMATS = ("nf4", "int8")
"""The formats of bitsandbytes that are read: 4 and 8 bits."""
_STATE = ".quant_state.bitsandbytes__"
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_BUFFERS = re.compile(r"(^|\.)(rotary_emb\.inv_freq|masked_bias)$")
_CAUSAL_MASK = re.compile(r"(^|\.)attn\.bias$")
_INTEGER_TABLES = ("_ids", "bias", "mask")  # positions and causal masks that some checkpoints store
EMBEDDING = re.compile(r"(embed_tokens|wte|word_embeddings|embed_in)\.weight$")
LAYER = re.compile(r".*?\.\d+\.")
HEAD, SCORE = "lm_head.weight", "score.weight"
"""The heads of language models and of reward models."""
FURTHER = "mtp."
"""The begin of the names of layers that predict further tokens, which are never trained."""
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The sizes of a model, and properties of its folder."""

    folder: str
    architecture: str
    layers: int
    hidden: int
    intermediate: int
    """The MLP width that one token passes through (active experts only)."""
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_context_tokens: int | None
    tied: bool
    has_output_head: bool
    parameters: int
    """The number of trained parameters; tied ones count once."""
    body_parameters: int
    """The number of parameters without a separate language-model head, as critics and reward models have."""
    embedding_parameters: int
    expert_parameters: int
    """The number of `parameters` that belong to experts."""
    largest_parameters: int
    """The size of the largest tensor of the model in memory, in which the experts of a layer are two."""
    stored_dtype: str
    stored_bytes: int
    has_chat_template: bool
    model_type: str = ""
    """The family, as config.json names it."""
    crossed: bool = False
    """Layers of cross-attention read the images; rows are padded in training."""
    encoder_parameters: int = 0
    """The number of `parameters` of the parts that encode images."""
    states: RowStates = field(default_factory=RowStates)
    """The states that layers keep of a row in place of keys and values."""
    encoder_gathered: int = 0
    """Those of them that a rank has gathered at once: two layers, and all that is outside of layers."""


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """The header of one tensor of a safetensors file, with the file and the offset of the tensor's bytes. A weight that
    bitsandbytes quantised is one tensor: the dtype is that of its codes, the shape is its own, and the bytes include
    its scales."""

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    file: Path = field(default=Path(), compare=False)
    begin: int = field(default=0, compare=False)
    quantised: str = ""
    """The format in which bitsandbytes quantised it: nf4, int8, or another one, which cannot be read here."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def find_model_folder(path: str, key: str = "model.path") -> Path:
    """Return the folder `path`, or that of a hub id in the local Hugging Face cache. Nothing is downloaded. Raise
    ValueError, with the key, if there is none."""
    folder = Path(path).expanduser()
    found = folder if folder.is_dir() else cached_model_folder(path)
    if found is not None:
        return found
    if _HUB_ID.fullmatch(path):
        fix = f"download it first: hf download {path} --local-dir FOLDER, then {key}=FOLDER"
        raise Refused(f"{key}={path}: no such folder, and not in the cache {_hub_cache()}; {fix}")
    raise Refused(f"{key}={path}: no such folder; give {_WANTED}")


def cached_model_folder(path: str) -> Path | None:
    """Return the snapshot in the local Hugging Face cache to which `main` of a hub id points; None if there is none."""
    if not _HUB_ID.fullmatch(path) or Path(path).is_dir():
        return None
    cache = _hub_cache() / f"models--{path.replace('/', '--')}"
    main = cache / "refs" / "main"
    snapshot = cache / "snapshots" / main.read_text(encoding="utf-8").strip() if main.is_file() else None
    return snapshot if snapshot is not None and snapshot.is_dir() else None


def _hub_cache() -> Path:
    home = os.environ.get("HF_HOME") or os.path.join(os.path.expanduser("~"), ".cache", "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub"))


def embedding_rows(config: Mapping[str, Any], vocab: int) -> int:
    """Return the number of ids with a row in the embedding of a model with this config.json and vocabulary; those after
    the vocabulary have no logit."""
    family = FAMILIES.get(name_of(config))
    return vocab + (family.unsampled_rows if family else 0)


@while_unchanged
def describe_model(path: str, tokenizer_path: str | None = None) -> ModelFacts:
    """Return all facts of a model on which sizes depend. Raise ValueError for a folder that cannot be trained."""
    folder = find_model_folder(path)
    refuse_adapter(folder)
    full = read_model_config(folder)
    config = text_config(full)
    tensors = read_weight_headers(folder)
    refuse_quantised(folder, full, tensors)
    hidden = _size(folder, config, "hidden_size", "n_embd", "d_model")
    heads = _size(folder, config, "num_attention_heads", "n_head")
    trained = {n: t for n, t in tensors.items() if not _is_buffer(n, t) and not n.startswith(FURTHER)}
    output = [n for n in trained if n.endswith(HEAD)]
    tied = not output if (declared := declared_tie(full)) is None else declared
    counted = {n: t for n, t in trained.items() if not (tied and n in output)}
    dtypes: Counter[str] = Counter()
    for tensor in tensors.values():
        dtypes[tensor.quantised or tensor.dtype] += tensor.numel
    main_dtype = dtypes.most_common(1)[0][0]
    encoder, at_once = _encoder(full, counted)
    layers = _size(folder, config, "num_hidden_layers", "n_layer", "num_layers")
    return ModelFacts(
        states=row_states(config, layers),
        crossed=(family := FAMILIES.get(name_of(full))) is not None and family.crossed,
        encoder_parameters=encoder,
        encoder_gathered=at_once,
        folder=str(folder),
        architecture=str((full.get("architectures") or [full.get("model_type", "unknown")])[0]),
        model_type=str(config.get("model_type", "")),
        layers=layers,
        hidden=hidden,
        intermediate=_intermediate(config, hidden),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        vocab=_size(folder, config, "vocab_size"),
        max_context_tokens=_context_tokens(config),
        tied=tied,
        has_output_head=tied or bool(output),
        parameters=sum(t.numel for t in counted.values()),
        body_parameters=sum(t.numel for n, t in counted.items() if n not in output),
        embedding_parameters=sum(t.numel for n, t in counted.items() if EMBEDDING.search(n)),
        expert_parameters=sum(t.numel for n, t in counted.items() if ".experts." in n),
        largest_parameters=_largest(counted),
        stored_dtype=DTYPE_NAMES.get(main_dtype, main_dtype.lower()),
        stored_bytes=sum(t.num_bytes for t in tensors.values()),
        has_chat_template=bool(chat_template_of(Path(tokenizer_path).expanduser() if tokenizer_path else folder)),
    )


def _encoder(config: Mapping[str, Any], tensors: Mapping[str, TensorHeader]) -> tuple[int, int]:
    """Return `encoder_parameters` and `encoder_gathered` of a model with these tensors."""
    if (family := FAMILIES.get(name_of(config))) is None:
        return 0, 0
    sizes: Counter[str] = Counter()
    for name, tensor in tensors.items():
        if (part := family.part_of(name)) != "language":
            layer = LAYER.match(name) if part in ("vision", "audio") else None
            sizes[layer[0] if layer else ""] += tensor.numel
    outside = sizes.pop("", 0)
    return outside + sum(sizes.values()), outside + sum(sorted(sizes.values())[-2:])


def _largest(tensors: Mapping[str, TensorHeader]) -> int:
    """Return the size of the largest tensor, after the experts of each layer were joined: down, and gate with up."""
    sizes: Counter[str] = Counter()
    for name, tensor in tensors.items():
        sizes[EXPERT.sub(r".experts.\1", name)] += tensor.numel
    return max(sizes.values(), default=0)


def context_tokens(path: str) -> int | None:
    """Return the number of positions of a folder's model; None if it does not declare them, or cannot be read."""
    try:
        return _context_tokens(text_config(read_model_config(find_model_folder(path))))
    except (ValueError, OSError):
        return None


def _context_tokens(config: Mapping[str, Any]) -> int | None:
    return _optional_int(config, "max_position_embeddings", "n_positions")


def read_model_config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    if not file.is_file():
        raise Refused(f"{folder}: no config.json; model.path must be {_WANTED}")
    return json_object(file, file.read_bytes())


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config.json that describes the language model. In vision-language models it is a section."""
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def declared_tie(config: Mapping[str, Any]) -> bool | None:
    """Return True if a config.json ties the output layer to the embedding; None if it does not declare it."""
    declared = config.get("tie_word_embeddings", text_config(config).get("tie_word_embeddings"))
    return None if declared is None else bool(declared)


def refuse_adapter(folder: Path) -> None:
    """Raise ValueError for a folder with an adapter, alone or beside a whole model, and for a folder with two whole
    models."""
    adapter = [name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS, "adapter_model.bin") if (folder / name).is_file()]
    files = (p.name for pattern in ("*.safetensors", "pytorch_model*.bin") for p in folder.glob(pattern))
    weights = sorted(name for name in files if not name.startswith("adapter_"))
    merge = f"merge it (verl export {folder} OUT_DIR --merge), and give that folder"
    if adapter and weights:
        prefix = f"a whole model ({weights[0]}) and an adapter ({adapter[0]}): it cannot be told which is meant"
        raise Refused(f"model.path={folder}: {prefix}; move the adapter's files away, or {merge}")
    if adapter:
        config = folder / ADAPTER_CONFIG
        base = json_object(config, config.read_bytes()).get("base_model_name_or_path") if config.is_file() else None
        raise Refused(
            f"model.path={folder}: an adapter ({adapter[0]}) of {base or 'another model'}, and no model;"
            f" {merge}, or give the base"
        )
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file() and index.is_file():
        named = {str(name) for name in json_object(index, index.read_bytes()).get("weight_map", {}).values()}
        if named != {whole.name}:
            prefix = f"{whole.name} and {index.name}, which names other files: two models"
            raise Refused(f"model.path={folder}: {prefix}; move the files of one of them away")


def refuse_quantised(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, TensorHeader]) -> None:
    """Raise ValueError for quantised weights, unless bitsandbytes quantised all of them as NF4 or all as int8."""
    fix = "take the model's weights in bfloat16, float16 or float32 (the folder that this one was quantised from)"
    described = config.get("quantization_config")
    method = described.get("quant_method") or "an unnamed method" if isinstance(described, dict) else None
    formats = sorted({tensor.quantised for tensor in tensors.values()} - {""})
    if method not in (None, "bitsandbytes"):
        exact = f"{fix}; model.quantization=nf4 quantises it here, below LoRA"
        raise Refused(f"model.path={folder}: quantised with {method} (quantization_config in config.json); {exact}")
    if method is not None and (len(formats) != 1 or formats[0] not in FORMATS):
        found = f"holds {' and '.join(formats)}" if formats else "holds no codes"
        raise Refused(
            f"model.path={folder}: config.json says that bitsandbytes quantised it, and it {found}; quantise it as nf4"
            f" or as int8 (not fp4), or {fix}"
        )
    for name, tensor in tensors.items():
        table = len(tensor.shape) < 2 or _is_buffer(name, tensor) or name.endswith(_INTEGER_TABLES)
        if tensor.dtype not in DTYPE_NAMES and not table and not (method and tensor.quantised):
            why = f"{name} is stored as {tensor.dtype}, and config.json has no quantization_config that says its scale"
            raise Refused(f"model.path={folder}: {why}; {fix}")


def codes_are_frozen(kind: str) -> str:
    """Return why weights in this format are not trained, with the fix."""
    why = f"quantised as {kind} by bitsandbytes, and codes have no gradient"
    return f"{why}; train factors on it (model.lora.rank=32), or take the folder that it was quantised from"


def quantised_in(names: Iterable[str]) -> dict[str, frozenset[str]]:
    """Return the weights of a checkpoint that are quantised by bitsandbytes, each with the names of its other
    tensors."""
    every, found = {*names}, dict[str, frozenset[str]]()
    for name in every:
        module, _, last = name.rpartition(".")
        if last == "SCB":
            found[f"{module}.weight"] = frozenset({name, f"{module}.weight_format"} & every)
        elif _STATE in name:
            weight = name.partition(_STATE)[0]
            found[weight] = frozenset(other for other in every if other.startswith(f"{weight}."))
    return found


def quantisation_of(tensors: Mapping[str, TensorHeader]) -> str:
    """Return the format of the quantised weights of a folder, which are all of one; none if there are none."""
    return next((tensor.quantised for tensor in tensors.values() if tensor.quantised), "none")


def folder_format(path: str) -> str:
    """Return the format of the quantised weights in a model folder; none if there are none, or it cannot be read."""
    try:
        return quantisation_of(read_weight_headers(find_model_folder(path)))
    except (ValueError, OSError):
        return "none"


def _as_weights(folder: Path, stored: Mapping[str, TensorHeader]) -> dict[str, TensorHeader]:
    """Return the headers of a folder's weights: of codes, scales and shape of a quantised weight one header."""
    codes = quantised_in(stored)
    beside = frozenset[str]().union(*codes.values())
    found = {name: header for name, header in stored.items() if name not in beside}
    for name, others in codes.items():
        if name not in stored:
            raise Refused(f"{folder}: scales of {name}, which is not there; download the model again")
        num_bytes = stored[name].num_bytes + sum(stored[other].num_bytes for other in others)
        state = next((other for other in others if _STATE in other), None)
        kind = "int8" if state is None else state.rpartition("__")[2]
        shape = stored[name].shape if state is None else _shape_in(stored[state])
        found[name] = replace(stored[name], shape=shape, num_bytes=num_bytes, quantised=kind)
    return found


def _shape_in(state: TensorHeader) -> tuple[int, ...]:
    """Return the shape of a weight from the state that bitsandbytes stores as JSON beside its codes."""
    with state.file.open("rb") as stream:
        stream.seek(state.begin)
        shape = json_object(state.file, stream.read(state.num_bytes)).get("shape")
    if not isinstance(shape, list) or not all(type(size) is int and size > 0 for size in shape):
        raise Refused(f"{state.file}: a quantised weight of shape {str(shape)[:80]}; download the model again")
    return tuple(shape)


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def check_tokenizer(model_folder: Path, tokenizer_path: str | None = None) -> None:
    folder = Path(tokenizer_path).expanduser() if tokenizer_path else model_folder
    if not has_tokenizer(folder):
        names = ", ".join(TOKENIZER_FILES)
        raise Refused(f"{folder}: no tokenizer ({names}); copy it there, or set model.tokenizer_path")


def read_weight_headers(folder: Path) -> dict[str, TensorHeader]:
    """Return name -> header of every weight in the folder's safetensors files."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = sorted(folder / name for name in _indexed(index))
        missing = [f.name for f in files if not f.is_file()]
        if missing:
            message = f"{', '.join(missing)} is missing, which {index.name} names"
            raise Refused(f"{folder}: {message}; download the model again")
    else:
        whole = folder / "model.safetensors"  # some folders also hold the model under its maker's names
        files = [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        other = sorted(f.name for f in [*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.gguf")])
        found = f" (there is {other[0]}: save it again with safe_serialization=True)" if other else ""
        raise Refused(f"{folder}: no *.safetensors{found}")
    tensors = {name: header for file in files for name, header in _file_headers(file).items()}
    if not tensors:
        raise Refused(f"{folder}: its safetensors files hold no tensor")
    return _as_weights(folder, tensors)


def refuse_foreign(folder: Path, config: Mapping[str, Any], *, trust_remote_code: bool) -> None:
    """Raise ValueError for a folder with weights in files elsewhere, or with a configuration that names code of a
    hub."""
    for name in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        if (folder / name).is_file():
            _indexed(folder / name)
    if not trust_remote_code and (named := _hub_code(config)) is not None:
        raise Refused(
            f"{folder / 'config.json'}: attn_implementation={named!r} is code that transformers would fetch and run; "
            "leave it out, or set model.trust_remote_code=true"
        )


def _hub_code(config: Any) -> str | None:
    """Return the first implementation that names a repository, at any depth of a configuration."""
    if isinstance(config, list):
        return next(filter(None, map(_hub_code, config)), None)
    if not isinstance(config, dict):
        return None
    named = [value for key, value in config.items() if str(key).strip("_").startswith("attn_implementation")]
    every = [one for value in named for one in (value.values() if isinstance(value, dict) else [value])]
    found = next((one for one in every if isinstance(one, str) and "/" in one), None)
    return found or next(filter(None, map(_hub_code, config.values())), None)


def _indexed(index: Path) -> frozenset[str]:
    """Return the files that an index names. Raise ValueError if one is not in its folder."""
    weight_map = json_object(index, index.read_bytes()).get("weight_map", {})
    names = frozenset(map(str, weight_map.values())) if isinstance(weight_map, dict) else frozenset({""})
    for name in names:
        if not name or Path(name).is_absolute() or ".." in Path(name).parts:
            raise Refused(f"{index}: {name[:80]!r} is no file of this folder; download the model again")
    return names


def check_weights_file(file: Path) -> None:
    """Raise ValueError for a safetensors file that cannot be read."""
    _file_headers(file)


@file_while_unchanged
def _file_headers(file: Path) -> dict[str, TensorHeader]:
    """Return the headers of one file by tensor. Raise ValueError for a truncated file (an interrupted download), or a
    file with an invalid header."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        first = stream.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
        if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
            what = f"{size} bytes, header of {length}"
            raise Refused(f"{file}: not a safetensors file ({what}); is it a Git LFS pointer?")
        header = json_object(file, stream.read(length))
    tensors, end = {}, 0
    for name, entry in header.items():
        if name != "__metadata__":
            tensors[name], stop = _tensor_header(file, name, entry, 8 + length)
            end = max(end, stop)
    if size != 8 + length + end:
        raise Refused(f"{file}: {size} bytes, but its header says {8 + length + end}: it was cut; download it again")
    return tensors


def _tensor_header(file: Path, name: str, entry: Any, first: int) -> tuple[TensorHeader, int]:
    """Return a tensor's header, and the offset of its end from `first`, the first byte of the file's tensors."""
    try:
        begin, stop = entry["data_offsets"]
        shape, dtype = tuple(entry["shape"]), str(entry["dtype"])
        whole = all(type(n) is int and 0 <= n < 2**63 for n in (begin, stop, *shape)) and begin <= stop
    except (TypeError, KeyError, ValueError):
        whole = False
    if whole:
        bits = 8 if dtype == "BOOL" else int((re.findall(r"\d+", dtype) or ["0"])[0])
        whole = bits == 0 or math.prod(shape) * bits == 8 * (stop - begin)
    if not whole:
        raise Refused(f"{file}: its header says of {name[:80]}: {str(entry)[:120]}; download it again")
    return TensorHeader(dtype, shape, stop - begin, file, first + begin), stop


def json_object(file: Path, text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise Refused(f"{file}: not JSON ({exc})") from exc
    if not isinstance(found, dict):
        raise Refused(f"{file}: must hold a JSON object")
    return found


def _size(folder: Path, config: Mapping[str, Any], *names: str) -> int:
    found = _optional_int(config, *names)
    if found is None or found < 1:
        raise Refused(f"{folder / 'config.json'}: no {names[0]}; only decoder language models are trained here")
    return found


def _optional_int(config: Mapping[str, Any], *names: str) -> int | None:
    return next((config[n] for n in names if isinstance(config.get(n), int)), None)


def _intermediate(config: Mapping[str, Any], hidden: int) -> int:
    active = _optional_int(config, "num_experts_per_tok")
    expert = _optional_int(config, "moe_intermediate_size")
    if active and expert:
        return active * expert + (_optional_int(config, "shared_expert_intermediate_size") or 0)
    return _optional_int(config, "intermediate_size", "n_inner") or 4 * hidden


def _is_buffer(name: str, tensor: TensorHeader) -> bool:
    """Return whether this is a table that some checkpoints store beside the weights: rotary frequencies, causal
    masks."""
    return bool(_BUFFERS.search(name)) or bool(_CAUSAL_MASK.search(name) and len(tensor.shape) == 4)


def chat_template_of(folder: Path) -> str:
    """Return the text of the tokenizer's template, all of them if it has several; "" if it has none."""
    if (file := folder / "chat_template.jinja").is_file():
        return file.read_text(encoding="utf-8", errors="replace")
    file = folder / "tokenizer_config.json"  # chat_template.json belongs to a processor: no tokenizer reads it
    found = json_object(file, file.read_bytes()).get("chat_template") if file.is_file() else None
    if not found:
        return ""
    return found if isinstance(found, str) else "\n".join(str(one.get("template", "")) for one in found)
