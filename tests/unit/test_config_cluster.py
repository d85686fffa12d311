"""Faults of pools, roles and layouts are reported before Ray is started and before a model is loaded."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from handmade_model import write_model, write_rows

from verl.config import cluster, worker_python
from verl.config.backends import backend_of, option_keys
from verl.config.load import load_config, validate
from verl.config.tree import changed, leaves
from verl.driver.assemble import context_of
from verl.driver.models import role_spec
from verl.driver.setup import device_of
from verl.workers.group import DevicePlace
from verl.workers.inproc import InprocCluster
from verl.workers.pools import Pool, Shortage, fit_alone, fit_together, pools_of, seen
from verl.workers.ray.cluster import RayCluster
from verl.workers.sections import ClusterConfig

RAY = ("cluster.backend=ray",)
FOUR = (*RAY, "cluster.ranks_per_node=4")
AWAY = (*RAY, "cluster.address=10.0.0.1:6379")
AT_GEN = ("cluster.pools={gen: {ranks_per_node: 1}}", "cluster.roles={rollout: gen}")
POOL = "cluster.pools={big: {ranks_per_node: 4}}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("cluster")
    write_rows(where / "rows.jsonl", 200)
    write_model(where / "model")  # 4 heads, 2 of keys and values, vocabulary 1000
    write_model(where / "moe", config={"model_type": "qwen3_moe"})
    sixty = {"model_type": "qwen2_moe", "num_experts": 60, "shared_expert_intermediate_size": 90}
    write_model(where / "sixty", config=sixty, kv_heads=4)
    write_model(where / "eight", config={"model_type": "mixtral", "num_local_experts": 8})
    write_model(where / "olmoe", config={"model_type": "olmoe"})
    write_model(where / "odd", heads=4, kv_heads=4, vocab=1001)
    write_model(where / "own", config={"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}})
    return where


@pytest.fixture(autouse=True)
def with_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "find_spec", lambda name: name)
    monkeypatch.setattr(worker_python, "_engine_faults", lambda config, python: ())  # its packages are not here
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def faults(folder: Path, *args: str, command: str = "train", model: str = "model") -> list[str]:
    files = (f"data.train_files={folder}/rows.jsonl", f"data.eval_files={folder}/rows.jsonl")
    try:
        validate(load_config([f"model.path={folder}/{model}", "model.device=cpu", *files, *args]).config, command)
    except ValueError as e:
        return str(e).splitlines()
    return []


def test_routes_that_no_engine_would_replay_are_refused(folder: Path) -> None:
    key = "rollout.engine_options.replay_routes=true"
    assert not faults(folder, key, model="moe")
    assert faults(folder, *FOUR, "parallel.expert=2", key, model="moe") == []
    stages = (*FOUR, "parallel.pipeline=2", "model.engine=megatron", f"model.python={sys.executable}")
    assert not [line for line in faults(folder, *stages, key, model="moe") if "routes" in line]
    for model, args, why in (
        ("eight", (), "is a mixtral, whose routers are not known"),
        ("moe", ("model.engine_options.attention=padded",), "set model.engine_options.attention=auto"),
        ("moe", (*FOUR, "parallel.pipeline=2"), "with parallel.pipeline=2: a stage takes no routes"),
        ("moe", (*FOUR, "model.engine=veomni"), "with model.engine=veomni: it takes no routes; set model.engine=torch"),
        ("moe", ("rollout.engine=hf",), "replay_routes is an option of rollout.engine=native"),
    ):
        found = [line for line in faults(folder, *args, key, model=model) if "routes" in line]
        assert len(found) == 1 and why in found[0], (args, found)


DISK = ("sync.engine=disk", "sync.engine_options.folder=/shared")
FAULTS = [
    # a layout
    ((*FOUR, "parallel.tensor=3"), "use a multiple of 3"),
    ((*FOUR, "parallel.replicate=3"), "parallel.replicate=3 does not divide the 4 ranks", "use one of 1, 2, 4"),
    ((*FOUR, "parallel.expert=3"), "parallel.expert=3 does not divide the 4 ranks", "use one of 1, 2, 4"),
    ((*FOUR, "parallel.replicate=4", "parallel.expert=2"), "parallel.expert=2 does not divide the 1 ranks", "one of 1"),
    (
        (*FOUR, "parallel.tensor=2", "parallel.expert=4"),
        *(
            "parallel.expert=4 does not divide the 2 ranks",
            "over tensor ranks with model.engine=megatron alone",
            "1, 2",
        ),
    ),
    ((*FOUR, "parallel.tensor=4"), "parallel.tensor=4: model.path", "2 key-value heads", "use 2"),
    ((*FOUR, "parallel.context=2", "parallel.sequence=2"), "parallel.context=2 and", "use parallel.context=4 alone"),
    ((*FOUR, "parallel.context=2", "model.engine_options.attention=padded"), "parallel.context=2", "attention=auto"),
    ((*FOUR, "parallel.context=3"), "parallel.context=3", "use a multiple of 3"),
    ((*FOUR, "parallel.sequence=2", "parallel.tensor=2"), "parallel.tensor=2 x", "2 key-value heads"),
    ((*FOUR, "parallel.pipeline=4"), "parallel.pipeline=4: model.path", "2 layers", "use at most 2"),
    ((*FOUR, "parallel.pipeline=2", "model.engine_options.attention=padded"), "parallel.pipeline=2", "attention=auto"),
    ((*FOUR, "parallel.expert=2"), "parallel.expert=2", "use parallel.expert=1"),
    ((*FOUR, "parallel.tesnor=2"), "did you mean parallel.tensor"),
    ((*FOUR, "parallel.sequence=2", "model.engine_options.attention=padded"), "parallel.sequence=2", "attention=auto"),
    ((*FOUR, "step.prompts_per_step=6", "step.updates_per_step=3"), "4 data ranks", "2 groups", "parallel.tensor"),
    # the engine of VeOmni
    (("model.engine=veomni",), "model.engine=veomni with cluster.backend=inproc", "model.engine=torch"),
    ((*FOUR, "model.engine=veomni", "parallel.tensor=2"), "parallel.tensor=2 with model.engine=veomni", "sequence"),
    ((*FOUR, "model.engine=veomni", "parallel.pipeline=2"), "parallel.pipeline=2 with model.engine=veomni"),
    ((*FOUR, "model.engine=veomni", "parallel.sequence=2", "parallel.replicate=4"), "the 2 data ranks", "1, 2"),
    ((*FOUR, "model.engine=veomni", "model.lora.rank=8"), "model.lora with model.engine=veomni", "sharded"),
    # one process
    (("cluster.nodes=2",), "cluster.nodes=2 with cluster.backend=inproc", "cluster.backend=ray"),
    (("cluster.ranks_per_node=8",), "cluster.ranks_per_node=8", "cluster.virtual_ranks"),
    (("parallel.tensor=2",), "parallel.tensor=2 with cluster.backend=inproc"),
    (("cluster.address=auto",), "cluster.address=auto with cluster.backend=inproc"),
    (("cluster.roles={ref: main}",), "cluster.roles={ref: main} with cluster.backend=inproc"),
    (("model.engine=sharded",), "model.engine=sharded", "model.engine=torch"),
    (("cluster.virtual_ranks=3", "step.prompts_per_step=8"), "=3 does not divide the 8 groups", "use 1, 2, 4, 8"),
    ((*RAY, "cluster.virtual_ranks=2"), "cluster.virtual_ranks=2", "cluster.ranks_per_node=2"),
    (("cluster.backend=rya",), "did you mean ray"),
    # pools and roles
    ((*FOUR, "cluster.pools={few: {ranks_per_node: 2}}"), "cluster.pools.few: no role lives there"),
    ((*FOUR, POOL, "cluster.roles={rollouts: big, rollout: big}"), "did you mean rollout"),
    ((*FOUR, POOL, "cluster.roles={rollout: bgi, ref: big}"), "cluster.roles.rollout=bgi", "did you mean big"),
    ((*FOUR, POOL, "cluster.roles={critic: big, rollout: big}"), "cluster.roles.critic: no such role"),
    ((*FOUR, "cluster.pools={big: {rank_per_node: 4}}", "cluster.roles={rollout: big}"), "mean ranks_per_node"),
    ((*FOUR, "cluster.pools={big: {nodes: many}}", "cluster.roles={rollout: big}"), "cluster.pools.big", "many"),
    ((*FOUR, "cluster.pools={big: 4}", "cluster.roles={rollout: big}"), "cluster.pools.big=4"),
    ((*FOUR, "cluster.pools={big: {dtype: int8}}", "cluster.roles={rollout: big}"), "cluster.pools.big", "int8"),
    (
        (*FOUR, "cluster.pools={big: {ranks_per_node: 4, dtype: float32}}", "cluster.roles={rollout: big}"),
        *("cluster.pools.big.dtype=float32", "rollout.dtype"),
    ),
    ((*FOUR, "cluster.pools={main: {nodes: 1}}"), "cluster.pools.main.nodes: of this pool it is cluster.nodes"),
    ((*FOUR, "cluster.pools.main.dtype=float32"), "cluster.pools.main.dtype", "model.dtype"),
    ((*FOUR, "cluster.pools.main.gpu_per_rank=1"), "gpu_per_rank: unknown; did you mean gpus_per_rank"),
    ((*FOUR, "cluster.pools.main=4"), "cluster.pools.main=4"),
    ((*FOUR, "cluster.pools.main.cpus_per_rank=-1"), "cluster.pools.main={'cpus_per_rank': -1}", ">= 0"),
    ((*FOUR, "cluster.pools.main.cpus_per_rank=0"), "cluster.pools.main: its ranks hold nothing"),
    ((*FOUR, "cluster.pools={few: {ranks_per_node: 2}}", "cluster.roles={ref: few}"), "few has 2 ranks", "pool 4"),
    ((*FOUR, "rollout.replicas=5"), "rollout.replicas=5", "4 ranks of the pool main"),
    ((*FOUR, "cluster.pools.main.gpus_per_rank=1.5"), "cluster.pools.main.gpus_per_rank=1.5: above 1", "use 1 or 2"),
    (
        (*FOUR, "cluster.pools.main.gpus_per_rank=2"),
        "cluster.pools.main.gpus_per_rank=2: the roles of a pool share",
        "actor,",
        "use 1, or",
    ),
    (
        (*FOUR, "cluster.pools={big: {resource: npu, resource_per_rank: 2.5}}", "cluster.roles={rollout: big}"),
        *("cluster.pools.big.resource_per_rank=2.5: above 1", "use 2 or 3"),
    ),
    # an address
    ((*RAY, "cluster.address=foo"), "cluster.address=foo: neither auto nor HOST:PORT", "give foo:6379"),
    ((*RAY, "cluster.address=10.0.0"), "cluster.address=10.0.0: neither auto", "give 10.0.0:6379"),
    ((*RAY, "cluster.address='a:b:c'"), "cluster.address=a:b:c: neither auto", "10.0.0.1:6379"),
    ((*RAY, "cluster.address='head:0'"), "cluster.address=head:0: neither auto", "head:6379"),
    ((*RAY, "cluster.address='ray://head:10001'"), "cluster.address=ray://head:10001: neither auto", "10.0.0.1:6379"),
    # transports
    ((*RAY, "cluster.nodes=2"), "cluster.nodes=2", "cluster.address=auto"),
    ((*AWAY, "queue.engine=shared"), "queue.engine=shared", "queue.engine=ray"),
    (
        (*AWAY, "sync.engine=shm", "cluster.nodes=2", "cluster.ranks_per_node=2", "rollout.replicas=3"),
        "rollout.replicas=3",
        "sync.engine=tcp",
    ),
    ((*AWAY, "sync.engine=shm", *AT_GEN), "cluster.roles.rollout=gen", "sync.engine=tcp"),
    (
        (*AWAY, "sync.engine=disk", *AT_GEN),
        "cluster.roles.rollout=gen",
        "the disk of one machine",
        "sync.engine_options.folder",
    ),
    (("sync.engine=collective", "sync.engine_options.backend=nccl"), "sync.engine_options.backend=nccl", "(gloo)"),
    (
        (*RAY, "sync.engine=tcp", "sync.engine_options.delta=true", "sync.engine_options.bucket_mb=4"),
        "sync.engine_options.delta=true with sync.engine_options.bucket_mb=4: what changed is told of whole versions",
    ),
    (("sync.engine=ipc",), "sync.engine=ipc: weights pass through a GPU's memory, and the models", "sync.engine=shm"),
    ((*RAY, "sync.engine=ipc"), "sync.engine=ipc", "actor and rollout of this run are on CPUs"),
    (
        (*AWAY, "model.device=cuda", "sync.engine=ipc", *AT_GEN),
        "cluster.roles.rollout=gen: sync.engine=ipc goes through the memory of one machine",
    ),
]


def test_each_fault_is_one_line_with_value_reason_and_fix(folder: Path) -> None:
    wrong = []
    for args, *words in FAULTS:
        found = faults(folder, *args)
        if len(found) != 1 or not all(word in found[0] for word in words):
            wrong.append((args, words, found))
    assert not wrong


def test_an_address_of_the_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "foo")
    assert [line[:24] for line in faults(folder, *RAY)] == ["RAY_ADDRESS=foo: neither"]
    for given in ("auto", "head-1.my_net:6379", "10.0.0.1:6379"):
        monkeypatch.setenv("RAY_ADDRESS", given)
        assert faults(folder, *RAY) == faults(folder, *RAY, f"cluster.address='{given}'") == []


def test_what_is_allowed(folder: Path) -> None:
    gen = ("cluster.pools={gen: {ranks_per_node: 2}}", "cluster.roles={rollout: gen}", "rollout.replicas=2")
    for args in (
        RAY,
        (*FOUR, "parallel.tensor=2", "parallel.replicate=2"),
        (*FOUR, "parallel.sequence=2"),
        (*FOUR, *gen),
        (*FOUR, POOL, "cluster.roles={ref: big}"),
        (*FOUR, "cluster.pools={few: {ranks_per_node: 1}}", "cluster.roles={recorder: few, compute: few}"),
        (*FOUR, "step.prompts_per_step=6"),
        (*AWAY, "cluster.nodes=2", "cluster.ranks_per_node=2", "rollout.replicas=3"),
        (*AWAY, "cluster.pools={gen: {ranks_per_node: 1}}", "cluster.roles={rollout: gen}"),
        (*AWAY, "sync.engine=shm", "cluster.nodes=2", "cluster.ranks_per_node=2", "rollout.replicas=2"),
        (*AWAY, *DISK, "cluster.pools={gen: {ranks_per_node: 1}}", "cluster.roles={rollout: gen}"),
        (*AWAY, "sync.engine=collective", "cluster.nodes=2", "cluster.ranks_per_node=2", "rollout.replicas=3"),
        ("cluster.max_restarts=0",),
    ):
        assert faults(folder, *args) == [], args
    for command in ("sft", "rm", "dpo", "eval"):
        assert faults(folder, *FOUR, command=command) == []
    assert "64 data ranks" not in str(faults(folder, *RAY, "cluster.ranks_per_node=64", command="eval"))


CPUS = "cluster.pools={cpus: {ranks_per_node: 2, gpus_per_rank: 0}}"


def test_a_pool_that_no_model_could_compute_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device of a model is that of its pool, by the resources of a rank, and not that of the driver's machine."""
    monkeypatch.setattr(cluster, "find_spec", lambda name: name if name in ("ray", "torch_npu") else None)
    two, cuda = (*RAY, "cluster.ranks_per_node=2"), ("model.device=cuda",)
    kl, nccl = "algorithm.kl_loss_coef=0.1", ("sync.engine=collective", "sync.engine_options.backend=nccl")
    home = "cluster.roles={ref: chips}"
    for args in (
        (*two, *cuda),  # on a machine without one: its nodes have them, or lack them
        (*two, *cuda, kl, CPUS, "cluster.roles={ref: cpus}"),
        (*two, *cuda, *nccl),
        (*two, *cuda, "sync.engine=ipc"),
        (*two, kl, "cluster.pools={chips: {ranks_per_node: 2, gpus_per_rank: 0.5}}", home),
        (*two, kl, "cluster.pools={chips: {ranks_per_node: 2, resource: npu}}", home),
        (*two, kl, "cluster.pools={chips: {ranks_per_node: 2, resource: rack7, gpus_per_rank: 1}}", home),
        (*two, kl, "cluster.pools={chips: {ranks_per_node: 2, resource: rack7, device: cpu}}", home),
        (*two, *cuda, kl, "cluster.pools={chips: {ranks_per_node: 2, device: cpu}}", home),
        (*two, "model.device=auto", "cluster.pools.main.resource=xpu"),
        (*two, "model.device=auto", "cluster.pools.main.gpus_per_rank=1"),
        (*two, "cluster.pools={some: {resource: rack7}}", "cluster.roles={compute: some, recorder: some}"),
    ):
        assert faults(folder, *args) == [], args
    wrong = []
    for args, *words in (
        (
            (*two, *cuda, "cluster.pools.main.gpus_per_rank=0"),
            "cluster.pools.main.gpus_per_rank=0: actor would compute on cpu",
            "=cuda",
        ),
        (
            (*two, "cluster.pools.main.gpus_per_rank=0.5"),
            "cluster.pools.main.gpus_per_rank=0.5: actor would",
            "model.device=cpu",
        ),
        (
            (*two, "cluster.pools.main.resource=npu"),
            "cluster.pools.main.resource=npu: actor would compute on npu, and model.device=cpu",
        ),
        (
            (*two, kl, "cluster.pools={chips: {ranks_per_node: 2, resource: rack7}}", home),
            "cluster.pools.chips.resource=rack7: ref computes there, and torch has no device of this name",
            "xpu",
        ),
        (
            (*two, kl, "cluster.pools={chips: {ranks_per_node: 2, device: cuda}}", home),
            "chips.device=cuda",
            "gpus_per_rank=1",
        ),
        (
            (*two, *cuda, *nccl, CPUS, "cluster.roles={rollout: cpus}"),
            "sync.engine_options.backend=nccl: rollout of this run are not on GPUs",
        ),
        (
            (*two, *cuda, "sync.engine=ipc", CPUS, "cluster.roles={rollout: cpus}"),
            "sync.engine=ipc: weights pass through a GPU's memory, and rollout of this run are on CPUs",
        ),
        (
            (*two, *cuda, "sync.engine=ipc", "rollout.replicas=2"),
            "rollout.replicas=2 with sync.engine=ipc: the weights lie on the GPU of the actor's first rank",
        ),
        (
            (*two, *cuda, "sync.engine=ipc", "cluster.pools={gen: {gpus_per_rank: 1}}", "cluster.roles={rollout: gen}"),
            "cluster.roles.rollout=gen with sync.engine=ipc: the weights lie on the GPU of the actor's first rank",
        ),
    ):
        found = faults(folder, *args)
        if len(found) != 1 or not all(word in found[0] for word in words):
            wrong.append((args, words, found))
    assert not wrong


def test_every_model_is_told_the_device_the_precision_and_the_neighbours_of_its_place(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a driver without a GPU. A rank has its share of the cores of its node, whatever others have."""
    made: list[RayCluster] = []

    def without_ray(*args: object, **given: object) -> None:
        made.append(found := RayCluster.__new__(RayCluster))
        found.pools, found.roles = args[:2]  # type: ignore[assignment]
        found.devices = given["devices"]  # type: ignore[assignment]
        found.set_up = given["set_up"]  # type: ignore[assignment]

    monkeypatch.setattr("verl.workers.ray.cluster.RayCluster", without_ray)
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    memory = SimpleNamespace(build="verl.transfer_queue.memory:build")
    monkeypatch.setattr("verl.driver.assemble.backend_of", lambda config, section: memory)
    cpus = "cluster.pools={cpus: {ranks_per_node: 4, nodes: 4, gpus_per_rank: 0, dtype: bfloat16}}"
    given = ("algorithm.kl_loss_coef=0.1", "model.dtype=float32", "model.device=cuda", cpus)
    args = (*AWAY, "cluster.nodes=2", "cluster.ranks_per_node=8", "rollout.replicas=3", *given)
    resolved = load_config([f"model.path={folder}/model", *args, "cluster.roles={ref: cpus}"])
    config = resolved.config
    context = context_of(config, ("actor", "ref", "compute"))
    assert {role: context.devices[role] for role in ("actor", "ref", "rollout")} == {
        "actor": "cuda",
        "ref": "cpu",
        "rollout": "cuda",
    }
    specs = [role_spec(replace(context, cluster=InprocCluster()), role).context for role in ("actor", "ref")]
    assert [(spec.device, spec.dtype) for spec in specs] == [("cuda", "float32"), ("cpu", "bfloat16")]
    places = {role: made[0]._place_of(role, 11) for role in ("actor", "ref", "compute")}
    assert places == {
        "actor": DevicePlace("cuda", 3, 8),
        "ref": DevicePlace("cpu", 3, 4),
        "compute": DevicePlace("cpu", 3, 8),
    }
    threads: list[int] = []
    monkeypatch.setattr("torch.set_num_threads", threads.append)
    made[0].set_up(places["ref"])
    assert threads == [16]
    with pytest.raises(ValueError, match="torch sees no cuda device on this node, which the cluster says it has"):
        made[0].set_up(places["actor"])
    config = changed(config, {"cluster.backend": "inproc", "cluster.address": None})
    with pytest.raises(ValueError, match="model.device=cuda, but torch sees no CUDA device"):
        device_of(config)


def test_ranks_beyond_the_rows_of_a_supervised_step(folder: Path) -> None:
    (line,) = faults(folder, *FOUR, "step.prompts_per_step=3", command="sft")
    assert "4 data ranks" in line and "step.prompts_per_step=3" in line


def test_architectures(folder: Path) -> None:
    (line,) = faults(folder, *FOUR, "parallel.tensor=2", model="olmoe")
    assert "olmoe" in line and "parallel.tensor=1" in line
    (line,) = faults(folder, *FOUR, "parallel.tensor=2", model="odd")
    assert "vocabulary of 1001" in line
    eight = (*RAY, "cluster.ranks_per_node=8")
    (line,) = faults(folder, *eight, "parallel.expert=8", model="sixty")
    assert line.startswith("parallel.expert=8: model.path=") and "has 60 experts, which its ranks" in line
    assert line.endswith("; use 4") and faults(folder, *eight, "parallel.expert=4", model="sixty") == []
    assert faults(folder, *eight, "parallel.expert=8", model="eight") == []
    (line,) = faults(folder, *FOUR, "parallel.tensor=4", model="sixty")
    assert line.startswith("parallel.tensor=4: model.path=") and "a shared expert of 90" in line
    for other in ("parallel.pipeline=2", "parallel.tensor=2"):
        assert faults(folder, *FOUR, other, "parallel.expert=2", model="moe") == []
    (line,) = faults(folder, *FOUR, "parallel.pipeline=2", model="olmoe")
    assert "is a olmoe, which cannot be cut into stages" in line and "parallel.pipeline=1" in line
    assert (
        faults(folder, *FOUR, "parallel.pipeline=2") == faults(folder, *FOUR, "parallel.pipeline=2", model="moe") == []
    )
    assert faults(folder, *FOUR, model="moe") == faults(folder, *FOUR, "parallel.sequence=2", model="odd") == []
    assert faults(folder, *FOUR, "parallel.tensor=2", model="own") == [], "its own code says it, when it is loaded"
    (line,) = faults(folder, *FOUR, "parallel.tensor=2", "algorithm.name=ppo", f"critic.path={folder}/olmoe")
    assert "critic.path" in line and "olmoe" in line


def test_without_ray_there_is_the_pip_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "find_spec", lambda name: None)
    for args in (RAY, ("queue.engine=ray",)):
        (line,) = faults(folder, *args)
        assert line.startswith(args[0]) and "pip install '.[ray]'" in line
    assert faults(folder) == []


def test_which_queue_serves_where(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*args: str) -> str:
        config = load_config([f"model.path={folder}/model", *args]).config
        return backend_of(config, "queue").build.split(":")[0].rpartition(".")[2]

    assert [build(), build(*RAY), build(*AWAY), build(*RAY, "queue.engine=ray")] == ["memory", "shared", "ray", "ray"]
    assert build(*AWAY, "queue.engine_options.timeout_s=5") == "ray"
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert build(*RAY) == "ray"


def test_a_node_of_a_pool_is_on_one_node() -> None:
    nodes = {"a": {"CPU": 6.0}, "b": {"CPU": 3.0}}
    assert fit_alone("x", Pool(ranks_per_node=6), nodes) is None
    assert fit_alone("x", Pool(nodes=3, ranks_per_node=3), nodes) is None
    assert "a has 6 CPU: room for 6; b has 3 CPU: room for 3" in str(fit_alone("x", Pool(ranks_per_node=7), nodes))
    assert fit_alone("x", Pool(nodes=2, ranks_per_node=4), nodes) is not None
    assert fit_alone("x", Pool(nodes=2, gpus_per_rank=1), nodes) is not None


def test_pools_that_fit_one_by_one_but_not_together() -> None:
    def said(pools: dict[str, Pool], *nodes: dict[str, float]) -> str:
        return str(fit_together(pools, {f"n{i}": {f"node:{i}": 1.0, **has} for i, has in enumerate(nodes)}) or "")

    two = {"main": Pool(ranks_per_node=2), "gen": Pool(ranks_per_node=2)}
    line = said(two, {"CPU": 2.0})
    assert line.startswith("cluster.pools.main and cluster.pools.gen fit one by one, but not together: they ask for 4")
    assert "4 CPU where there are 2 (n0 has 2 CPU)" in line and "cluster.roles" in line and "\n" not in line
    assert said(two, {"CPU": 2.0}, {"CPU": 2.0}) == said(two, {"CPU": 4.0}) == ""
    assert "1.5 GPU where there are 1 " in said(
        {"main": Pool(gpus_per_rank=0.75), "gen": Pool(gpus_per_rank=0.75)}, {"CPU": 9.0, "GPU": 1.0}
    )
    npu = Pool(cpus_per_rank=0, resource="npu", ranks_per_node=3)
    assert "6 npu where there are 4" in said({"main": npu, "gen": npu}, {"npu": 4.0, "CPU": 1.0})
    assert said({"main": npu, "gen": Pool()}, {"npu": 4.0, "CPU": 1.0}) == ""
    # enough in sum, but in pieces: 2 + 2 + 2 of 3 + 3; and what only the right order finds
    three = {name: Pool(ranks_per_node=2) for name in "abc"}
    assert "more on one node than others leave there" in said(three, {"CPU": 3.0}, {"CPU": 3.0})
    mixed = {"a": Pool(ranks_per_node=1), "b": Pool(ranks_per_node=1, gpus_per_rank=1), "c": Pool(ranks_per_node=3)}
    assert said(mixed, {"CPU": 1.0, "GPU": 1.0}, {"CPU": 4.0}) == ""
    assert "x asks for" in said({"x": Pool(ranks_per_node=9), **two}, {"CPU": 4.0}), (
        "the one that is too large is named"
    )
    many = {"a": Pool(nodes=64, ranks_per_node=5), "b": Pool(nodes=64, ranks_per_node=4)}
    assert "576 CPU where there are 512" in said(many, *({"CPU": 8.0} for _ in range(64)))
    assert said(many, *({"CPU": 9.0} for _ in range(64))) == ""


def test_the_cluster_says_so_before_it_places_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.workers.ray.cluster import _await_nodes

    node = {"Alive": True, "NodeManagerAddress": "here", "NodeID": "abcdef", "Resources": {"CPU": 2.0}}
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(nodes=lambda: [node]))
    pools = {"main": Pool(ranks_per_node=2), "gen": Pool(ranks_per_node=2)}
    with pytest.raises(Shortage, match="not together: they ask for 4 CPU where there are 2 .here/abcdef has 2 CPU"):
        _await_nodes(pools, 0.0, print)
    node["Resources"] = {"CPU": 4.0, "GPU": 8.0}
    told: list[str] = []
    found = _await_nodes(pools, 0.0, told.append)
    held = "cluster: 1 nodes (here/abcdef has 8 GPU, 4 CPU) hold pools main (1 x 2 ranks), gen (1 x 2 ranks)"
    assert seen(pools, found) == held
    (line,) = told
    assert line.startswith("warning: the cluster has 8 GPUs and no pool asks for one") and "model.device=cuda" in line
    for with_device in (Pool(gpus_per_rank=0.5), Pool(resource="npu")):
        node["Resources"]["npu"] = 1.0
        _await_nodes({"main": with_device}, 0.0, told.append)
    assert len(told) == 1


def test_messages_name_keys_of_the_tree() -> None:
    source = Path(cluster.__file__).read_text()
    found = set(re.findall(r"(?<![\w./])(?:cluster|parallel|queue|sync|rollout|run|model|step)\.[a-z_]+", source))
    assert found and found <= {*leaves(), *option_keys(), "model.engine_options"}


def test_the_page_has_every_key() -> None:
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    keys = [key for key in leaves() if key.startswith(("cluster.", "parallel."))]
    assert keys and [key for key in keys if f"`{key}`" not in page] == []
    named = set(re.findall(r"`((?:cluster|parallel)\.[a-z_]+)`", page))
    assert named == set(keys)


def test_frozen_models_go_to_the_least_loaded_pool() -> None:
    def lives(pools: dict[str, object], **roles: str) -> dict[str, str]:
        section = ClusterConfig(ranks_per_node=2, pools=pools | {"main": {"gpus_per_rank": 1.0}}, roles=roles)
        found = pools_of(section, ("actor", "critic", "ref", "reward_model", "compute"), device="cuda")[1]
        return {role: found[role] for role in ("actor", "critic", "ref", "reward_model")}

    here = dict.fromkeys(("actor", "critic", "ref", "reward_model"), "main")
    same, cpu, few = {"ranks_per_node": 2}, {"ranks_per_node": 2, "gpus_per_rank": 0}, {"gpus_per_rank": 1}
    assert lives({}) == here
    assert lives({"a": cpu, "b": few}, compute="a", rollout="b") == here, "they cannot hold a model as main does"
    assert lives({"a": same}) == here | {"ref": "a", "reward_model": "a"}
    assert lives({"a": same | {"dtype": "bfloat16"}}, compute="a") == here, "nor do they change what they compute in"
    assert lives({"a": same}, ref="main") == here | {"reward_model": "a"}
    assert lives({"a": same, "b": same}) == here | {"ref": "a", "reward_model": "b"}
    assert lives({"a": same, "b": same}, rollout="a") == here | {"ref": "b", "reward_model": "b"}


def test_a_pool_holds_gpus_by_itself_where_the_device_is_cuda() -> None:
    given = {
        "generate": {"ranks_per_node": 4},
        "none": {"gpus_per_rank": 0},
        "half": {"gpus_per_rank": 0.5},
        "npu": {"resource": "npu"},
    }
    homes = {"rollout": "generate", "compute": "none", "ref": "half", "critic": "npu"}
    for device, gpus in (("cuda", 1.0), ("cpu", 0.0)):
        section = ClusterConfig(pools=given, roles=homes)
        pools = pools_of(section, ("actor", "critic", "ref", "compute"), device=device)[0]
        held = {name: pool.gpus_per_rank for name, pool in pools.items()}
        assert held == {"main": gpus, "generate": gpus, "none": 0.0, "half": 0.5, "npu": 0.0}
