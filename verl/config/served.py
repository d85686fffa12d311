"""Find faults of a rollout engine that is a server: its placement and its abilities, before it starts."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from verl.config.backends import ROLLOUT, SYNC, faults_of, traits_of
from verl.config.devices import streams_buckets
from verl.config.model_files import describe_model, find_model_folder, read_weight_headers
from verl.config.schema import Config
from verl.wire import FP8, split_block

if TYPE_CHECKING:
    from verl.rollout.base import Traits

FROM = {"shm": "the memory of one machine", "disk": "a folder"}
HERE = ("localhost", "127.0.0.1", "::1")


def urls_of(config: Config) -> tuple[str, ...]:
    """Return the URL of each replica; an empty tuple if the run starts the servers."""
    return tuple(filter(None, (url.strip().rstrip("/") for url in (config.rollout.url or "").split(","))))


def reachable(engine: str, python: object, url: object) -> bool:
    """Return True if an engine can be used: in this process, or as a server with a URL or an installed package."""
    if engine not in ROLLOUT or not (traits := traits_of(engine)).server:
        return engine in ROLLOUT
    found = importlib.util.find_spec(traits.package) if traits.package else None
    return bool(python or url or (found is not None and found.origin))  # a folder of that name has no origin


def rollout_faults(config: Config, command: str) -> Iterator[str]:
    """Yield a line for each fault of the rollout engine."""
    yield from faults_of(config, "rollout", {}, {})
    r, urls = config.rollout, urls_of(config)
    traits, engine = traits_of(r.engine), f"rollout.engine={r.engine}"
    if config.model.head_dtype == "float32" and (r.url is not None or not traits.float32_head):
        why = "a server that runs is not started here" if traits.float32_head else "it multiplies the head as the rest"
        yield f"model.head_dtype=float32 with {engine}: {why}; set rollout.engine=native, or leave it out"
    if r.dtype == FP8 and not traits.fp8:
        able = " or ".join(name for name in ROLLOUT if traits_of(name).fp8)
        yield f"rollout.dtype=fp8 with {engine}, which gets no weights in 8 bits: set rollout.engine={able}"
    elif r.dtype == FP8 and r.url is not None:
        why = "a server that runs was not started with a model of such weights"
        yield f"rollout.dtype=fp8 with rollout.url={r.url}: {why}; set rollout.python, so that it is started here"
    elif r.dtype == FP8 and traits.server and (why := _split_block(config)):
        yield f"rollout.dtype=fp8 with {engine}: {why}; set rollout.engine=native, or rollout.dtype=bfloat16"
    if not traits.server:
        servers = " or ".join(name for name in ROLLOUT if traits_of(name).server)
        for key, value in (("python", r.python), ("url", r.url)):
            if value is not None:
                yield f"rollout.{key}={value} with {engine}, which runs in this process: set rollout.engine={servers}"
        return
    if r.url is not None:
        if r.python is not None:
            yield f"rollout.url={r.url} and rollout.python={r.python}: a server that runs is not started; leave one out"
        in_folder = traits.weights_from == "disk" and config.sync.engine_options.get("folder") is not None
        shared = traits.own_weights or in_folder
        yield from _urls(urls, r.url, r.replicas, traits.weights_from, shared)
    elif not traits.package:
        yield f"{engine} is one that runs already: set rollout.url=http://127.0.0.1:PORT"
    elif r.python is not None and not (os.path.isfile(r.python) or shutil.which(r.python)):
        yield f"rollout.python={r.python}: no such file; name the bin/python of the environment with {traits.package}"
    elif not reachable(r.engine, r.python, r.url):
        where = "rollout.python=ENVIRONMENT/bin/python (docs/engines.md says how to make one), or rollout.url"
        yield f"{engine}: {traits.package} is not installed beside verl; set {where}"
    store = "://" in str(config.sync.engine_options.get("folder"))  # hosts fetch from it, as they do over tcp
    reaches = traits.weights_from == "shm" and (
        SYNC[config.sync.engine].each_host or store or config.sync.engine == "ipc"
    )
    if store and traits.weights_from == "disk" and not traits.own_weights:
        why = "it reads weights from a folder of its machine, and none from a URL"
        yield f"sync.engine_options.folder={config.sync.engine_options['folder']} with {engine}: {why}; name a folder"
    elif not (config.sync.engine in ("local", traits.weights_from) or reaches):
        why = f"it reads weights from {FROM[traits.weights_from]}"
        fix = f"set sync.engine={traits.weights_from}, or leave it out"
        yield f"sync.engine={config.sync.engine} with {engine}: {why}; {fix}"
    yield from _own_weights(config, traits, engine, command)
    yield from _draws(config, traits, engine, command)
    if config.run.deterministic:
        why = "what a server gives a sequence may depend on what else is in its batch"
        yield f"run.deterministic=true with {engine}: {why}; set rollout.engine=native, or leave it out"


def _trained() -> str:
    """Return, as text, the names of the engines that can take a trainer's weights."""
    *names, last = (name for name in ROLLOUT if not traits_of(name).own_weights)
    return f"{', '.join(names)} or {last}"


def _own_weights(config: Config, traits: Traits, engine: str, command: str) -> Iterator[str]:
    """Yield the faults of servers that cannot take weights while they run, or that cannot score prompts."""
    r, canary = config.rollout, config.sync.canary
    if traits.own_weights and command == "train":
        fix = f"use it with verl eval or verl generate, and train with {_trained()}"
        yield f"{engine}: its weights are its own, and cannot be trained; {fix}"
    elif traits.own_weights and streams_buckets(config):
        what = "sync.engine=ipc" if config.sync.engine == "ipc" else "sync.engine_options.bucket_mb"
        yield f"{what} with {engine}: its weights are its own, and pass nowhere; leave it out"
    elif traits.own_weights and not canary:
        yield f"sync.canary=false with {engine}: nothing else shows that it serves model.path; leave it out"
    if traits.package and not traits.updates_weights and r.url is not None:
        yield f"rollout.url={r.url} with {engine}: it takes no weights while it runs; set rollout.python, to start it"
    if traits.score_temperatures == () and canary:
        why = "it scores no prompts, which is how served weights are verified"
        yield f"sync.canary=true with {engine}: {why}; set sync.canary=false"


def _draws(config: Config, traits: Traits, engine: str, command: str) -> Iterator[str]:
    """Yield a fault for sampling parameters with which the server returns no log-probs, so that every answer would
    fail."""
    r, e, run = config.rollout, config.eval, config.run
    wanted = {} if command == "eval" else {"rollout": (r.temperature, r.top_p, r.top_k, r.min_p)}
    during = run.eval_before or run.eval_after or run.eval_every_steps > 0
    if config.data.eval_files and (command == "eval" or (command == "train" and during)):
        wanted["eval"] = (e.temperature, e.top_p, e.top_k, 0.0)
        if e.also_sampled:
            wanted.setdefault("rollout", (r.temperature, 1.0, 0, 0.0))
    for of, (temperature, top_p, top_k, min_p) in wanted.items():
        cut = temperature > 0 and (top_p < 1 or top_k > 0 or min_p > 0)
        prefix = f"{of}.temperature={temperature:g} top_p={top_p:g} top_k={top_k} min_p={min_p:g} with {engine}"
        if traits.raw_logprobs_only and (temperature not in (0.0, 1.0) or cut):
            greedy = ", or temperature 0" if of == "eval" else ""
            yield f"{prefix}: its log-probs are those at temperature 1 of all tokens; set 1, 1, 0 and 0{greedy}"
        elif (most := traits.max_candidates) and cut and not 0 < (top_k or _vocab(config)) <= most:
            why = f"it tells the log-probs of truncated draws for top_k from 1 to {most} alone"
            yield f"{prefix}: {why}; set {of}.top_k={min(most, 1024)}, or leave top_p, top_k and min_p out"


def _split_block(config: Config) -> str:
    """Return why servers cannot read the model in blocks of 8 bits, or "", also if the folder cannot be read."""
    try:
        tensors = read_weight_headers(find_model_folder(config.model.path))
    except ValueError:
        return ""
    return next(filter(None, (split_block(name, tensor.shape) for name, tensor in tensors.items())), "")


def _vocab(config: Config) -> int:
    """Return the size of the model's vocabulary; 1 if the folder cannot be read, which another line reports."""
    try:
        return describe_model(config.model.path).vocab
    except ValueError:
        return 1


def _urls(urls: tuple[str, ...], given: str, replicas: int, sync: str, shared: bool) -> Iterator[str]:
    """Yield the faults of given URLs.

    shared: True if weights reach a server on any machine
    """
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            yield f"rollout.url={url}: expected http://HOST:PORT"
        elif not shared and parts.hostname not in HERE and parts.hostname != os.uname().nodename:
            fix = "name a server of this machine (http://127.0.0.1:PORT)"
            fix += ", or a shared folder (sync.engine=disk sync.engine_options.folder=)" if sync == "disk" else ""
            yield f"rollout.url={url}: weights go through {FROM[sync]} (sync.engine={sync}); {fix}"
    if len(urls) != replicas or len(set(urls)) != len(urls):
        yield f"rollout.url={given} names {len(set(urls))} servers: set rollout.replicas={len(set(urls))}, each once"
