"""The plan of a run over processes: the pool of each role, and the memory of a rank. Nothing is started for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from handmade_model import write_model, write_qwen_half_billion, write_rows

from verl.config.load import load_config
from verl.config.tree import changed
from verl.model_engine.layout import Layout
from verl.planner.cluster import ClusterPlan, layout_text
from verl.planner.plan import Plan, make_plan
from verl.planner.text import render_plan
from verl.planner.transport import SentWeights


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("spread")
    write_qwen_half_billion(where / "qwen")
    write_model(where / "judge", layers=4, hidden=512, ffn=1024, vocab=151936)
    write_rows(where / "rows.jsonl", 7473)
    return where


def plan_of(folder: Path, *args: str) -> Plan:
    base = (
        "recipe=gsm8k_grpo",
        "model.dtype=bfloat16",
        "cluster.backend=ray",
        f"data.eval_files=[{folder}/rows.jsonl]",
    )
    return make_plan(
        load_config([f"model.path={folder}/qwen", f"data.train_files=[{folder}/rows.jsonl]", *base, *args]).config
    )


def cluster_of(folder: Path, *args: str) -> ClusterPlan:
    spread = plan_of(folder, *args).cluster
    assert spread is not None
    return spread


GOLDEN = """\
cluster   ray, at auto; rows through queue ray, weights through sync tcp
staged    weights take shared memory: 471 MiB of each rank of the actor, 1.84 GiB of each host with replicas
layout    8 ranks = 4 data x 2 tensor, in 2 copies of the model: a rank holds 1/4 of a model
pool main 2 nodes x 4 ranks, each 1 CPU, 1 GPU: actor, critic, compute, recorder, 4 rollout replicas
pool wide 1 node x 8 ranks, each 2 CPU, 1 npu: ref

a rank of main (estimate)             rollout   infer actor  infer critic  update actor update critic       publish
actor weights                         471 MiB       471 MiB       471 MiB       471 MiB       471 MiB       471 MiB
actor compute copy of shards                -       236 MiB             -       236 MiB             -             -
actor gathered embeddings                   -       130 MiB             -       130 MiB             -             -
actor gathered layers                       -      28.4 MiB             -             -             -             -
actor kept buffer                           -       130 MiB             -             -             -             -
actor inference activations                 -       522 MiB             -             -             -             -
actor log-prob chunk                        -             -             -       128 MiB             -             -
actor head's gradient                       -             -             -       519 MiB             -             -
actor largest whole weight                  -             -             -             -             -      1.27 GiB
actor optimizer states                942 MiB       942 MiB       942 MiB       942 MiB       942 MiB       942 MiB
actor gradients                             -             -             -       471 MiB             -             -
actor gradients of one copy                 -             -             -       260 MiB             -             -
actor activations                           -             -             -      1.17 GiB             -             -
critic weights                        471 MiB       471 MiB       471 MiB       471 MiB       471 MiB       471 MiB
critic compute copy of shards               -             -       236 MiB             -       236 MiB             -
critic gathered embeddings                  -             -       130 MiB             -       130 MiB             -
critic gathered layers                      -             -      28.4 MiB             -      28.4 MiB             -
critic kept buffer                          -             -       130 MiB             -             -             -
critic inference activations                -             -       522 MiB             -             -             -
critic optimizer states               942 MiB       942 MiB       942 MiB       942 MiB       942 MiB       942 MiB
critic gradients                            -             -             -             -       471 MiB             -
critic gathered gradients                   -             -             -             -      56.9 MiB             -
critic gradients of one copy                -             -             -             -       260 MiB             -
critic activations                          -             -             -             -      1.17 GiB             -
rollout weights                       942 MiB       942 MiB       942 MiB       942 MiB       942 MiB       942 MiB
incoming weights                            -             -             -             -             -       942 MiB
KV cache                             4.50 GiB             -             -             -             -             -
prefix cache                          768 MiB             -             -             -             -             -
sampling logits                       297 MiB             -             -             -             -             -
"""


def test_golden_lines_of_a_cluster(folder: Path) -> None:
    text = render_plan(
        plan_of(
            folder,
            *("algorithm.name=ppo", "algorithm.kl_loss_coef=0.1", "step.updates_per_step=2", "rollout.replicas=4"),
            *(
                "cluster.address=auto",
                "cluster.nodes=2",
                "cluster.ranks_per_node=4",
                "cluster.pools.main.gpus_per_rank=1",
            ),
            *(
                "cluster.pools={wide: {ranks_per_node: 8, cpus_per_rank: 2, resource: npu}}",
                "cluster.roles={ref: wide}",
            ),
            *("parallel.tensor=2", "parallel.replicate=2"),
        )
    )
    at, end = text.index("cluster  "), text.index("sum  ")
    assert text[at:end] == GOLDEN
    assert "a rank of wide (estimate)" in text and "memory (estimate)" not in text


def test_the_file_says_the_same(folder: Path) -> None:
    plan = plan_of(folder, "cluster.ranks_per_node=4", "parallel.sequence=2")
    found = json.loads(plan.to_json())
    assert found["cluster"]["layout"] == "4 ranks = 2 data x 2 sequence: a rank holds 1/4 of a model"
    assert found["cluster"]["pools"]["main"]["roles"] == ["actor", "compute", "recorder"]
    assert found["memory"] == found["cluster"]["pools"]["main"]["memory"] and found["memory"]["peak_bytes"] > 0
    alone = json.loads(plan_of(folder, "cluster.backend=inproc").to_json())
    assert alone["cluster"] is None and "master weights" in alone["memory"]["items"]


def test_words_of_a_layout() -> None:
    said = {
        "1 rank = 1 data: a rank holds 1/1 of a model": Layout(),
        "4 ranks = 2 data x 2 tensor: a rank holds 1/4 of a model": Layout(world_size=4, tensor=2),
        "4 ranks = 4 data, in 2 copies of the model: a rank holds 1/2 of a model": Layout(world_size=4, replicate=2),
        "4 ranks = 2 pipeline x 2 data: a rank holds about 1/4 of a model": Layout(world_size=4, pipeline=2),
        "8 ranks = 2 data x 2 sequence x 2 tensor: a rank holds 1/8 of a model": Layout(
            world_size=8, sequence=2, tensor=2
        ),
    }
    assert {layout_text(layout) for layout in said.values()} == set(said)


def test_what_divides_what(folder: Path) -> None:
    def items(*args: str) -> dict[str, int]:
        return (
            cluster_of(folder, "cluster.ranks_per_node=4", "step.updates_per_step=2", *args).pools["main"].memory.items
        )

    data, copies, tensor, sequence = (
        items(f"parallel.{name}") for name in ("replicate=1", "replicate=2", "tensor=2", "sequence=2")
    )
    for name in ("actor weights", "actor gradients", "actor optimizer states"):
        assert data[name] == tensor[name] == sequence[name] and 2 * data[name] == copies[name]
    for name in ("actor gathered embeddings", "actor gathered layers", "actor compute copy of weights"):
        assert data[name] == copies[name] == sequence[name] and data[name] == 2 * tensor[name]
    for name in ("actor activations", "actor inference activations"):
        assert data[name] == copies[name] == 2 * sequence[name] and sequence[name] < tensor[name] < data[name]
    context = items("parallel.context=2")
    assert {n: size for n, size in context.items() if "activations" not in n} == {
        n: size for n, size in sequence.items() if "activations" not in n
    }
    assert sequence["actor activations"] < context["actor activations"] < data["actor activations"]
    assert 2 * tensor["actor head's gradient"] == data["actor head's gradient"]
    one = cluster_of(folder).pools["main"].memory.items
    assert "actor gathered layers" not in one and one["actor weights"] == 4 * data["actor weights"]


def test_a_model_computes_in_what_its_pool_says(folder: Path) -> None:
    def items(dtype: str) -> dict[str, int]:
        pool = f"cluster.pools={{own: {{ranks_per_node: 2, dtype: {dtype}}}}}"
        more = ("cluster.ranks_per_node=2", "model.dtype=float32", "algorithm.kl_loss_coef=0.1", pool)
        spread = cluster_of(folder, *more, "cluster.roles={ref: own, compute: own}")
        assert "compute copy of weights" not in str(spread.pools["main"].memory.items), "main computes in model.dtype"
        return spread.pools["own"].memory.items

    whole, half = (items(dtype)["ref inference activations"] for dtype in ("float32", "bfloat16"))
    assert whole == items("''")["ref inference activations"] != half


def test_an_engine_is_told_the_precision_of_its_pool(folder: Path) -> None:
    from verl.driver.models import ModelContext, role_spec

    config = load_config([f"model.path={folder / 'qwen'}", "model.dtype=float32"]).config
    config = changed(config, {"cluster.pools": {"own": {"dtype": "bfloat16"}}, "cluster.roles": {"ref": "own"}})
    context = ModelContext(config, None, "cpu", 1)  # type: ignore[arg-type] - no row is read
    assert [role_spec(context, role).context.dtype for role in ("actor", "ref")] == ["float32", "bfloat16"]


def test_a_pool_holds_what_lives_in_it(folder: Path) -> None:
    spread = cluster_of(
        folder,
        *("cluster.ranks_per_node=2", f"reward.model={folder}/judge", "rollout.replicas=3"),
        "cluster.pools={judge: {ranks_per_node: 2}, gen: {ranks_per_node: 4}}",
        "cluster.roles={reward_model: judge, rollout: gen, compute: judge}",
    )
    found = {name: (pool.roles, pool.replicas) for name, pool in spread.pools.items()}
    assert found == {"main": (("actor", "recorder"), 0), "judge": (("reward_model", "compute"), 0), "gen": ((), 3)}
    judge, gen, main = (spread.pools[name].memory for name in ("judge", "gen", "main"))
    assert judge.items["reward_model weights"] < main.items["actor weights"] / 4, "of the judge's own folder"
    assert set(judge.phases["infer reward_model"]) >= {"reward_model weights", "reward_model inference activations"}
    assert set(gen.items) == {"rollout weights", "incoming weights", "KV cache", "prefix cache", "sampling logits"}
    assert "rollout weights" not in main.items and spread.fullest == max(judge, gen, main, key=lambda m: m.peak_bytes)
    crowded = cluster_of(folder, "cluster.ranks_per_node=2", "rollout.replicas=2").pools["main"].memory
    assert crowded.items["rollout weights"] == gen.items["rollout weights"], "one replica a rank"


def test_buckets_on_a_gpu_are_memory_of_the_trainers_ranks(folder: Path) -> None:
    pools = ("cluster.pools={gen: {ranks_per_node: 1}}", "cluster.roles={rollout: gen}", "cluster.ranks_per_node=2")
    before = cluster_of(folder, *pools, "model.device=cuda")
    for megabytes, wanted in ((1000, 1000 << 20), (1, 2 * 151936 * 896)):  # an embedding in bfloat16
        options = ("sync.engine=ipc", f"sync.engine_options.bucket_mb={megabytes}")
        spread = cluster_of(folder, *pools, "model.device=cuda", *options)
        main, gen = (spread.pools[name].memory for name in ("main", "gen"))
        assert main.items["buckets of weights"] == 2 * wanted and "buckets of weights" not in gen.items
        assert main.peak_bytes == before.pools["main"].memory.peak_bytes + 2 * wanted and spread.sent == SentWeights()
        memory = plan_of(folder, "cluster.backend=inproc", "model.device=cuda", *options).memory
        assert memory is not None and memory.items["buckets of weights"] == 2 * wanted
        assert all("buckets of weights" in phase for phase in memory.phases.values())


def test_all_processes_of_one_machine_are_held_against_its_memory(folder: Path, monkeypatch) -> None:
    """A teacher in a pool of its own on CPUs; the memory of a cluster that runs already, or of GPUs, is unknown
    here."""
    base = ("model.device=cpu", "algorithm.name=opd", f"teacher.path={folder}/qwen", "cluster.roles={teacher: wide}")
    args = (*base, "cluster.pools={wide: {cpus_per_rank: 1}}", "cluster.ranks_per_node=2")
    spread = cluster_of(folder, *args)
    main, wide = spread.pools["main"], spread.pools["wide"]
    wanted = 2 * main.memory.peak_bytes + wide.memory.peak_bytes + spread.sent.trainer_bytes
    for engine in ("shm", "tcp"):
        options = (f"sync.engine={engine}", "sync.engine_options.bucket_mb=1000")
        assert cluster_of(folder, *args, *options).sent.trainer_bytes == 2 * (1000 << 20)
    for has, count in ((wanted, 0), (wanted - 1, 1)):
        monkeypatch.setattr("verl.workers.host.total_bytes", lambda has=has: has)
        found = plan_of(folder, *args).warnings
        assert ["every process at its peak wants" in w and "without the teacher" in w for w in found] == [True] * count
    assert not plan_of(folder, *args, "cluster.address=10.0.0.1:6379").warnings
    assert not plan_of(folder, *args, "model.device=cuda").warnings
