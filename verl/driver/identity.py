"""The identity of a run, recorded with every checkpoint, so that a checkpoint continues only the run that wrote it.

A key defines the run unless its field is declared as `adjustable`: the keys of speed, length, place and frequency are
adjustable, not those of the objective and its data. A key that names files (CONTENT) is compared by the content of the
files, wherever they are."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType

import msgspec

from verl.algorithms.presets import preference, settled
from verl.algorithms.sections import POLICY, is_url
from verl.algorithms.specs import short
from verl.config.adapter import base_of
from verl.config.backends import TABLES, import_object
from verl.config.load import CODE_KEYS, Resolved
from verl.config.model_files import find_model_folder
from verl.config.moved import MOVED, SWITCHES, moved_values
from verl.config.schema import COMPUTE_SCORE, Config, RewardConfig
from verl.config.tree import leaves, values_of
from verl.data.files import expand_files, fingerprint
from verl.data.formats import SINGLE_TURN, played_by
from verl.model_engine.lora_spec import LoraSpec, trained_by

_WEIGHTS = (".safetensors", ".py")
_WEIGHT_FILES = ("config.json", "generation_config.json", "adapter_config.json")
_TOKENIZER = (".json", ".jinja", ".model", ".txt")


def _model(path: str | None) -> str | None:
    """Hash the weights and the files that define their use; the tokenizer has a key of its own."""
    if path is None:
        return None
    files = sorted(p for p in find_model_folder(path).iterdir() if p.is_file())
    return _digest(p for p in files if p.suffix in _WEIGHTS or p.name in _WEIGHT_FILES)


def _tokenizer(path: str) -> str:
    files = sorted(p for p in find_model_folder(path).iterdir() if p.is_file() and p.suffix in _TOKENIZER)
    return _digest(p for p in files if p.name not in _WEIGHT_FILES and not p.name.endswith(".safetensors.index.json"))


def _rows(files: list[str]) -> str | None:
    return _text_digest("\n".join(fingerprint(f) for f in expand_files(files))) if files else None


def _source(name: str | None) -> str | None:
    """Hash the source of a file (`a.py`, `a.py:name`) or of a module (`a.b`, `a.b:function`), which is found without
    import."""
    if name is None:
        return None
    module, _, function = name.partition(":")
    if (file := Path(module).expanduser()).is_file():
        return f"{function} {_digest([file])}".strip()
    spec, searched, done = None, None, ""
    for part in module.split("."):
        done = f"{done}.{part}" if done else part
        every = (finder.find_spec(done, searched) for finder in sys.meta_path)  # editable installs too
        spec = next((found for found in every if found is not None), None)
        searched = list(spec.submodule_search_locations or []) if spec else []
    found = Path(spec.origin) if spec and spec.origin else None
    return f"{function} {_digest([found])}" if found and found.is_file() else _text_digest(name)


def _grader(reward: RewardConfig) -> str | None:
    """Hash the source of the reward function, with its name if that is not the usual one."""
    file, function = reward.grader()
    found = None if reward.path is None else _source(file)
    return found if found is None or function == COMPUTE_SCORE else f"{function} {found.strip()}"


def _loop(name: str) -> str | None:
    """Hash the source of an agent loop. It is the same in the driver and in a process of its own."""
    return None if name == SINGLE_TURN else _source(name)


def _teacher(path: str | None, policy: str) -> str | None:
    """Hash the folder of a teacher or reward model, an adapter with its base. A model behind a URL is not hashed."""
    if path is None or path == POLICY or is_url(path):
        return None
    base = base_of(path, policy)
    return _model(path) if base == path else f"{_model(path)} of {_model(base)}"


def _lora(config: Config) -> str | None:
    """Return the settings of LoRA that are not the defaults, with the hash of an adapter that training starts from in
    place of its folder."""
    spec = trained_by(config.model.lora)
    if spec is None:
        return None
    own = {f.name: value for f in fields(spec) if (value := getattr(spec, f.name)) != getattr(LoraSpec(), f.name)}
    return json.dumps(own | {"path": _model(spec.path)}, sort_keys=True)


def start_beside_folder(config: Config) -> str:
    """Return what the weights that training starts from are made of beside the folder's: an adapter, and the format of
    the base. "" if there is neither."""
    adapter = _model(config.model.lora.get("path"))
    kind = config.model.quantization
    return "" if adapter is None and kind == "none" else f" {adapter} {kind}"


CONTENT: Mapping[str, Callable[[Config], str | None]] = MappingProxyType(
    {
        "model.path": lambda c: _model(c.model.path),
        "model.lora": _lora,
        "model.tokenizer_path": lambda c: _tokenizer(c.model.tokenizer_path or c.model.path),
        "model.chat_template": lambda c: _source(c.model.chat_template),
        "data.train_files": lambda c: _rows(c.data.train_files),
        "data.eval_files": lambda c: _rows(c.data.eval_files),
        "data.dataset_class": lambda c: _source(c.data.dataset_class),
        "algorithm.loss": lambda c: _source(c.algorithm.loss),
        "algorithm.advantage": lambda c: _source(c.algorithm.advantage),
        "agent.loop": lambda c: _loop(played_by(c.agent.loop, c.agent.tools)[0]),
        "agent.tools": lambda c: "\n".join(_source(entry) or "" for entry in c.agent.tools) or None,
        "critic.path": lambda c: _model(c.critic.path),
        "teacher.path": lambda c: _teacher(c.teacher.path, c.model.path),
        "teacher.paths": lambda c: (
            "\n".join(f"{n} {_teacher(p, c.model.path)}" for n, p in c.teacher.paths.items()) or None
        ),
        "reward.path": lambda c: _grader(c.reward),
        "reward.model": lambda c: _teacher(c.reward.model, c.model.path),
    }
)


class Identity(msgspec.Struct):
    """The values that identify a run."""

    values: dict[str, str] = {}
    """Every key as JSON; a secret of the environment as its hash."""
    contents: dict[str, str] = {}
    """A hash for each key of CONTENT."""
    defaults: dict[str, str] = {}
    """The default values, as JSON, of the algorithm's settings. A run that was recorded before a setting existed has
    its default: the default of every new setting is what was computed before."""


def identity_of(resolved: Resolved, command: str) -> Identity:
    config, contents = resolved.config, {key: made for key, of in CONTENT.items() if (made := of(resolved.config))}
    longest = config.rollout.max_response_tokens  # values of the preset count as given
    given = config.algorithm.given()
    preset = settled(config.algorithm.name, given, longest=longest)
    functions = {"algorithm.loss": preset.loss.fn, "algorithm.advantage": preset.estimator.fn}
    values = {k: v for k, v in values_of(config).items() if not k.startswith("algorithm.")} | _defaults(config)
    values |= {f"algorithm.{k}": v for k, v in preset.settings().items() if k != "estimator"}  # the advantage itself
    values |= {"algorithm.name": config.algorithm.name, **{k: short(fn) for k, fn in functions.items()}}
    for key, fn in functions.items():
        contents[key] = _source(fn) or "" if fn == short(fn) else _text_digest(short(fn))
    if contents.get("critic.path") == contents["model.path"]:  # the default starting point of a critic
        del contents["critic.path"]
    texts = {key: json.dumps(value, sort_keys=True, default=str) for key, value in values.items()}
    for key, text in texts.items():
        if key in resolved.masked:
            texts[key] = f"(environment) {_text_digest(text)[:12]}"
    own = {k: given.get(k) for k in ("loss", "advantage")}  # these keys determine which settings exist
    unset = settled(config.algorithm.name, own, longest=longest).settings()
    defaults = {f"algorithm.{k}": json.dumps(v, sort_keys=True, default=str) for k, v in unset.items()}
    return Identity({"verb": command} | texts, contents, defaults)


def _defaults(config: Config) -> dict[str, object]:
    """Return the values of omitted keys that follow from other keys, as if they had been given."""
    loss, rollout, seed = preference(config.preference.loss), config.rollout, config.data.seed
    cluster = config.cluster  # pools may change, but not the precision of a role
    pools = {role: cluster.pools.get(name, {}) for role, name in sorted(cluster.roles.items())}
    longest, beta = config.eval.max_response_tokens, config.preference.beta
    return {
        "data.seed": config.run.seed if seed is None else seed,
        "rollout.dtype": config.model.dtype if rollout.dtype == "auto" else rollout.dtype,
        "eval.max_response_tokens": rollout.max_response_tokens if longest is None else longest,
        "preference.beta": loss.beta if beta is None else beta,
        "preference.options": {**loss.options, **config.preference.options},
        "cluster.dtypes": {role: pool["dtype"] for role, pool in pools.items() if pool.get("dtype")} or None,
    }


def compare(was: Identity, now: Identity) -> tuple[list[str], dict[str, list[str]]]:
    """Compare two identities. Return a line for each key that makes them different runs, and {key: [old, new]} of the
    changed keys that a resumed run may change. Both are by present keys, also if an earlier version recorded `was`."""
    was = _moved(was)
    others: list[str] = []
    changed: dict[str, list[str]] = {}
    for key in dict.fromkeys([*was.values, *now.values]):
        old = was.values.get(key, now.defaults.get(key, _default(key)))
        new = now.values.get(key, was.defaults.get(key, _default(key)))
        if _complete(key, old, was) == _complete(key, new, now):  # 2 and 2.0 are one value
            new = old
        if key in CONTENT:
            if _users_code(key, old, was.contents.get(key)) != _users_code(key, new, now.contents.get(key)):
                same = " (the same name, another content)" if old == new else ""
                others.append(f"{key}: {old} -> {new}{same}")
        elif old != new and not may_change(key):
            others.append(f"{key}: {old} -> {new}")
        elif old != new and (fixed := _fixed_options(key, was, now)):
            others += fixed
        elif old != new:
            changed[key] = [old, new]
    return others, changed


def _complete(key: str, text: str, of: Identity) -> object:
    """Return the value of a key; `engine_options` with the defaults of options that did not exist at the time."""
    value, (section, _, name) = _read(text), key.partition(".")
    row = TABLES[section].get(str(_read(of.values.get(f"{section}.engine", "")))) if name == "engine_options" else None
    if row is None or not isinstance(value, dict):
        return value
    return {one.name: one.default for one in dataclasses.fields(import_object(row.options))} | value


def _moved(was: Identity) -> Identity:
    """Return the identity by the present keys."""
    if not (MOVED.keys() | SWITCHES.keys()) & was.values.keys():
        return was
    read = {key: _read(text) for key, text in was.values.items()}
    values, contents = moved_values(read, str(read["verb"])), dict(was.contents)
    if (path := values.get("reward.path")) != read.get("reward.path"):  # with its function, as `_grader`
        contents["reward.path"] = f"{str(path).rpartition(':')[2]} {contents['reward.path'].strip()}"
    texts = {
        key: was.values[key] if key in read and value is read[key] else json.dumps(value, sort_keys=True, default=str)
        for key, value in values.items()
    }
    return Identity(texts, contents, was.defaults)


def _users_code(key: str, value: str, content: str | None) -> str | None:
    """Return the content of a key with names in place of the sources of verl's own modules, which differ between
    versions."""
    named, lines = _read(value), (content or "").split("\n")
    if key not in CODE_KEYS or content is None:
        return content
    for i, entry in enumerate(named if isinstance(named, list) else [named]):
        if str(entry).startswith("verl.") and not str(entry).endswith(".py"):
            lines[i] = str(entry).removesuffix(f":{COMPUTE_SCORE}")
    return "\n".join(lines)


def _default(key: str) -> str:
    """Return the default of a key that did not exist in the version that recorded the run."""
    return json.dumps(leaves()[key].default, default=str) if key in leaves() else "null"


def _read(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:  # the hash of a secret
        return text


def may_change(key: str) -> bool:
    """Return True if a resumed run may change the key; of `engine_options` perhaps not every option."""
    return key in leaves() and leaves()[key].adjustable


def _fixed_options(key: str, was: Identity, now: Identity) -> list[str]:
    """Return a line for each changed option that the engine does not let a run change. If the engine is
    another one, all options count as changed."""
    section, _, name = key.partition(".")
    engine = was.values.get(f"{section}.engine")
    row = TABLES[section].get(str(_read(engine or ""))) if name == "engine_options" else None
    if row is None or row.may_change is None or engine != now.values.get(f"{section}.engine"):
        return []
    old, new = (_read(one.values.get(key, "{}")) for one in (was, now))
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return []
    fixed = [k for k in {**old, **new} if old.get(k) != new.get(k) and k not in row.may_change]
    return [f"{key}.{k}: {json.dumps(old.get(k))} -> {json.dumps(new.get(k))}" for k in fixed]


def _digest(files: Iterable[Path]) -> str:
    """Return the sha256 of names and contents."""

    def one(path: Path) -> str:
        with open(path, "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()

    every = list(files)
    with ThreadPoolExecutor(4) as pool:
        hashes = list(pool.map(one, every))
    names = [path.name for path in every] if len(every) > 1 else [""]  # a single file may be renamed
    return _text_digest(json.dumps(list(zip(names, hashes))))


def _text_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
