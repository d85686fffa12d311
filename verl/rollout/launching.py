"""The parts that all servers started here share: the check of their installation, their flags, their environment."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from verl.errors import Refused
from verl.processes.child import output_of
from verl.processes.environment import foreign_variables
from verl.rollout.base import ServerPlace
from verl.rollout.process import ServerProcess, free_port
from verl.rollout.wire import version_of

ASK_S = 120.0  # for reading the version of an environment, on a cold disk
Release = tuple[int, ...]
Launch = Callable[[str | None], tuple[ServerProcess, str]]
"""Starts the server with the model of a folder (None: its configured model) and returns its process and its URL."""


@cache  # a restart must not check again: the event loop would block
def require(python: str, package: str, name: str, versions: tuple[Release, Release], install: str) -> None:
    """Raise ValueError unless this interpreter has the server's package, from the first of `versions` to below the
    second. `name` and `install`, the way to install it, are parts of the message."""
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    try:
        status, output = output_of([python, "-c", code], timeout_s=ASK_S)
    except OSError as e:
        raise Refused(f"rollout.python={python}: cannot be started ({e}); name the bin/python of an environment") from e
    last, (at_least, below) = (output.splitlines() or ["no output"])[-1], versions
    if status != 0:
        raise Refused(f"rollout.python={python}: no {name} there ({last}): {install}, and name its bin/python")
    if not at_least <= version_of(last) < below:
        wanted = f">={'.'.join(map(str, at_least))},<{'.'.join(map(str, below))}"
        raise Refused(f"rollout.python={python}: {name} {last} is there, this adapter was made for {wanted}: {install}")


def flags(ours: Mapping[str, Any], more: Mapping[str, Any] | None, dash: str = "-") -> list[str]:
    """Return the words of a command line: {max-logprobs: 5} becomes --max-logprobs 5, true a flag without a value,
    false nothing, and a tuple a flag with several values. `more` are the user's flags; one that is also in `ours` is
    refused. `dash` joins the words of a flag."""
    given = dict(ours)
    for name, value in (more or {}).items():
        if (key := name.lstrip("-").replace("_", dash).replace("-", dash)) in given:
            raise Refused(f"rollout.engine_options.args.{name}={value}: verl sets --{key} itself; leave it out")
        given[key] = value
    found = list[str]()
    for name, value in given.items():
        values = () if isinstance(value, bool) else value if isinstance(value, tuple) else (value,)
        found += [] if value is False else [f"--{name}", *map(_text, values)]
    return found


def launcher(place: ServerPlace, command: Callable[[str, int], list[str]]) -> Launch:
    """Return the function that starts a server with `command(model folder, port)`."""

    def launch(folder: str | None) -> tuple[ServerProcess, str]:
        port = free_port()
        line, env = command(folder or place.model, port), environment_of(os.environ)
        return ServerProcess(line, env=env, log=place.log), f"http://127.0.0.1:{port}"

    return launch


def environment_of(ours: Mapping[str, str]) -> dict[str, str]:
    """Return our environment without the variables of our Python. Model hubs are switched off."""
    return foreign_variables(ours) | {"HF_HUB_OFFLINE": "1"}


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | list) else str(value)
