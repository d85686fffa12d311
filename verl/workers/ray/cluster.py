"""A Ray cluster: it places the pools, starts workers and replicas in them, and reports their deaths."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psutil

from verl.config.backends import address_of
from verl.errors import Refused
from verl.model_engine.layout import Layout
from verl.processes.child import Child
from verl.rollout.base import RolloutEngine
from verl.workers.group import Build, ClusterContext, DevicePlace, Died
from verl.workers.pools import NO_MODEL, Pool, Shortage, fit_together, pools_of, seen
from verl.workers.process_group import pickled
from verl.workers.ray.group import RankActor, RayGroup
from verl.workers.ray.interpreter import runtime_env
from verl.workers.ray.life import ActorLife
from verl.workers.ray.replica import RayReplica, ReplicaActor
from verl.workers.sections import ClusterConfig

OWN_RAY = {  # settings of a cluster that is started here: a dead node is noticed after a second, not a minute
    "worker_niceness": 0,  # the workers do the main work of the machine
    "prestart_worker_first_driver": False,  # every actor has its own process, so prestarted processes would stay unused
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}
BESIDE_CPUS = 4  # CPUs for processes that belong to no pool, such as those of a queue
LOOK_S = 1.0  # the pause between two checks of every process
ANSWER_S = 10.0  # the time to get the address of a Ray
END_S = 10.0  # the time for the processes of Ray to end
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""The first bytes of a gRPC client (RFC 9113: the preface and empty settings). A gRPC server answers with its own
settings, a frame of type 4."""


@dataclass(eq=False)
class RayCluster:
    """A `Cluster` of Ray actors."""

    own_processes = True
    drivers = None

    pools: Mapping[str, Pool]
    roles: Mapping[str, str]
    layout: Layout  # The layout of the ranks of a model.
    set_up: Callable[[DevicePlace], None]  # Called in every worker before it is built.
    address: str | None = None
    devices: Mapping[str, str] = field(
        default_factory=dict
    )  # The devices of the models of roles that are not on the CPU.
    start_timeout_s: float = 60.0
    replicas: int = 1
    wait_timeout_s: float = 600.0
    """The deadline of a rank for other ranks. A process that answers nothing for half of it counts as dead."""
    say: Callable[[str], None] = print  # Prints a message about missing nodes.
    python: str | None = None  # The interpreter of the workers of models; None: that of Ray's nodes.

    def __post_init__(self) -> None:
        import ray

        self._deaths: list[BaseException] = []
        self._on_failure: Callable[[BaseException], None] = lambda error: None
        self._started = not ray.is_initialized()
        self._guard = _connect(self.address, self.pools) if self._started else None
        self._placed: dict[str, list[Any]] = {}
        self._lives: list[ActorLife] = []
        self._closed = threading.Event()
        try:
            until_s = time.monotonic() + self.start_timeout_s
            if self.address is None:
                _await_nodes(self.pools, 0.0, self.say)
            else:
                self.say(seen(self.pools, _await_nodes(self.pools, until_s, self.say)))
            for name, pool in self.pools.items():
                self._placed[name] = _place(name, pool, until_s, self.start_timeout_s)
        except BaseException:
            self.close()
            raise
        threading.Thread(target=self._look, name="verl-look", daemon=True).start()

    def watch(self, on_failure: Callable[[BaseException], None]) -> None:
        """Call `on_failure`, in any thread, for every death from now on and for those before."""
        self._on_failure = on_failure
        for death in self._deaths:
            on_failure(death)

    def start(
        self, name: str, build: Build, args: tuple[Any, ...], *, world_size: int = 1, died: Died | None = None
    ) -> RayGroup:
        layout = self.layout if world_size == self.layout.world_size else Layout(world_size=world_size)
        made = pickled(build, (self.set_up, args))
        kind: dict[str, Any] = {"concurrency_groups": {"calls": 1, "beside": 1, "watch": 1}}
        live = self._live
        if (another := self._another_python(name)) is not None:
            kind["runtime_env"] = runtime_env(another)
            live = partial(self._live, start_timeout_s=self.start_timeout_s)  # Ray tries a missing one again and again
        actors = [self._actor(RankActor, name, rank, kind) for rank in range(world_size)]
        address = actors[0].serve.remote() if world_size > 1 else ""
        built = [
            a.build.options(concurrency_group="calls").remote(
                address, i, layout, self._place_of(name, i), self.wait_timeout_s, made
            )
            for i, a in enumerate(actors)
        ]
        return RayGroup(name, actors, built, live, died or self._died)

    def place(self, name: str) -> str:
        return self.roles.get(name, next(iter(self.pools)))

    def replica(
        self, number: int, build: Callable[..., RolloutEngine], args: tuple[Any, ...], died: Died | None = None
    ) -> RolloutEngine:
        actor = self._actor(ReplicaActor, "rollout", number, {"max_concurrency": 100_000})
        built = actor.build.remote(self._place_of("rollout", number), pickled(build, (self.set_up, args)))
        return RayReplica(f"rollout replica {number}", actor, built, self._live, died or self._died)

    def _died(self, error: BaseException) -> None:
        self._deaths.append(error)
        self._on_failure(error)

    def _live(self, *given: Any, died: Callable[[str], None], start_timeout_s: float | None = None) -> ActorLife:
        life = ActorLife(*given, died=died, started=self._process, start_timeout_s=start_timeout_s)
        self._lives.append(life)
        return life

    def _process(self, process: int) -> None:
        """Add a process to those that are killed when the driver ends, since a stopped process would not notice that
        end."""
        if self._guard is not None:
            self._guard.also_end([process])

    def _look(self) -> None:
        # shorter than the deadline of a call, because the error of a call could not name the process
        silent_s = self.wait_timeout_s / 2
        while not self._closed.wait(min(silent_s / 8, LOOK_S)):
            for life in list(self._lives):
                life.look(silent_s)

    def close(self) -> None:
        import ray

        self._closed.set()
        for placed in itertools.chain(*self._placed.values()):
            with contextlib.suppress(Exception):  # the cluster may have ended already
                ray.util.remove_placement_group(placed)
        self._placed.clear()
        if self._started:
            ray.shutdown()
        if self._guard is not None:
            self._guard.stop(END_S)

    def _another_python(self, role: str) -> str | None:
        return None if role in NO_MODEL else self.python

    def _place_of(self, role: str, rank: int) -> DevicePlace:
        pool = self.pools[self.place(role)]
        number = int(rank % pool.ranks_per_node * pool.resource_per_rank)
        device, another = self.devices.get(role, "cpu"), self._another_python(role) is not None
        return DevicePlace(device, number, pool.ranks_per_node, another_python=another)

    def _actor(self, cls: type[Any], role: str, rank: int, kind: Mapping[str, Any]) -> Any:
        """Start an actor of `role` in bundle `rank` of its pool and return it. The roles of a pool share its devices.
        Neighbouring ranks are on one node."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        name = self.place(role)
        pool, here = self.pools[name], [of for of, at in self.roles.items() if at == name]
        most = -(-self.replicas // pool.ranks)  # replicas in one bundle
        sharing = max(1, sum(most if of == "rollout" else 1 for of in here))
        node, place = divmod(rank % pool.ranks, pool.ranks_per_node)
        made: Any = ray.remote(**kind)(cls)
        return made.options(
            num_cpus=pool.cpus_per_rank / sharing,
            num_gpus=pool.gpus_per_rank / sharing,
            resources={pool.resource: pool.resource_per_rank / sharing} if pool.resource else None,
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self._placed[name][node], placement_group_bundle_index=place
            ),
        ).remote({name: str(value) for name, value in pool.env.items()})


def build(section: ClusterConfig, context: ClusterContext) -> RayCluster:
    pools, roles = pools_of(section, context.roles, device=context.device)
    return RayCluster(
        pools,
        roles,
        layout=context.layout,
        set_up=context.set_up,
        address=address_of(section.address),
        devices={role: pools[at].computes_on for role, at in roles.items() if role not in ("compute", "recorder")},
        start_timeout_s=section.start_timeout_s,
        replicas=context.replicas,
        wait_timeout_s=context.wait_timeout_s,
        say=context.say,
        python=context.python,
    )


def _connect(address: str | None, pools: Mapping[str, Pool]) -> Child | None:
    """Start a cluster on this machine, or connect to the one at `address`. Return the process that ends a started
    cluster when this process ends. Raise Refused if the cluster cannot be reached or has another version of Ray."""
    import ray

    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is not None:
        try:
            host, _, port = address.rpartition(":")
            if port.isdigit():  # Ray itself would try for minutes
                _hello(host, int(port))
            ray.init(address=address, **quiet)
        except (OSError, RuntimeError) as e:
            raise Refused(
                f"cluster.address={address}: {' '.join(str(e).split())}; is `ray start --head` running there, with Ray "
                f"{ray.__version__} and the RAY_AUTH_MODE that is set here?"
            ) from e
        return None
    wanted = sum(pool.ranks * pool.cpus_per_rank for pool in pools.values())  # the processes here share the cores
    guard, cpus = Child(()), max(os.cpu_count() or 1, int(wanted) + BESIDE_CPUS)
    others = set(psutil.Process().children(recursive=True))
    try:
        with _in_sessions_of_their_own():
            ray.init(address="local", num_cpus=cpus, include_dashboard=False, _system_config=OWN_RAY, **quiet)
    finally:
        guard.also_end([child.pid for child in psutil.Process().children(recursive=True) if child not in others])
    return guard


@contextlib.contextmanager
def _in_sessions_of_their_own() -> Iterator[None]:
    """Start the processes of Ray in sessions of their own while this context is open. A signal to the process group of
    this process, as `timeout`, Slurm and a terminal send it, then does not reach them: the run needs Ray until it has
    saved. Ray has no setting for it."""
    from ray._private import services

    before = services.ConsolePopen
    services.ConsolePopen = partial(before, start_new_session=True)  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        services.ConsolePopen = before  # type: ignore[misc]


def _hello(host: str, port: int) -> None:
    """Raise OSError if no server answers, or a server that is not Ray."""
    with socket.create_connection((host, port), timeout=ANSWER_S) as connection:
        if os.environ.get("RAY_USE_TLS", "0") == "0":
            connection.sendall(HELLO)
            if connection.recv(4)[3:] != b"\4":
                raise OSError("what listens there is no Ray")


def _await_nodes(
    pools: Mapping[str, Pool], until_s: float, say: Callable[[str], None]
) -> dict[str, Mapping[str, float]]:
    """Wait until the nodes have room for all pools together, and return the resources of each node. Raise Shortage with
    the missing resources at the deadline."""
    import ray

    values = ""
    while True:
        nodes = {n["NodeManagerAddress"] + "/" + n["NodeID"][:6]: n["Resources"] for n in ray.nodes() if n["Alive"]}
        if (short := fit_together(pools, nodes)) is None:
            gpus = sum(found.get("GPU", 0) for found in nodes.values())
            if gpus and not any("GPU" in pool.bundle or pool.resource for pool in pools.values()):
                idle = f"warning: the cluster has {gpus:g} GPUs and no pool asks for one"
                say(f"{idle}: the models compute on CPUs; model.device=cuda gives each rank one")
            return nodes
        if (left_s := until_s - time.monotonic()) <= 0:
            raise Shortage(short)
        if short != values:
            say(f"waiting {left_s:.0f} s for more nodes: {short}")
        values = short
        time.sleep(min(1.0, left_s))


def _place(name: str, pool: Pool, until_s: float, timeout_s: float) -> list[Any]:
    """Reserve the bundles of a pool and return one placement group per node. Raise Shortage if they are not free by the
    deadline."""
    import ray
    from ray.util.placement_group import placement_group

    once = uuid.uuid4().hex[:6]  # a name that is used by one run of a cluster only
    made = [
        placement_group([pool.bundle] * pool.ranks_per_node, strategy="STRICT_PACK", name=f"verl-{name}-{node}-{once}")
        for node in range(pool.nodes)
    ]
    if not all([group.wait(max(0.0, until_s - time.monotonic())) for group in made]):
        for group in made:
            ray.util.remove_placement_group(group)
        raise Shortage(
            f"cluster.pools.{name}: {pool.nodes} x {pool.ranks_per_node} x {pool.bundle} were not free within "
            f"cluster.start_timeout_s={timeout_s:g}; other jobs hold them: {ray.available_resources()}"
        )
    return made
