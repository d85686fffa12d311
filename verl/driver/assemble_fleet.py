"""Build rollout engines: at the start of a run, and those that join while it runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from verl.checkpoint.loadable import exact_config
from verl.config.backends import ROLLOUT, import_object, options_of, traits_of
from verl.config.devices import rollout_dtype
from verl.config.lora_layers import served_factors
from verl.config.noise import noise_of
from verl.config.schema import Config
from verl.config.served import rollout_faults, urls_of
from verl.driver.banned import policy_banned
from verl.driver.driver_host import server_place
from verl.driver.fleet import Fleet
from verl.driver.models import ModelContext
from verl.driver.publisher import Publisher
from verl.driver.reporter import Reporter
from verl.driver.rollouts import RolloutManager
from verl.driver.setup import decoder, max_context_tokens, stop_ids, torch_dtype
from verl.errors import Refused
from verl.models.families import family_of
from verl.models.pictures import Pictures, shared_pictures
from verl.rollout.base import Peers, RolloutContext, RolloutEngine
from verl.rollout.router import Router
from verl.rollout.supervisor import Start
from verl.transfer_queue.base import MediaStore
from verl.wire import FP8


def fleet_of(
    config: Config,
    tokenizer: Any,
    context: ModelContext,
    rollout: RolloutEngine,
    publisher: Publisher,
    groups: RolloutManager,
    reporter: Reporter,
    run_dir: Path,
) -> Fleet:
    def start_of(url: str, number: int) -> Start:
        """Return the function that connects to the server at `url`, or starts the server `number`. The checks are those
        at the start of a run; raise ValueError with the reason of a refusal."""
        wanted = replace(config, rollout=replace(config.rollout, url=url, replicas=1)) if url else config
        for fault in rollout_faults(wanted, "train"):
            raise Refused(fault)
        if not traits_of(config.rollout.engine).server:
            raise Refused(f"rollout.engine={config.rollout.engine}: its replicas are in this process; none joins")
        if config.cluster.backend != "inproc":
            what = url or "another server"
            raise Refused(f"{what}: servers join a run whose engines are in its own process (cluster.backend=inproc)")
        which = 0 if url else number
        given = (wanted, tokenizer, context.devices["rollout"], which, context.peers, context.queue.media)
        return partial(context.cluster.replica, which, rollout_engine, given)

    def record(kind: str, data: Mapping[str, Any]) -> None:
        reporter.events.append(kind, groups.scheduler.next_step + 1, data)

    members = rollout if isinstance(rollout, Router) else None
    return Fleet(run_dir, members, urls_of(config), publisher, start_of, record)


def rollout_engine(
    config: Config,
    tokenizer: Any,
    device: str,
    replica: int = 0,
    peers: Peers | None = None,
    media: MediaStore | None = None,
    pictures: Pictures | None = None,
) -> RolloutEngine:
    """Build a rollout engine from the config.json of the model folder, since the trainer changes the attention in its
    own copy. replica: the number of the server. media: the content of the images of prompts. pictures: what reads it;
    None: it is made here."""
    r = config.rollout
    hf_config = exact_config(config.model.path, trust_remote_code=config.model.trust_remote_code)
    if pictures is None and media is not None and family_of(hf_config) is not None:
        pictures = shared_pictures(Path(config.model.path).expanduser(), media)
    context = RolloutContext(
        hf_config=hf_config,
        max_context_tokens=max_context_tokens(config, hf_config),
        dtype=torch_dtype(config.model.dtype if r.dtype == "auto" else rollout_dtype(config)),
        fp8=r.dtype == FP8,
        eos_token_ids=stop_ids(config, tokenizer),
        decode=decoder(tokenizer),
        device=device,
        max_concurrent_sequences=r.max_concurrent_sequences,
        deterministic=config.run.deterministic,
        float32_head=config.model.head_dtype == "float32",
        lora_rank=factors.rank if (factors := served_factors(config)) else 0,
        lora_versions=math.ceil(config.pipeline.staleness) + 2 if factors else 0,
        place=server_place(config, replica, peers or Peers()),
        pictures=pictures,
        banned=policy_banned(config, tokenizer),
        noise=noise_of(config),
    )
    return import_object(ROLLOUT[r.engine].build)(options_of(config, "rollout"), context)
