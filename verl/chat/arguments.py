"""Check the arguments of a tool call by the JSON schema of the tool."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_KINDS: Mapping[str, tuple[type, ...]] = MappingProxyType(
    {
        "string": (str,),
        "integer": (int,),
        "number": (int, float),
        "boolean": (bool,),
        "array": (list,),
        "object": (dict,),
        "null": (type(None),),
    }
)


def wrong_arguments(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
    """Return a text for the model with the faults of a call's arguments by the tool's JSON schema; "" without a
    fault."""
    properties = schema.get("properties") or {}
    if missing := [name for name in schema.get("required") or () if name not in arguments]:
        return f"missing: {', '.join(missing)}"
    others = schema.get("additionalProperties")
    unknown = sorted(arguments.keys() - properties.keys())
    if others is not True and not isinstance(others, Mapping) and unknown:
        return f"unknown: {', '.join(unknown)[:200]}; it takes {', '.join(properties) or 'no arguments'}"
    wrong = (_wrong(name, properties.get(name, others), value) for name, value in arguments.items())
    return next(filter(None, wrong), "")


def as_declared(schema: Any, value: Any) -> Any:
    """Return the arguments with whole floats converted to integers where the schema requires an integer: 5.0 is an
    integer in JSON."""
    if not isinstance(schema, Mapping):
        return value
    options = [schema, *(option for key in ("anyOf", "oneOf") for option in schema.get(key) or ())]
    kinds = {kind for option in options if isinstance(option, Mapping) for kind in _kinds(option)}
    if isinstance(value, float) and value.is_integer() and "integer" in kinds and "number" not in kinds:
        return int(value)
    if isinstance(value, list):
        return [as_declared(schema.get("items"), v) for v in value]
    if isinstance(value, Mapping):
        properties, others = schema.get("properties") or {}, schema.get("additionalProperties")
        return {name: as_declared(properties.get(name, others), v) for name, v in value.items()}
    return value


def _kinds(schema: Mapping[str, Any]) -> list[str]:
    declared = schema.get("type")
    return [k for k in ([declared] if isinstance(declared, str) else declared or ()) if k in _KINDS]


def _is_a(kind: str, value: Any) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _KINDS[kind]) or (kind == "integer" and isinstance(value, float) and value.is_integer())


def _wrong(name: str, schema: Any, value: Any) -> str:
    if not isinstance(schema, Mapping):
        return ""
    options = [option for key in ("anyOf", "oneOf") for option in schema.get(key) or ()]
    if options:
        wrong = [_wrong(name, option, value) for option in options]
        return "" if not all(wrong) else wrong[0]
    if value is None and schema.get("nullable"):
        return ""
    kinds = _kinds(schema)
    if kinds and not any(_is_a(kind, value) for kind in kinds):
        return f"{name} must be {' or '.join(kinds)}, not {type(value).__name__}"
    if schema.get("enum") and not any(
        value == one and isinstance(value, bool) == isinstance(one, bool) for one in schema["enum"]
    ):
        return f"{name} must be one of {', '.join(map(str, schema['enum']))}"
    if isinstance(value, list):
        return next(filter(None, (_wrong(f"{name}[{i}]", schema.get("items"), v) for i, v in enumerate(value))), "")
    if isinstance(value, dict) and schema.get("properties"):
        return (why := wrong_arguments(schema, value)) and f"{name}: {why}"
    return ""
