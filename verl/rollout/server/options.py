"""The keys of `verl serve`. No torch and no aiohttp is imported here."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from verl.bounds import NonNegativeInt, Positive, PositiveInt
from verl.errors import Refused


@dataclass(frozen=True)
class ServeConfig:
    """The keys `serve.*` of the configuration."""

    host: str = "127.0.0.1"  # An address other than loopback needs an `api_key`.
    port: NonNegativeInt = 8000  # 0: a free one.
    name: str = "policy"  # The name of the model in requests.
    api_key: str | None = None  # Bearer token of every request but /health; take it from the environment: ${oc.env:KEY}
    control: bool = False
    """The control plane too, for the trainer that owns this server: pause, abort, sleep, new weights. Needs a key."""
    max_context_tokens: PositiveInt | None = None  # Prompt and answer. Null: what the model was made for.
    max_sequences: PositiveInt = 1024  # Answers generated at one time; a request beyond them gets status 429.
    max_body_mb: Positive = 8.0
    request_timeout_s: Positive = 600.0  # An answer that takes longer is given up: 504.


def check_serve(serve: ServeConfig) -> None:
    """Raise an error for a server that is open to strangers, or that has no valid port."""
    if serve.port > 65535:
        raise Refused(f"serve.port={serve.port}: a port is a number up to 65535 (0: a free one)")
    if serve.api_key is not None and len(serve.api_key) < 8:
        raise Refused("serve.api_key is shorter than 8 characters: anybody could guess it; take a longer one")
    if serve.api_key is None and not is_loopback(serve.host):
        raise Refused(
            f"serve.host={serve.host} can be reached from other machines, and nobody is asked for a key: "
            "set serve.api_key='${oc.env:VERL_API_KEY}', or leave serve.host at 127.0.0.1"
        )
    if serve.api_key is None and serve.control:
        raise Refused(
            "serve.control=true: other users and programs of this machine could replace the weights; set "
            "serve.api_key='${oc.env:VERL_API_KEY}', and for its trainer rollout.engine_options.api_key"
        )


def is_loopback(host: str) -> bool:
    """Return true for an address that only programs of this machine can reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"
