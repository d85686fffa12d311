"""Build the replicas that join a run while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from verl.config.backends import ROLLOUT
from verl.config.schema import Config
from verl.config.served import server_faults, urls_of
from verl.driver.fleet import Fleet
from verl.driver.models import ModelContext
from verl.driver.publisher import Publisher
from verl.driver.reporter import Reporter
from verl.driver.rollouts import RolloutManager
from verl.errors import Refused
from verl.rollout.base import RolloutEngine
from verl.rollout.replica import Start
from verl.rollout.router import Router


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
    from verl.driver.assemble import rollout_engine

    def start_of(url: str, number: int) -> Start:
        """Return the function that connects to the server at `url`, or starts the server `number`. The same checks as
        at the start of a run apply, and a ValueError has the reason of a refusal."""
        asked = replace(config, rollout=replace(config.rollout, url=url, replicas=1)) if url else config
        for fault in server_faults(asked, "train"):
            raise Refused(fault)
        if not ROLLOUT[config.rollout.engine].apart:
            raise Refused(f"rollout.engine={config.rollout.engine}: its replicas are in this process; none joins")
        if config.cluster.backend != "inproc":
            what = url or "another server"
            raise Refused(f"{what}: servers join a run whose engines are in its own process (cluster.backend=inproc)")
        which = 0 if url else number
        given = (asked, tokenizer, context.devices["rollout"], which, context.peers)
        return partial(context.cluster.replica, which, rollout_engine, given)

    def tell(kind: str, data: Mapping[str, Any]) -> None:
        reporter.events.append(kind, groups.scheduler.next_step + 1, data)

    members = rollout if isinstance(rollout, Router) else None
    return Fleet(run_dir, members, urls_of(config), publisher, start_of, tell)
