"""Worker groups of Ray actors, in processes of this or other machines."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from verl.workers.answers import RankAnswer
from verl.workers.group import Died
from verl.workers.process_group import ProcessGroup
from verl.workers.rank_host import RankHost
from verl.workers.ray.life import ActorLife, Where, this_process

Live = Callable[..., ActorLife]


class RankActor(RankHost):
    """The actor of one rank."""

    def __init__(self, env: Mapping[str, str]) -> None:
        os.environ.update(env)
        super().__init__()

    def serve(self) -> str:
        """Start the store of the ranks on this node, and return its address."""
        import ray

        return self.serve_at(ray.util.get_node_ip_address())

    def where(self) -> Where:
        return this_process()

    def watch(self) -> None:
        """Never return: a failure of this call means that the process has died."""
        threading.Event().wait()


class RayRank:
    """The `RankProcess` of an actor."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def call(self, number: int, payload: bytes) -> Future[RankAnswer]:
        return self.actor.call.options(concurrency_group="calls").remote(number, payload).future()

    def call_at_once(self, payload: bytes) -> Future[RankAnswer]:
        return self.actor.call_at_once.options(concurrency_group="beside").remote(payload).future()

    def kill(self) -> None:
        import ray

        ray.kill(self.actor, no_restart=True)


class RayGroup(ProcessGroup):
    """A `WorkerGroup` of Ray actors."""

    def __init__(self, name: str, actors: Sequence[Any], built: Sequence[Any], live: Live, on_death: Died) -> None:
        """Create the group.

        built: for each actor, the answer of `RankActor.build`
        live: starts to watch an actor
        """
        self._lives: list[ActorLife] = []
        super().__init__(name, len(actors), on_death)
        for actor in actors:
            self.add(RayRank(actor))
        for rank, (actor, made) in enumerate(zip(actors, built, strict=True)):
            watching = actor.watch.options(concurrency_group="watch").remote()
            self._lives.append(live(f"rank {rank} of {name}", actor, watching, made, died=self.died))
            made.future().add_done_callback(partial(self.built, rank))

    def is_death(self, error: BaseException) -> bool:
        import ray

        return isinstance(error, ray.exceptions.RayActorError)

    def _kill(self) -> None:
        for life in self._lives:
            life.over = True
        super()._kill()
