"""The schema and the answer of a tool, as verl's tools read and return them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl.errors import Refused


@dataclass
class ToolResponse:
    """The answer of a tool."""

    text: str | None = None
    """Text for the model."""
    image: list[Any] | None = None
    """Images, in front of the text, for a model that reads them; an error for any other."""
    video: list[Any] | None = None
    """Videos, which are an error: no model takes them in a turn."""


@dataclass
class OpenAIFunctionSchema:
    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)  # JSON schema
    strict: bool = False


@dataclass
class OpenAIFunctionToolSchema:
    type: str
    function: OpenAIFunctionSchema

    @classmethod
    def model_validate(cls, found: Mapping[str, Any]) -> OpenAIFunctionToolSchema:
        """Return the schema of {type: function, function: {name, description, parameters}}. Raise ValueError for
        anything else."""
        inner = found.get("function")
        if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
            raise Refused(f"a tool's schema is {{type: function, function: {{name, parameters}}}}, got {found}")
        known = {key: inner[key] for key in ("name", "description", "parameters", "strict") if key in inner}
        return cls(str(found.get("type", "function")), OpenAIFunctionSchema(**known))

    def model_dump(self, **_: Any) -> dict[str, Any]:
        """Return the schema as a dict for chat templates. The arguments of pydantic's method are accepted and
        ignored."""
        f = self.function
        return {
            "type": self.type,
            "function": {"name": f.name, "description": f.description, "parameters": f.parameters},
        }
