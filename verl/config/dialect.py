"""verl's own keys, accepted everywhere through one table (`dialect.tsv`): mapped, ignored with a reason, or refused
with what to do instead.

`translate` turns a command line in either vocabulary, or both, into overrides of our tree. A key of ours always wins
over one of verl's that sets the same value, so that `bash run_verl.sh rollout.engine=native` does what it says.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from types import MappingProxyType
from typing import Any, Literal, cast, get_args

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType, Quote, QuotedString
from hydra.errors import HydraException

from verl.config.dialect_rules import JOINT, Given, critic_without_estimator, same_value, wrong_types
from verl.config.tree import leaf_of, leaves, nearest

Action = Literal["mapped", "ignored", "refused"]
VerlDefaults = Literal["rl", "sft"]


@dataclass(frozen=True, slots=True)
class KeyRow:
    """One row of the table. `targets` are our keys; `rule`, `text` and the defaults as the head of dialect.tsv says."""

    key: str
    action: Action
    targets: tuple[str, ...] = ()
    rule: str = ""
    default_rl: str = ""
    default_sft: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class Note:
    """What happened to one of verl's keys on this command line."""

    key: str
    value: str
    action: Action
    text: str

    def __str__(self) -> str:
        return f"{self.key}={self.value} " + (
            f"-> {self.text}" if self.action == "mapped" else f"{self.action}: {self.text}"
        )


@dataclass(frozen=True, slots=True)
class Translation:
    """`overrides` in Hydra's syntax and in our keys; `defaults` likewise, verl's own defaults, below any recipe.

    `origins` says for every translated key where it came from: {"step.samples_per_prompt": "verl key ...n=8"}.
    """

    overrides: list[str]
    notes: list[Note]
    defaults: list[str]
    origins: dict[str, str]


@dataclass(frozen=True, slots=True)
class Argument:
    """One `key=value` of a command line. `text` is the value as written; `error` why Hydra could not read it."""

    key: str
    value: Any
    text: str
    error: str = ""


@functools.cache
def _rows() -> Mapping[str, KeyRow]:
    text = resources.files("verl.config").joinpath("dialect.tsv").read_text(encoding="utf-8")
    rows: dict[str, KeyRow] = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        cells = line.split("\t")
        assert 2 <= len(cells) <= 7, f"dialect.tsv: {len(cells)} cells in {line!r}"
        key, action, to, rule, default_rl, default_sft, why = cells + [""] * (7 - len(cells))
        assert action in get_args(Action), f"dialect.tsv: action {action!r} of {key}"
        assert key not in rows, f"dialect.tsv: {key} twice"
        targets = tuple(to.split(",")) if to else ()
        rows[key] = KeyRow(key, cast(Action, action), targets, rule, default_rl, default_sft, why)
    return MappingProxyType(rows)


def key_rows() -> tuple[KeyRow, ...]:
    """Every key of verl that is known here, in the order of the table."""
    return tuple(_rows().values())


def keys_table() -> list[tuple[str, str, str]]:
    """(verl's key, action, what happens) for `verl show keys`."""
    return [(r.key, r.action, _becomes(r)) for r in key_rows()]


def _becomes(row: KeyRow) -> str:
    if row.action == "mapped":
        values = f" ({row.rule.removeprefix('map:')})" if row.rule.startswith("map:") else ""
        return ", ".join(row.targets) + values + (f"; {row.text}" if row.text else "")
    harmless = f"except at {row.rule.removeprefix('except:')}: " if row.action == "refused" and row.rule else ""
    return harmless + row.text


def find_row(key: str) -> KeyRow | None:
    """The row of `key`: its own, else the first `prefix.*` above it."""
    rows = _rows()
    if key in rows:
        return rows[key]
    for row in rows.values():
        if row.key.endswith(".*") and key.startswith(row.key[:-1]):
            tail = key[len(row.key) - 1 :]
            targets = tuple(t[:-1] + tail if t.endswith(".*") else t for t in row.targets)
            return KeyRow(key, row.action, targets, row.rule, text=row.text)
    return None


def unknown_key(key: str, origin: str = "") -> str:
    """One line: the key is unknown, and which are near it in either vocabulary."""
    said = f"unknown key {key!r}" + (f" ({origin})" if origin else "")
    below = [name for name in leaves() if name.startswith(f"{key}.")]
    if below:
        return f"{said}: a section; its keys are {', '.join(below)}"
    row = _rows().get(key)
    if row is not None and row.action == "mapped":
        return f"{said}: verl's name, only on the command line; here it is {' and '.join(row.targets)}"
    near = nearest(key, [*leaves(), *(k for k in _rows() if not k.endswith(".*") and k not in leaves())])
    return f"{said}: " + (f"did you mean {' or '.join(near)}?" if near else "see `verl show config` for all keys")


def parse_argument(argument: str) -> Argument:
    """One Hydra override. `+key=` and `++key=` are read as `key=`; deletions, packages and sweeps are refused."""
    name, equals, text = argument.partition("=")
    if name.startswith("~"):
        raise ValueError(f"{argument!r}: a typed key cannot be deleted; leave it out, or set {name[1:]}=null")
    if name.startswith("--"):
        raise ValueError(
            f"{argument!r}: Hydra's own options are not taken; put the values in a file and give recipe=FILE.yaml"
        )
    if not equals:
        raise ValueError(f"argument {argument!r} is not key=value")
    key = name.lstrip("+")
    try:
        override = _parser().parse_override(argument)
        value = override.value()
    except HydraException as exc:
        reason = str(exc).splitlines()[0]
        return Argument(key, None, text, f"{argument!r} cannot be read: {reason}; quote the value: {name}='\"{text}\"'")
    if override.is_sweep_override():
        return Argument(key, None, text, f"{argument!r} is a sweep over values; a list is written {key}=[{text}]")
    if override.package is not None or override.type not in (
        OverrideType.CHANGE,
        OverrideType.ADD,
        OverrideType.FORCE_ADD,
    ):
        raise ValueError(f"{argument!r}: only key=value is taken")
    return Argument(key, value, text)


@functools.cache
def _defaults(kind: VerlDefaults) -> Mapping[str, Any]:
    """verl's own defaults of mapped keys, for its RL or its SFT entry point."""
    texts = {k: row.default_sft if kind == "sft" else row.default_rl for k, row in _rows().items()}
    return MappingProxyType({k: parse_argument(f"{k}={text}").value for k, text in texts.items() if text})


@functools.cache
def _parser() -> OverridesParser:
    return OverridesParser.create()


def as_override(key: str, value: Any) -> str:
    """`key=value` such that `parse_argument` reads the same value back."""
    return f"{key}={_hydra_text(value)}"


def _hydra_text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return QuotedString(text=value, quote=Quote.single).with_quotes()
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{k}:{_hydra_text(v)}" for k, v in value.items()) + "}"
    assert isinstance(value, Sequence), f"no Hydra text for {type(value).__name__} {value!r}"
    return "[" + ",".join(_hydra_text(v) for v in value) + "]"


def translate(
    args: Sequence[str], *, prompts_per_step: int | None = None, verl_defaults: VerlDefaults | None = None
) -> Translation:
    """Overrides of our tree from a command line that may mix our keys with verl's.

    `prompts_per_step`: of the recipe, for a mini batch size given without a batch size. `verl_defaults`: mapped keys
    that are not given take verl's own default (the entry `python -m verl.trainer.main_ppo` does this).
    Raises one ValueError with a line for every key that is unknown, unreadable, refused or contradicted.
    """
    native: dict[str, Any] = {}
    foreign: dict[str, Argument] = {}
    overrides: list[str] = []
    problems: list[str] = []
    for argument in args:
        parsed = parse_argument(argument)
        row = find_row(parsed.key)
        if leaf_of(parsed.key):
            native[parsed.key] = parsed.value
            overrides.append(argument)
        elif row is None:
            problems.append(unknown_key(parsed.key))
            continue
        else:
            foreign[parsed.key] = parsed
        if parsed.error and not (row is not None and row.action == "ignored"):
            problems.append(parsed.error)
    if problems:
        raise ValueError("\n".join(problems))
    work = _Work(foreign, native, prompts_per_step, verl_defaults)
    work.run()
    if work.problems:
        raise ValueError("\n".join(work.problems))
    given = [as_override(k, v) for k, v in work.results.items() if k not in work.by_default]
    defaults = [as_override(k, v) for k, v in work.results.items() if k in work.by_default]
    return Translation(given + overrides, work.notes, defaults, work.origins)


class _Work:
    """One translation: the given keys go in, `results`, `notes`, `origins` and `problems` come out."""

    def __init__(
        self,
        foreign: Mapping[str, Argument],
        native: Mapping[str, Any],
        prompts_per_step: int | None,
        verl_defaults: VerlDefaults | None,
    ) -> None:
        self.texts = {key: argument.text for key, argument in foreign.items()}
        self.native = native
        self.results: dict[str, Any] = {}
        self.notes: list[Note] = []
        self.origins: dict[str, str] = {}
        self.by_default: set[str] = set()
        self.problems: list[str] = []
        self.defaults = _defaults(verl_defaults or "rl")
        self.use_defaults = verl_defaults is not None
        self.values = {key: self._resolved(key, argument.value, foreign) for key, argument in foreign.items()}
        self.prompts_per_step = prompts_per_step

    def run(self) -> None:
        for key in [*self.values, *(k for k in self.defaults if self.use_defaults and k not in self.values)]:
            row = find_row(key)
            assert row is not None, key
            given = key in self.values
            if row.targets and all(t in self.native for t in row.targets):
                if given:
                    self._note(row, "ignored", f"{' and '.join(row.targets)} is given")
            elif row.action == "ignored":
                self._note(row, "ignored", row.text)
            elif row.action == "refused":
                self._refused(row)
            elif not row.rule.startswith("@"):
                self._single(row, given)
        wrong = wrong_types({k: v for k, v in self.values.items() if not self._is_refused(k)})
        self.problems += wrong
        if not self.use_defaults:
            self.problems += critic_without_estimator(self.values, self.native)
        for rule in JOINT if not wrong else ():
            self._joint(rule)

    def _resolved(self, key: str, value: Any, foreign: Mapping[str, Argument]) -> Any:
        """`${...}` of one of verl's keys stands for its value here; other interpolations stay for our own tree."""
        row = find_row(key)
        if not isinstance(value, str) or "${" not in value or row is None or row.action == "ignored":
            return value
        names = re.findall(r"\$\{([\w.]+)\}", value)
        for name in names:
            if leaf_of(name):
                continue
            known = foreign[name].value if name in foreign else self.defaults.get(name)
            if known is None:
                self.problems.append(f"{key}={value}: ${{{name}}} is not given on this command line; write its value")
            elif value == f"${{{name}}}":
                return known
            value = value.replace(f"${{{name}}}", str(known))
        return value

    def _note(self, row: KeyRow, action: Action, text: str) -> None:
        self.notes.append(Note(row.key, self.texts.get(row.key, ""), action, text))

    def _is_refused(self, key: str) -> bool:
        row = find_row(key)
        return row is not None and row.action == "refused"

    def _refused(self, row: KeyRow) -> None:
        allowed = row.rule.removeprefix("except:").split(",") if row.rule else []
        if any(same_value(self.values[row.key], text) for text in allowed):
            self._note(row, "ignored", "has no effect at this value")
        else:
            self.problems.append(f"{row.key}={self.texts[row.key]}: {row.text}")

    def _single(self, row: KeyRow, given: bool) -> None:
        value = self.values[row.key] if given else self.defaults[row.key]
        if row.rule.startswith("map:"):
            choices = dict(pair.split("=") for pair in row.rule.removeprefix("map:").split(","))
            found = [to for name, to in choices.items() if same_value(value, name)]
            if not found:
                self.problems.append(f"{row.key}={value}: {row.text}")
                return
            value = found[0]
        elif row.rule in ("off", "null") and isinstance(value, int | float) and value < 0:
            value = 0 if row.rule == "off" else None
        elif row.rule == "unless_null" and value is None:
            self._note(row, "ignored", "has no effect at null")
            return
        for target in row.targets:
            self._set(target, value, [row.key] if given else [])
        if given:
            self._note(row, "mapped", self._said(row.targets))

    def _joint(self, rule: str) -> None:
        rows = {k: r for k, r in _rows().items() if r.rule == f"@{rule}"}
        free = {k for k, r in rows.items() if not all(t in self.native for t in r.targets)}
        given = [k for k in self.values if k in free]
        if not given and not (self.use_defaults and any(k in self.defaults for k in free)):
            return
        view = Given(
            {k: v for k, v in self.values.items() if k in free or k not in rows},
            self.defaults,
            self.use_defaults,
            self.native,
            self.prompts_per_step,
        )
        try:
            results = JOINT[rule](view)
        except ValueError as exc:
            self.problems.append(str(exc))
            return
        for target, value in results.items():
            self._set(target, value, [k for k in given if target in rows[k].targets])
        for key in given:
            if key in view.ignored:
                self._note(rows[key], "ignored", view.ignored[key])
            else:
                self._note(rows[key], "mapped", self._said(t for t in rows[key].targets if t in results))

    def _said(self, targets: Iterable[str]) -> str:
        return ", ".join(f"{t}={_plain(self.results.get(t, self.native.get(t)))}" for t in targets)

    def _set(self, target: str, value: Any, keys: Sequence[str]) -> None:
        """`keys`: verl's keys that say so; none: verl's default."""
        if target in self.native:
            return
        origin = "verl key " + ", ".join(f"{k}={self.texts[k]}" for k in keys) if keys else "verl's default"
        if target in self.results and target not in self.by_default:
            if not keys:
                return
            if self.results[target] != value:
                self.problems.append(f"{origin} contradicts {self.origins[target]}: both set {target}; leave one out")
        self.by_default.discard(target)
        if not keys:
            self.by_default.add(target)
        self.results[target] = value
        self.origins[target] = origin


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else _hydra_text(value)


def render_notes(notes: Sequence[Note]) -> str:
    """A few lines for a long launch script: mapped keys one by one, ignored ones gathered by their reason."""
    lines = [str(n) for n in notes if n.action == "mapped"]
    reasons: dict[str, list[str]] = {}
    for note in notes:
        if note.action == "ignored":
            reasons.setdefault(note.text, []).append(f"{note.key}={note.value}")
    lines += [f"ignored ({reason}): {', '.join(keys)}" for reason, keys in reasons.items()]
    return "\n".join(lines)
