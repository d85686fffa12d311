"""Translate the arguments of a command line that are not our keys to settings of our keys.

If one of our keys and one of verl's set the same value, ours is used, so that `bash run_verl.sh rollout.engine=native`
has the expected effect.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from verl.config.compat.given import Given
from verl.config.compat.hydra_args import parse_arguments
from verl.config.compat.objective import critic_without_estimator
from verl.config.compat.rules import JOINT
from verl.config.compat.table import KeyRow, find_row, key_rows, same_value, unknown_key
from verl.config.overrides import Action, Argument, Note, Translation, VerlDefaults, native_setting
from verl.config.tree import Setting, leaf_of, text_of


def translated(
    rest: Sequence[str | Argument],
    native: Sequence[Setting] = (),
    *,
    prompts_per_step: int | None = None,
    verl_defaults: VerlDefaults | None = None,
) -> tuple[Translation, list[str]]:
    """Return the translation, and a line for each key that is unknown, unreadable, refused or contradictory.

    rest: the arguments with verl's keys, and Hydra's options
    native: our keys on the same command line. The settings of a file that `rest` names are added before them, so that
        they override the file's
    prompts_per_step: of the recipe, for a mini batch size that is given without a batch size
    verl_defaults: mapped keys that are not given get verl's own defaults (as `python -m verl.trainer.main_ppo` does)
    """
    of_file: list[Setting] = []
    foreign: dict[str, Argument] = {}
    problems: list[str] = []
    main = {"rl": "ppo_trainer", "sft": "sft_trainer_engine", None: None}[verl_defaults]
    for parsed in parse_arguments(rest, problems, main):
        row, ours = find_row(parsed.key), leaf_of(parsed.key) is not None
        if parsed.error and (ours or (row is not None and row.action != "ignored")):
            problems.append(parsed.error)
        elif ours:
            of_file.append(native_setting(parsed))
        elif row is None:
            problems.append(unknown_key(parsed.key, value=parsed.text))
        else:
            foreign[parsed.key] = parsed
    every = [*of_file, *native]
    work = _Work(foreign, {s.key: s.value for s in every}, prompts_per_step, verl_defaults)
    work.run()
    defaults = [s for key, s in work.by_default.items() if key not in work.found]
    made = Translation([*work.found.values(), *every], defaults, work.notes, frozenset(work.unknown))
    return made, list(dict.fromkeys((*problems, *work.problems)))


@functools.cache
def verl_default_values(kind: VerlDefaults) -> Mapping[str, Any]:
    """Return verl's own defaults of mapped keys, for its RL or its SFT entry point."""
    texts = {k: row.default_sft if kind == "sft" else row.default_rl for k, row in key_rows().items()}
    return MappingProxyType({k: _plain(text) for k, text in texts.items() if text})


@functools.cache
def _rows_of_rules() -> Mapping[str, Mapping[str, KeyRow]]:
    """Return the rows of the table by the joint rule that reads them."""
    rows: dict[str, dict[str, KeyRow]] = {rule: {} for rule in JOINT}
    for key, row in key_rows().items():
        if row.joint:
            rows[row.joint][key] = row
    return MappingProxyType(rows)


def _plain(text: str) -> Any:
    """Parse a default of the table: JSON, or a bare word. (Hydra's grammar takes a millisecond for each.)"""
    try:
        return json.loads(text)
    except ValueError:
        return text


@dataclass
class _Work:
    """The state of one translation: from the given keys to `found`, `by_default`, `notes` and `problems`."""

    foreign: Mapping[str, Argument]
    native: Mapping[str, Any]
    prompts_per_step: int | None
    kind: VerlDefaults | None
    found: dict[str, Setting] = field(default_factory=dict)
    by_default: dict[str, Setting] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    unknown: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.defaults, self.use_defaults = verl_default_values(self.kind or "rl"), self.kind is not None
        self.values = {key: self._resolved(key, argument.value) for key, argument in self.foreign.items()}

    def run(self) -> None:
        unsaid = [k for k in self.defaults if self.use_defaults and k not in self.values]
        for key in [*self.values, *unsaid]:
            row = find_row(key)
            assert row is not None, key
            if row.targets and self._native(row):
                if key in self.values:
                    self._note(row, "ignored", f"{' and '.join(row.targets)} is given")
            elif row.action == "ignored":
                self._note(row, "ignored", row.text)
            elif row.action == "refused" and any(same_value(self.values[key], text) for text in row.harmless):
                self._note(row, "ignored", "has no effect at this value")
            elif row.action == "refused":
                self.problems.append(f"{key}={self.foreign[key].text}: {row.text}")
            elif not row.joint:
                self._single(row)
        if not self.use_defaults:
            self.problems += critic_without_estimator(self.values, self.native)
        for rule in JOINT:
            self._joint(rule)

    def _resolved(self, key: str, value: Any) -> Any:
        """Replace `${...}` with one of verl's keys by the value of that key. Other interpolations are resolved later,
        in our own tree."""
        row = find_row(key)
        if not isinstance(value, str) or "${" not in value or row is None or row.action == "ignored":
            return value
        for name in re.findall(r"\$\{([\w.]+)\}", value):
            if leaf_of(name):
                continue
            known = self.foreign[name].value if name in self.foreign else self.defaults.get(name)
            if known is None:
                self.problems.append(f"{key}={value}: ${{{name}}} is not given on this command line; write its value")
            elif value == f"${{{name}}}":
                return known
            value = value.replace(f"${{{name}}}", str(known))
        return value

    def _native(self, row: KeyRow) -> bool:
        """Return True if our own keys set all targets of this row."""
        return all(target in self.native for target in row.targets)

    def _note(self, row: KeyRow, action: Action, text: str) -> None:
        self.notes.append(Note(row.key, self.foreign[row.key].text, action, text, row.targets))

    def _mapped(self, row: KeyRow, targets: Iterable[str], remark: str = "") -> None:
        values = {t: self.found[t].value if t in self.found else self.native.get(t) for t in targets}
        became = ", ".join(f"{target}={text_of(value)}" for target, value in values.items())
        self._note(row, "mapped", f"{became} ({remark})" if remark else became)

    def _single(self, row: KeyRow) -> None:
        given = row.key in self.values
        try:
            value = row.check(self.values[row.key] if given else self.defaults[row.key])
        except ValueError as exc:
            self.problems.append(str(exc))
            return
        if row.rule in ("off", "null") and isinstance(value, int | float) and value < 0:
            value = 0 if row.rule == "off" else None
        elif row.rule == "unless_null" and value is None:
            if given:
                self._note(row, "ignored", "has no effect at null")
            return
        for target in row.targets:
            self._set(target, value, [row.key] if given else [])
        if given:
            self._mapped(row, row.targets)

    def _joint(self, rule: str) -> None:
        known = {k: r for k in self.values if (r := find_row(k)) is not None}  # those below a `.*`, too
        rows = {**_rows_of_rules()[rule], **{k: r for k, r in known.items() if r.joint == rule}}
        free = {k for k, r in rows.items() if not self._native(r)}
        given = [k for k in self.values if k in free]
        if not given and not (self.use_defaults and any(k in self.defaults for k in free)):
            return
        values, defaults = (
            {k: v for k, v in layer.items() if k in free or k not in rows} for layer in (self.values, self.defaults)
        )
        view = Given(values, defaults, self.use_defaults, self.native, self.prompts_per_step)
        try:
            results = JOINT[rule](view)
        except ValueError as exc:
            self.problems.append(str(exc))
            self.unknown |= {target for key in free for target in rows[key].targets} - {*self.native}
            return
        for target, value in results.items():
            self._set(target, value, [k for k in given if target in rows[k].targets])
        for key in given:
            if key in view.ignored:
                self._note(rows[key], "ignored", view.ignored[key])
            else:
                self._mapped(rows[key], (t for t in rows[key].targets if t in results), view.remarks.get(key, ""))

    def _set(self, target: str, value: Any, keys: Sequence[str]) -> None:
        """Set one of our keys.

        keys: the verl keys that require the value; empty: it is verl's default
        """
        if target in self.native:
            return
        if not keys:
            self.by_default[target] = Setting(target, value, "verl's default", text_of(value))
            return
        origin = "verl key " + ", ".join(f"{k}={self.foreign[k].text}" for k in keys)
        before = self.found.get(target)
        if before is not None and before.value != value:
            self.problems.append(f"{origin} contradicts {before.origin}: both set {target}; leave one out")
        self.found[target] = Setting(target, value, origin, text_of(value))


def render_notes(notes: Sequence[Note]) -> str:
    """Return the text about a translation: mapped keys one by one, ignored keys grouped by reason."""
    lines = [str(n) for n in notes if n.action == "mapped"]
    reasons: dict[str, list[str]] = {}
    for note in notes:
        if note.action == "ignored":
            reasons.setdefault(note.text, []).append(f"{note.key}={note.value}")
    lines += [f"ignored ({reason}): {', '.join(keys)}" for reason, keys in reasons.items()]
    return "\n".join(lines)
