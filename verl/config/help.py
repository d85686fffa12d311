"""Documentation of the keys, read from where they are declared: `verl VERB --help`, `verl show config KEY`,
completion."""

from __future__ import annotations

import ast
import functools
import inspect
import io
import textwrap
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from importlib import resources
from types import MappingProxyType
from typing import Any

from verl.algorithms.presets import setting_texts
from verl.config.moved import moved_line
from verl.config.tree import leaves, sections, text_of
from verl.errors import Refused
from verl.names import did_you_mean

_LOOP = ("run", "model", "data", "rollout", "sync")
_SUPERVISED = ("run", "model", "data", "step", "optim", "health", "track")
_RL = tuple(name for name in sections() if name not in ("preference", "serve"))
SECTIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "train": _RL,
        "plan": _RL,
        "sft": _SUPERVISED,
        "rm": (*_SUPERVISED, "preference"),
        "dpo": (*_SUPERVISED, "preference"),
        "eval": (*_LOOP, "reward", "eval", "track"),
        "generate": _LOOP,
        "serve": ("serve", "run", "model", "rollout"),
    }
)
"""The sections that each verb reads."""
_WIDTH, _INDENT = 118, 44


@functools.cache
def key_texts() -> Mapping[str, str]:
    """Return the documentation of each key: the comment on the line of its declaration, and the docstring below."""
    found = {f"{section}.{name}": text for section, cls in sections().items() for name, text in _field_texts(cls)}
    return MappingProxyType(found | of_algorithms())


def of_algorithms() -> dict[str, str]:
    return {f"algorithm.{key}": text for key, text in setting_texts().items()}


def _field_texts(cls: type) -> Iterator[tuple[str, str]]:
    source = textwrap.dedent(inspect.getsource(cls))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}
    body = ast.parse(source).body[0].body  # type: ignore[attr-defined]
    for statement, below in zip(body, [*body[1:], None]):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            texts = [comments.get(statement.end_lineno or 0, "")]
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                texts.append(str(below.value.value))
            yield statement.target.id, " ".join(" ".join(texts).split())


def render_keys(
    keys: Iterable[str], values: Mapping[str, Any] | None = None, origins: Mapping[str, str] | None = None
) -> str:
    """Return the text of the keys: for each its value (or default), type, meaning, and the origin of a value that is
    not the default. A blank line separates sections."""
    lines: list[str] = []
    for key in keys:
        leaf, text, origin = leaves()[key], key_texts().get(key, ""), (origins or {}).get(key, "default")
        value = leaf.default if values is None else values[key]
        head, below = f"  {key}={'' if value == '???' else text_of(value)}", " " * _INDENT
        kind = "" if key in of_algorithms() else f"({' | '.join(leaf.words) or leaf.type_name})"
        text = " ".join(part for part in (kind, text, f"[{origin}]" if origin != "default" else "") if part)
        first = f"{head:<{_INDENT - 1}} " if len(head) < _INDENT else f"{head}\n{below}"
        wrapped = textwrap.wrap(text, _WIDTH - _INDENT, break_long_words=False, break_on_hyphens=False)
        if lines and not lines[-1].startswith(f"  {key.partition('.')[0]}."):
            lines.append("")
        lines.append(first + f"\n{below}".join(wrapped))
    return "\n".join(line.rstrip() for line in lines)


def keys_of_verb(verb: str) -> list[str]:
    """Return the keys that a verb reads, in the order of the tree; [] for a verb that takes none."""
    return [key for key in leaves() if key.partition(".")[0] in SECTIONS.get(verb, ())]


def named_keys(words: Iterable[str]) -> list[str]:
    """Return the keys of the named sections (`optim`) and the named single keys (`optim.lr`)."""
    found: list[str] = []
    for word in words:
        of_word = [key for key in leaves() if key == word or key.startswith(f"{word}.")]
        if not of_word:
            if (moved := moved_line(word)) is not None:
                raise Refused(f"{word} is no key: {moved}")
            near = did_you_mean(word, [*sections(), *leaves()])
            raise Refused(f"{word} is no section and no key; {near}Sections: {', '.join(sections())}")
        found += of_word
    return found


def completion_script(shell: str, verbs: Iterable[str]) -> str:
    """Return the shell script that completes verbs and keys."""
    if shell not in ("bash", "zsh", "fish"):
        raise Refused("verl completion bash|zsh|fish, as in: source <(verl completion bash)")
    script = resources.files("verl").joinpath(f"config/completion/verl.{shell}").read_text(encoding="utf-8")
    keys = " ".join(f"{key}=" for key in ("recipe", *leaves()))
    return script.replace("@VERBS@", " ".join(verbs)).replace("@KEYS@", keys)
