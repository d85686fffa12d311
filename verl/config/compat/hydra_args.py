"""Read a command line in verl's form as single keys: Hydra's options, groups (`a@b=c`), mappings and a user's file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import yaml
from omegaconf import OmegaConf

from verl.bounds import bounded_yaml
from verl.config.compat.layout import OF_FILE
from verl.config.compat.table import find_row
from verl.config.overrides import Argument, argument_of, keys_below, parse_argument
from verl.config.tree import leaf_of
from verl.errors import Refused

_OPTIONS = {f"--config-{what}": f"--config-{what}" for what in ("path", "name", "dir")}
_OPTIONS |= {"-cp": "--config-path", "-cn": "--config-name", "-cd": "--config-dir"}
_OF_VERL = re.compile(r"(?:[a-z]+_)*?(?:ppo|sft)_(?:(megatron|veomni|torchtitan|automodel)_)?trainer(?:_engine)?")
"""The names of verl's own configuration files, with the model engine that they select."""


def parse_arguments(args: Sequence[str | Argument], problems: list[str], main: str | None = None) -> list[Argument]:
    """Return the arguments as single keys in order of precedence: those of a file, then those of the command line. Each
    unreadable argument adds a line to `problems`.

    main: the name of the file if --config-path is given without a name
    """
    options, rest = _options(args)
    found: list[Argument] = []
    for word in (None, *rest):
        try:
            found += _of_options(options, main) if word is None else [_parsed(word)]
        except ValueError as exc:
            problems.append(str(exc))
    return [single for argument in found for single in _singles(argument)]


def _parsed(word: str | Argument) -> Argument:
    return parse_argument(word) if isinstance(word, str) else word


def _options(args: Sequence[str | Argument]) -> tuple[dict[str, str], list[str | Argument]]:
    """Separate Hydra's options (`--config-name=x`, `--config-name x`) from the other arguments."""
    options: dict[str, str] = {}
    rest: list[str | Argument] = []
    words = iter(args)
    for word in words:
        name, equals, text = word.partition("=") if isinstance(word, str) else ("", "", "")
        if name in _OPTIONS:
            options[_OPTIONS[name]] = text if equals else str(next(words, ""))
        else:
            rest.append(word)
    return options, rest


def _of_options(options: Mapping[str, str], main: str | None) -> list[Argument]:
    found = [Argument(name, text, text) for name, text in options.items()]
    path, name = options.get("--config-path"), options.get("--config-name")
    folder = Path((path or options.get("--config-dir", ".")).removeprefix("file://")).expanduser()
    if name is None and path is not None:
        if main is None:
            raise Refused(f"--config-path={path}: give --config-name=FILE beside it")
        if folder.is_absolute() and not (folder / f"{main}.yaml").is_file():
            raise Refused(f"--config-path={path}: no {main}.yaml there; give --config-name=FILE beside it")
        name = main
    return found if name is None else [*found, *_of_file(folder, name, ())]


def _of_file(folder: Path, name: str, chain: tuple[str, ...]) -> Iterator[Argument]:
    """Yield the keys of folder/name.yaml, after those of its base files. Of verl's own files only the model engine is
    read."""
    name = name.removesuffix(".yaml")
    path, packaged = folder / f"{name}.yaml", _OF_VERL.fullmatch(name)
    if name in chain:
        raise Refused(f"--config-name={' -> '.join([*chain, name])}: a file cannot be its own base")
    if path.is_file():
        try:
            bounded_yaml(path.read_text(encoding="utf-8"))
            tree = OmegaConf.to_container(OmegaConf.load(path), resolve=False)  # 1e-6 is a number there, as in verl
        except yaml.YAMLError as exc:
            raise Refused(f"{path}: not YAML: {' '.join(str(exc).split())}") from exc
        except ValueError as exc:
            raise Refused(f"{path}: {exc}") from exc
        if not isinstance(tree, dict):
            raise Refused(f"{path}: must be a mapping of keys")
        for base in tree.pop("defaults", ()):
            if isinstance(base, str) and base != "_self_":
                yield from _of_file(folder, base, (*chain, name))
            elif isinstance(base, Mapping):
                groups = {str(k).removeprefix("override ").lstrip("/"): v for k, v in base.items()}
                yield from (parse_argument(f"{group}={choice}") for group, choice in groups.items())
        tree.pop("hydra", None)
        yield from (argument_of(str(key), value) for key, value in tree.items())
    elif packaged is None:
        message = "no such file; give the folder of yours as an absolute --config-path"
        raise Refused(f"--config-name={name}: {path.absolute()}: {message}")
    elif packaged[1]:
        yield Argument(OF_FILE, packaged[1], packaged[1])


def _singles(argument: Argument) -> Iterable[Argument]:
    """Return the keys of a mapping as single keys. A mapping that is itself the value of a key is not divided."""
    key, value = argument.key, argument.value
    own = leaf_of(key) is not None or ((row := find_row(key)) is not None and row.key == key and not _below(key))
    if not isinstance(value, Mapping) or own:
        return [argument]
    return [single for part in keys_below(argument) for single in _singles(part)]


def _below(key: str) -> bool:
    """Return True if the table has keys below this one."""
    return find_row(f"{key}.x") is not None
