"""The configuration of a run: defaults, a recipe and the command line merged into the typed tree, with the origin of
every value.

    load_config(["recipe=gsm8k_grpo", "model.path=/models/x", "actor_rollout_ref.rollout.n=4"])

A later layer wins: defaults of schema.py, verl's own defaults (its entry points only), recipe, command line. Values may
refer to other keys (`${run.name}`) and to the environment (`${oc.env:HOME}`).
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Literal

import yaml
from omegaconf import Container, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl.algorithms.presets import PRESETS, settled
from verl.algorithms.specs import BY_HORIZON
from verl.bounds import bounded_yaml
from verl.config.agent import idle_agent_keys, idle_line
from verl.config.backends import complete_options
from verl.config.model_files import cached_model_folder, context_tokens
from verl.config.moved import MOVED, moved_values, present_value
from verl.config.noise import corrects
from verl.config.overrides import Note, Translation, VerlDefaults, parse_argument, read_line
from verl.config.schema import Config
from verl.config.tree import Setting, convert, leaf_of, leaves, sections, text_of, tree_of, values_of
from verl.config.validate import validate
from verl.errors import Refused
from verl.names import did_you_mean
from verl.wire import FP8

__all__ = ["Resolved", "dump_config", "load_config", "read_config", "recipe_names", "validate"]

MISSING = "???"
OPTIONS = ".engine_options"
ROLLOUT_CORRECTION: Mapping[str, Any] = {"correction": "truncate", "correction_high": 2.0}
FITTED = "default, cut to what the model has:"
_ENVIRONMENT = re.compile(r"oc\.env:\s*(\w+)")
_ORIGIN_COLUMN = 40
PATH_KEYS = (
    *("model.path", "model.tokenizer_path", "model.chat_template", "data.train_files", "data.eval_files"),
    *("data.cache_dir", "run.root_dir", "run.resume", "reward.path", "teacher.path"),
)
"""Keys with paths. They may begin with ~, the home directory."""
CODE_KEYS = ("reward.path", "data.dataset_class", "agent.loop", "agent.tools", "model.chat_template")
"""Keys with files of code, which may be in the folder of the recipe."""


@dataclass(frozen=True)
class Resolved:
    config: Config
    origins: dict[str, str]
    """Leaf key, or given engine option -> default | recipe NAME | command line | verl key ... | verl's default."""
    notes: tuple[Note, ...] = ()  # How verl's keys on this command line were translated.
    masked: Mapping[str, Any] = field(default_factory=dict)
    """Values that came from the environment, as they were written (`${oc.env:KEY}`). Only this form is recorded."""
    verl_names: bool = False  # Set by verl's own entry points: metrics are also logged under verl's names.

    def hide(self, text: str) -> str:
        """Return `text` without the environment's values of at least six characters (shorter ones may occur
        anywhere)."""
        return without_environment(text, str(self.masked))


def without_environment(text: str, written: str) -> str:
    """Return `text` with the values of environment variables replaced by `${oc.env:KEY}`, for each KEY in `written`."""
    for name in set(_ENVIRONMENT.findall(written)):
        if len(value := os.environ.get(name, "")) >= 6:
            text = text.replace(value, shown := f"${{oc.env:{name}}}").replace(json.dumps(value)[1:-1], shown)
    return text


def load_config(overrides: Sequence[str], *, verl_defaults: VerlDefaults | None = None) -> Resolved:
    """Load the configuration of a command line: `recipe=NAME|FILE.yaml`, our keys, verl's keys.

    verl_defaults: keys that are not given get verl's own defaults (for its entry points)

    Raise one ValueError with a line for each fault of a single key. `validate` finds the faults of several keys
    together.
    """
    recipe, args = _split_recipe(overrides)
    settings = list(_recipe_settings(recipe, ())) if recipe else []
    prompts = [s.value for s in settings if s.key == "step.prompts_per_step" and isinstance(s.value, int)]
    line, unread = _read_line(args, prompts[-1] if prompts else None, verl_defaults)
    values, origins, wrong = _merge([*line.defaults, *_of_its_algorithm(settings, line.settings), *line.settings])
    faults = [*unread, *wrong]
    masked: dict[str, Any] = {}
    try:
        masked = _resolve(values, origins)
    except ValueError as exc:
        faults += str(exc).splitlines()
    notes = list(line.notes)
    faults += [] if faults else _idle_agent(values, origins, notes)
    if faults:
        command: Literal["train", "sft"] = "sft" if verl_defaults == "sft" else "train"
        more = _also_wrong(values, command, "algorithm.name" not in line.unknown) if verl_defaults else []
        raise Refused("\n".join(dict.fromkeys([*faults, *more])))
    return Resolved(tree_of(values), origins, tuple(notes), masked, verl_names=verl_defaults is not None)


def _read_line(
    args: Sequence[str], prompts_per_step: int | None, verl_defaults: VerlDefaults | None
) -> tuple[Translation, list[str]]:
    """Read our keys, and translate all other keys. Return also a line for each fault."""
    line = read_line(args)
    if not line.rest and verl_defaults is None:
        return Translation(line.native), line.faults
    from verl.config.compat.translate import translated

    made, faults = translated(line.rest, line.native, prompts_per_step=prompts_per_step, verl_defaults=verl_defaults)
    return made, [*line.faults, *faults]


def _unknown(key: str, origin: str) -> Refused:
    """Return the error for a key that does not exist, with near keys of ours and of the public verl."""
    from verl.config.compat.table import unknown_key

    return Refused(unknown_key(key, origin))


def _also_wrong(values: dict[str, Any], command: Literal["train", "sft"], named: bool) -> list[str]:
    """Return the further faults that `validate` finds in the keys that could be read, so that the user sees all faults
    at once.

    named: True if the algorithm is known; otherwise lines about the default algorithm are left out
    """
    try:
        validate(tree_of(values), command)
    except ValueError as exc:
        default = re.compile(rf"\b{re.escape(str(values['algorithm.name']))}\b")
        return [line for line in str(exc).splitlines() if named or not default.search(line)]
    return []


def _idle_agent(values: dict[str, Any], origins: dict[str, str], notes: list[Note]) -> list[str]:
    """Return a line for each given `agent.*` key without an effect. If a verl key has set it, there is no fault: its
    note is changed in place and the key gets its default. If a recipe has set it, there is no fault if the command line
    removes the recipe's tools or loop."""
    faults = []
    emptied = "command line" in (origins["agent.tools"], origins["agent.loop"])
    for key in idle_agent_keys(values):
        if origins[key] == "command line" or (origins[key].startswith("recipe") and not emptied):
            faults.append(idle_line(key, values[key], origins[key]))
        elif origins[key].startswith("verl key"):
            values[key], origins[key] = leaves()[key].default, "default"
            idle = [i for i, note in enumerate(notes) if note.targets == (key,)]
            for i in idle:
                notes[i] = replace(notes[i], action="ignored", text="no tools are given: every row is one answer")
    return faults


def _of_its_algorithm(recipe: list[Setting], given: Sequence[Setting]) -> list[Setting]:
    """Return the settings of a recipe. If the command line names another algorithm, leave out the recipe's algorithm.*
    keys, which were chosen for its own algorithm: GSPO with GRPO's aggregation, for example, is another objective."""
    own, wanted = ([s.value for s in layer if s.key == "algorithm.name"][-1:] for layer in (recipe, given))
    if not own or not wanted or own == wanted:
        return recipe
    return [s for s in recipe if not s.key.startswith("algorithm.")]


# -- layers ------------------------------------------------------------------------------------------------------------


def _split_recipe(overrides: Sequence[str]) -> tuple[str | None, list[str]]:
    recipes = [a for a in overrides if a.lstrip("+").startswith("recipe=")]
    if len(recipes) > 1:
        raise Refused(f"{' and '.join(recipes)}: one recipe only; a recipe file may name its base as `recipe: NAME`")
    if not recipes:
        return None, list(overrides)
    parsed = parse_argument(recipes[0])
    if parsed.error or not parsed.value:
        raise Refused(parsed.error or "recipe= names no recipe: recipe=NAME or recipe=FILE.yaml")
    return str(parsed.value), [a for a in overrides if a is not recipes[0]]


def recipe_names() -> list[str]:
    """Return the names of the packaged recipes."""
    names = [file.name for file in resources.files("verl.recipes").iterdir()]
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def _recipe_settings(recipe: str, chain: tuple[str, ...], folder: Path | None = None) -> Iterator[Setting]:
    """Return the settings of a recipe, those of its base first. folder: that of the file which names it, for relative
    paths."""
    file: Path | Traversable
    if recipe.endswith((".yaml", ".yml")):
        file = (folder or Path()) / Path(recipe).expanduser()
        if not file.is_file():
            raise Refused(f"recipe={recipe}: no such file ({file.absolute()})")
        folder = file.absolute().parent
    else:
        file = resources.files("verl.recipes").joinpath(f"{recipe}.yaml")
        if recipe not in (names := recipe_names()):
            near = did_you_mean(recipe, names, 3) or f"there are {', '.join(names)}. "
            raise Refused(f"recipe={recipe}: no such recipe; {near}A file ends in .yaml")
    if recipe in chain:
        raise Refused(f"recipe {' -> '.join([*chain, recipe])}: a recipe cannot be its own base")
    tree = _parse_recipe(recipe, file.read_text(encoding="utf-8"))
    base = tree.pop("recipe", None)
    if base is not None:
        yield from _recipe_settings(str(base), (*chain, recipe), folder)
    for key, value in _flatten(tree, "", f"recipe {recipe}"):
        yield Setting(key, _from_recipe_folder(key, value, folder), f"recipe {recipe}")


def _from_recipe_folder(key: str, value: Any, folder: Path | None) -> Any:
    """Return a recipe's path of a code file; if the current folder has no such file, the path of the file beside the
    recipe."""
    if isinstance(value, list):
        return [_from_recipe_folder(key, one, folder) for one in value] if key in CODE_KEYS else value
    if folder is None or key not in CODE_KEYS or not isinstance(value, str):
        return value
    file, colon, name = value.partition(":")
    here, there = Path(file).expanduser(), folder / file
    return f"{there}{colon}{name}" if not here.is_file() and there.is_file() else value


def _parse_recipe(name: str, text: str) -> dict[str, Any]:
    try:
        tree = OmegaConf.to_container(OmegaConf.create(bounded_yaml(text)), resolve=False)
    except ValueError as exc:
        raise Refused(f"recipe {name}: {exc}") from exc
    except (yaml.YAMLError, OmegaConfBaseException) as exc:
        raise Refused(f"recipe {name}: not YAML: {' '.join(str(exc).split())}") from exc
    if not isinstance(tree, dict) or not all(isinstance(k, str) for k in tree):
        raise Refused(f"recipe {name}: must be a mapping of sections ({', '.join(sections())})")
    return {str(k): v for k, v in tree.items()}


def _flatten(
    tree: Mapping[str, Any], prefix: str, origin: str, also: Collection[str] = ()
) -> Iterator[tuple[str, Any]]:
    """Yield (leaf key, value) of nested sections. A mapping below a leaf is the value of the leaf. also: further keys
    that are leaves."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if key in also or leaf_of(key) is not None:
            yield key, value
        elif isinstance(value, Mapping):
            yield from _flatten(value, f"{key}.", origin, also)
        elif value is not None or key not in sections():
            raise _unknown(key, origin)


# -- values ------------------------------------------------------------------------------------------------------------


def _merge(settings: Sequence[Setting]) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """Merge the settings: the last one of a leaf counts, and mappings are merged. Return (values, origins, faults of
    unreadable keys)."""
    values = {key: copy.deepcopy(leaf.default) for key, leaf in leaves().items()}
    origins = dict.fromkeys(values, "default")
    faults = []
    for setting in settings:
        found = leaf_of(setting.key)
        if found is None:
            raise _unknown(setting.key, setting.origin)
        (leaf, below), value, origin = found, setting.value, setting.origin
        for name in reversed(below):
            value = {name: value}
        try:
            value = _converted(leaf.key, value, origin, setting.text)
        except ValueError as exc:
            faults.append(str(exc))
            continue
        before, origins[leaf.key] = origins[leaf.key], origin
        if leaf.is_mapping and isinstance(value, Mapping):
            if leaf.key.endswith(OPTIONS):
                origins |= {f"{leaf.key}.{name}": origin for name in value}
            value = _merged(values[leaf.key], value)
            if before not in ("default", origin):
                origins[leaf.key] = f"{before}, {origin}"
        values[leaf.key] = value
    return values, origins, faults


def _merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(under)
    for name, value in over.items():
        below = out.get(name)
        out[name] = _merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return out


def _converted(key: str, value: Any, origin: str, text: str | None = None) -> Any:
    """Return `value` in the leaf's type; an interpolation unchanged, until all layers are merged."""
    if isinstance(value, str) and "${" in value:
        return value
    try:
        return convert(present_value(key, value), leaves()[key].hint, text)
    except ValueError as exc:
        shown = "null" if value is None else repr(value) if text is None else text
        raise Refused(f"{key}={shown} ({origin}): {exc}") from exc


def _resolve(values: dict[str, Any], origins: dict[str, str]) -> dict[str, Any]:
    """Resolve in place: replace interpolations by the values they refer to (the expression is recorded as origin),
    expand ~ in paths, replace a hub id by its folder in the local cache, and fill in the options of the chosen engines.
    Returns the values that came from the environment, as they were written."""
    written = {key: values[key] for key in _from_environment(values)}
    for key, (plain, expression) in _interpolated(values, origins).items():
        origins[key] = f"{origins[key]}: {expression}"
        values[key] = _converted(key, plain, origins[key])
    if values["model.path"] == MISSING:
        raise Refused(
            "model.path is missing: model.path=FOLDER (a Hugging Face folder: config.json, safetensors, tokenizer)"
        )
    for key in PATH_KEYS:
        path = values[key]
        several = isinstance(path, list)
        values[key] = [os.path.expanduser(p) for p in path] if several else path and os.path.expanduser(path)
    for key in ("model.path", "critic.path", "teacher.path", "reward.model"):
        cached = cached_model_folder(values[key] or "")
        if cached is not None:
            origins[key], values[key] = f"{origins[key]}: {values[key]}", str(cached)
    named: dict[str, str] = values["teacher.paths"]
    values["teacher.paths"] = {n: str(cached_model_folder(p) or os.path.expanduser(p)) for n, p in named.items()}
    _fit_lengths(values, origins)
    _fill_horizon(values, origins)
    _correct_rollout(values, origins)
    faults = complete_options(values)
    if faults:
        raise Refused("\n".join(faults))
    return {key: value for key, value in written.items() if isinstance(values[key], str | list | dict)}


def _from_environment(values: Mapping[str, Any]) -> set[str]:
    """Return the keys with an environment variable in their value, directly or by an interpolation of another key."""
    found, texts = set[str](), {key: str(value) for key, value in values.items() if "${" in str(value)}
    while more := {
        key
        for key, text in texts.items()
        if key not in found and ("oc.env" in text or any(f"${{{name}}}" in text for name in found))
    }:
        found |= more
    return found


def _fit_lengths(values: dict[str, Any], origins: dict[str, str]) -> None:
    """Reduce lengths that are not given to the context of the model if their defaults exceed it, in place."""
    room = context_tokens(values["model.path"])
    if room is None:
        return
    both, row = ("data.max_prompt_tokens", "rollout.max_response_tokens"), "data.max_tokens_per_row"
    free = [key for key in both if origins[key] == "default"]
    fitted = {}
    if sum(values[key] for key in both) > room:
        share = (room - sum(values[key] for key in both if key not in free)) // max(1, len(free))
        fitted = {key: max(1, min(values[key], share)) for key in free}
    if origins[row] == "default":
        fitted[row] = min(values[row], room)
    for key, value in fitted.items():
        if value != values[key]:
            values[key], origins[key] = value, f"{FITTED} {room} positions"


def _fill_horizon(values: dict[str, Any], origins: dict[str, str]) -> None:
    """Set the constant by which an aggregation divides to the longest response if it is not given, in place."""
    preset, key = PRESETS.get(values["algorithm.name"]), "algorithm.horizon_tokens"
    aggregation = values["algorithm.aggregation"] or (preset.loss.aggregation if preset else None)
    if aggregation == BY_HORIZON and values[key] is None:
        values[key], origins[key] = values["rollout.max_response_tokens"], "default: rollout.max_response_tokens"


def _correct_rollout(values: dict[str, Any], origins: dict[str, str]) -> None:
    """Set truncated importance weights for a rollout that samples by other weights than the trainer's (FP8, exploration
    noise), in place, if its algorithm takes them and has no weights of its own."""
    name, noise = values["algorithm.name"], "rollout.engine_options.noise_sigma_start"
    given_noise = values["rollout.engine_options"].get("noise_sigma_start") is not None
    why = "rollout.dtype=fp8" if values["rollout.dtype"] == FP8 else noise if given_noise else ""
    if not why or name not in PRESETS:
        return
    given = tree_of(values).algorithm.given()
    try:
        own = settled(name, given).correction
        settled(name, {**ROLLOUT_CORRECTION, **given})
    except ValueError:
        return  # an algorithm that takes none; or a fault, which `validate` finds
    if not corrects(own):
        options = values["algorithm.options"]
        values["algorithm.correction"] = ROLLOUT_CORRECTION["correction"]
        values["algorithm.options"] = {"correction_high": ROLLOUT_CORRECTION["correction_high"], **options}
        origins["algorithm.correction"] = default = f"default: {why}"
        if "correction_high" not in options:
            before = origins["algorithm.options"]
            origins["algorithm.options"] = default if before == "default" else f"{before}, {default}"


def _interpolated(values: Mapping[str, Any], origins: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    """Return key -> (value, expression) for every key that refers to another key."""
    found: dict[str, tuple[Any, str]] = {}
    expressions = {key: value for key, value in values.items() if "${" in str(value)}
    root = OmegaConf.create()
    for key, value in values.items() if expressions else ():
        if value != MISSING:
            OmegaConf.update(root, key, value)
    for key, value in expressions.items():
        try:
            node = OmegaConf.select(root, key, throw_on_missing=True)
            plain = OmegaConf.to_container(node, resolve=True) if isinstance(node, Container) else node
        except OmegaConfBaseException as exc:
            reason = "refers to itself" if "recursi" in str(exc).lower() else str(exc).splitlines()[0]
            raise Refused(f"{key}={value} ({origins[key]}): {reason}") from exc
        found[key] = plain, str(value)
    return found


# -- the file in the run directory -------------------------------------------------------------------------------------


def dump_config(resolved: Resolved) -> str:
    """Return the YAML of the whole tree, with the origin of each value as a comment: `config.yaml` of the run
    directory."""
    lines = ["# The resolved configuration. On the right, where each value came from."]
    values = values_of(resolved.config) | dict(resolved.masked)
    for key, value in values.items():
        section, _, name = key.partition(".")
        lines += [] if f"{section}:" in lines else [f"{section}:"]
        if key.endswith(OPTIONS) and value and key not in resolved.masked:
            origins = {option: resolved.origins.get(f"{key}.{option}", "default") for option in value}
            lines.append(f"  {name}:")
            lines += [_line(f"    {option}: {text_of(value[option])}", origin) for option, origin in origins.items()]
        else:
            lines.append(_line(f"  {name}: {text_of(value)}", resolved.origins[key]))
    return "\n".join(lines) + "\n"


def _line(text: str, origin: str) -> str:
    return f"{text:<{_ORIGIN_COLUMN}}  # {' '.join(origin.split())}"


def read_config(path: str | os.PathLike[str], command: str = "train") -> Config:
    """Read the tree from the `config.yaml` of a run of `verl COMMAND`, with the present environment. Keys that the file
    does not have get their defaults, and keys of earlier versions set those that replace them (moved.py)."""
    try:
        tree = yaml.safe_load(bounded_yaml(Path(path).read_text(encoding="utf-8")))
    except (ValueError, yaml.YAMLError) as exc:
        raise Refused(f"{path}: {' '.join(str(exc).split())}") from exc
    if not isinstance(tree, dict):
        raise Refused(f"{path}: must be a mapping of sections ({', '.join(sections())})")
    written = moved_values(dict(_flatten(tree, "", str(path), MOVED)), command)
    values = {key: _converted(key, value, str(path)) for key, value in written.items()}
    for key, (plain, _) in _interpolated(values, dict.fromkeys(values, str(path))).items():
        values[key] = _converted(key, plain, str(path))
    return tree_of(values)
