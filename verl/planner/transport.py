"""The memory of weights that are being sent: shared memory of hosts, and memory of the processes that receive them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from verl.config.backends import SYNC, engine_name, options_of
from verl.config.devices import rollout_dtype
from verl.config.model_files import ModelFacts
from verl.config.schema import Config
from verl.model_engine.layout import Layout
from verl.planner.memory import bucket_bytes, role_items, wire_bytes
from verl.weight_sync.options import Ipc, Shm, Tcp
from verl.wire import FP8
from verl.workers.pools import Pool


@dataclass(frozen=True, slots=True, kw_only=True)
class SentWeights:
    """Bytes that publishes need besides the models. Shared memory has two versions, of which a late replica may still
    read the older one, or two buckets."""

    rank_bytes: int = 0
    """Shared memory for the slices of each of the trainer's ranks, where they are on several hosts."""
    trainer_bytes: int = 0
    """Shared memory of the host of the trainer's first rank for whole versions, or buckets."""
    replica_bytes: int = 0
    """Shared memory of each other host with replicas, of each host with replicas where ranks keep slices."""
    arriving_bytes: int = 0
    """Memory of the process that fetches weights for its host, outside of the shared memory."""


def sent_weights(
    config: Config, model: ModelFacts, layout: Layout, pools: Mapping[str, Pool], places: Mapping[str, str]
) -> SentWeights:
    """Return the memory for publishes of a run over processes. pools: by name · places: the pool of each role."""
    engine, options = engine_name(config, "sync"), options_of(config, "sync")
    trainer, replicas = pools[places["actor"]], pools[places["rollout"]]
    version = wire_bytes(config, model)
    if isinstance(options, Ipc):
        return SentWeights()
    if engine == "disk":  # replicas read the files; from an object store they are fetched into shared memory
        return SentWeights(replica_bytes=2 * version * ("://" in (options.folder or "")))
    if isinstance(options, Shm | Tcp) and options.bucket_mb is not None:
        bucket = bucket_bytes(options.bucket_mb, model, rollout_dtype(config))
        readers = -(-config.rollout.replicas // replicas.nodes) if SYNC[engine].each_host else 0
        return SentWeights(trainer_bytes=2 * bucket, replica_bytes=readers * bucket)
    fetched = 2 * version * SYNC[engine].each_host
    arriving = bucket_bytes(0, model, rollout_dtype(config)) * isinstance(options, Tcp)  # one tensor at a time
    if not fetched or trainer.nodes == 1 or config.rollout.dtype == FP8:  # ranks cannot quantise slices of blocks
        return SentWeights(trainer_bytes=2 * version, replica_bytes=fetched, arriving_bytes=arriving)
    masters = max(role_items(config, "actor", layout, 1, stage=s)["weights"] for s in range(layout.pipeline))
    share = version * masters // (4 * model.parameters)  # float32
    # the others than tcp receive the whole share of a rank before it is put in its place
    return SentWeights(rank_bytes=2 * share, replica_bytes=fetched, arriving_bytes=arriving or share)
