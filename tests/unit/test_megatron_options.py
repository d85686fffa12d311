"""What the Megatron engine cannot run is found in the configuration and in config.json; the memory of its ranks."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from handmade_model import write_model, write_rows

from verl.config import cluster, worker_python
from verl.config.load import load_config, validate
from verl.config.model_files import describe_model
from verl.model_engine.layout import Layout
from verl.model_engine.megatron import PASS_TOKENS, least_padding
from verl.model_engine.megatron_memory import megatron_memory
from verl.model_engine.megatron_options import EXPERT_TENSOR, VIRTUAL, layer_windows
from verl.model_engine.memory import RankWork, memory
from verl.planner.plan import make_plan

TWO = ("cluster.backend=ray", "cluster.ranks_per_node=2", "model.engine=megatron")
FOUR = (*TWO, "cluster.ranks_per_node=4")
VEOMNI = ("cluster.backend=ray", "cluster.ranks_per_node=2", "model.engine=veomni")
WINDOWED = {"use_sliding_window": True, "sliding_window": 8}
MODELS = {
    "model": {},
    "all full": WINDOWED,  # the window begins after 28 layers
    "all windows": WINDOWED | {"max_window_layers": 0},
    "mixed": WINDOWED | {"max_window_layers": 1},
    "mixed by type": WINDOWED | {"layer_types": ["sliding_attention", "full_attention"]},
    "linear": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "yarn": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
    "dynamic": {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
    "gelu": {"hidden_act": "gelu"},
    "half biased": {"model_type": "llama", "attention_bias": True},
    "gemma": {"model_type": "gemma3_text"},
    "some dense": {"model_type": "qwen3_moe", "mlp_only_layers": [0]},
    "experts": {"model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 6},
    "six experts": {"model_type": "qwen3_moe", "num_experts": 6, "moe_intermediate_size": 6},
}
FAULTS = [  # arguments, the model, words of the one line
    (("cluster.backend=inproc", "model.engine=megatron"), "model", "cluster.backend=inproc", "ranks_per_node=2"),
    ((*TWO, "cluster.ranks_per_node=1"), "model", "wants several ranks", "set cluster.ranks_per_node"),
    ((*TWO, "optim.name=sgd"), "model", "optim.name=sgd", "optim.name=adamw"),
    ((*TWO, "optim.options.lr={embedding: 1e-6}"), "model", "optim.options={'lr'", "leave them out"),
    ((*TWO, "algorithm.name=opd", "teacher.path=policy", "teacher.ema=0.9"), "model", "teacher.ema=0.9", "no average"),
    ((*TWO, "model.lora.rank=8"), "model", "model.lora with model.engine=megatron"),
    ((*TWO, "parallel.context=2"), "model", "parallel.context=2", "Transformer Engine"),
    (
        (*TWO, "model.engine_options.attention=auto"),
        *("model", "attention=auto: model.engine=megatron", "Transformer Engine", "always pads rows", "engine=sharded"),
    ),
    (
        (*TWO, "model.engine_options.share_prefix=true"),
        *("model", "share_prefix=true: model.engine=megatron", "share no prompt", "use model.engine=sharded"),
    ),
    ((*TWO, "parallel.sequence=2"), "model", "parallel.sequence=2", "no such division"),
    ((*TWO, "parallel.replicate=2"), "model", "parallel.replicate=2", "leave it out"),
    ((*FOUR, "parallel.tensor=4"), "model", "parallel.tensor=4", "2 key-value heads", "use one of 1, 2"),
    ((*FOUR, "parallel.pipeline=4"), "model", "parallel.pipeline=4", "2 layers", "use one of 1, 2"),
    (TWO, "mixed", "layers with different windows (8 and none)", "sharded"),
    (TWO, "mixed by type", "layers with different windows (8 and none)", "sharded"),
    (TWO, "yarn", "rope_type=yarn", "default, linear, llama3", "sharded"),
    (TWO, "dynamic", "rope_type=dynamic", "sharded"),
    (TWO, "gelu", "hidden_act=gelu", "silu", "sharded"),
    (TWO, "half biased", "attention_bias=True with mlp_bias=False", "sharded"),
    (TWO, "gemma", "is a gemma3_text", "llama, mistral, qwen2", "sharded"),
    (TWO, "some dense", "layers without experts", "sharded"),
    ((*FOUR, "parallel.expert=4"), "six experts", "parallel.expert=4", "6 experts", "use one of 1, 2, 3, 6"),
    (
        (*FOUR, "parallel.tensor=2", "parallel.expert=8"),
        "experts",
        "parallel.expert=8",
        "4 ranks of a stage",
        "1, 2, 4",
    ),
    ((*FOUR, "parallel.pipeline=2", "parallel.expert=4"), "experts", "parallel.expert=4", "2 ranks of a stage", "1, 2"),
    (
        (*FOUR, "parallel.tensor=2", "parallel.expert=4", f"{EXPERT_TENSOR}=2"),
        *("experts", f"{EXPERT_TENSOR}=2 does not divide the 1 data and tensor ranks", "use one of 1"),
    ),
    ((*FOUR, "parallel.pipeline=3"), "model", "parallel.pipeline=3", "4 ranks"),
    ((*TWO, f"{VIRTUAL}=2"), "model", f"{VIRTUAL}=2: chunks", "set parallel.pipeline"),
    ((*TWO, "parallel.pipeline=2", f"{VIRTUAL}=2"), "model", "has 2 layers, 1 on each of 2 stages", "use one of 1"),
    ((*TWO, f"{EXPERT_TENSOR}=2"), "model", f"{EXPERT_TENSOR}=2", "0 channels of an expert", "leave"),
    ((*FOUR, f"{EXPERT_TENSOR}=3"), "six experts", "does not divide the 4 data and tensor ranks", "use one of 1, 2, 4"),
    ((*FOUR, f"{EXPERT_TENSOR}=4"), "six experts", "6 channels of an expert", "use one of 1, 2, 3, 6"),
    (VEOMNI, "gemma", "model.engine=veomni: gemma3_text was not compared", "llama, qwen2", "sharded"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("megatron")
    write_rows(where / "rows.jsonl", 200)
    for name, config in MODELS.items():
        write_model(where / name, config=config)
    return where


@pytest.fixture(autouse=True)
def with_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "find_spec", lambda name: name)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(worker_python, "_engine_faults", lambda config, python: ())  # its packages are not here


def given(folder: Path, model: str, *args: str) -> list[str]:
    files = (f"data.train_files={folder}/rows.jsonl", f"data.eval_files={folder}/rows.jsonl")
    return [f"model.path={folder}/{model}", "model.device=cpu", *files, *args]


def faults(folder: Path, model: str, *args: str) -> list[str]:
    try:
        validate(load_config(given(folder, model, *args)).config)
    except ValueError as e:
        return str(e).splitlines()
    return []


def test_each_refusal_is_one_line_before_anything_starts(folder: Path) -> None:
    wrong = []
    for args, model, *words in FAULTS:
        found = faults(folder, model, *args)
        if len(found) != 1 or not all(word in found[0] for word in words):
            wrong.append((args, model, words, found))
    assert not wrong


@pytest.mark.parametrize("model", ["model", "all full", "all windows", "linear"])
def test_what_is_allowed(folder: Path, model: str) -> None:
    assert faults(folder, model, *FOUR, "parallel.tensor=2", "model.dtype=bfloat16") == []


def test_experts_may_be_spread_over_tensor_ranks(folder: Path) -> None:
    """More expert ranks than data ranks: tensor ranks, which have other tokens each, are among them."""
    for layout in ((*FOUR, "parallel.expert=4"), (*TWO, "parallel.expert=2")):
        assert faults(folder, "experts", *layout, "parallel.tensor=2") == []


def test_windows_are_those_of_transformers() -> None:
    """The defaults of what a config.json leaves out, and families that ignore a key, against the modules of layers."""
    from transformers import AutoConfig
    from transformers.models import llama, mistral, qwen2, qwen3, qwen3_moe

    layers = {
        "llama": llama.modeling_llama.LlamaAttention,
        "mistral": mistral.modeling_mistral.MistralAttention,
        "qwen2": qwen2.modeling_qwen2.Qwen2Attention,
        "qwen3": qwen3.modeling_qwen3.Qwen3Attention,
        "qwen3_moe": qwen3_moe.modeling_qwen3_moe.Qwen3MoeAttention,
    }
    sizes = {"hidden_size": 16, "num_hidden_layers": 30, "num_attention_heads": 2, "num_key_value_heads": 2}
    kinds = ({}, {"sliding_window": 8}, WINDOWED, WINDOWED | {"max_window_layers": 0}, {"use_sliding_window": True})
    seen = set()
    for kind, layer in layers.items():
        for more in (*kinds, {"sliding_window": None}):
            raw = {"model_type": kind, **sizes, **more}
            config = AutoConfig.for_model(**raw)
            made = [layer(config, i) for i in (0, 28, 29)]
            expected = {getattr(one, "sliding_window", window_of(config, kind)) for one in made}
            assert layer_windows(raw) == layer_windows(config.to_dict()) == expected, raw
            seen.add(frozenset(expected))
    assert len(seen) > 3


def window_of(config, kind):  # type: ignore[no-untyped-def]
    return config.sliding_window if kind == "mistral" else None


def test_rows_of_unlike_lengths_are_cut_where_they_pad_least() -> None:
    """The least cost over every way to cut them, and many rows in few tokens more than they have."""
    r = np.random.default_rng(0)
    for _ in range(20):
        widths, counts = sorted(r.integers(1, 900, 7).tolist(), reverse=True), r.integers(1, 4, 7).tolist()
        ways = [[0, *(i for i in range(1, 7) if bits >> i & 1), 7] for bits in range(0, 128, 2)]
        tried = [[slice(a, b) for a, b in itertools.pairwise(way)] for way in ways]
        able = [
            way for way in tried if all(padded(of, widths, counts) <= 2000 or of.stop - of.start == 1 for of in way)
        ]
        least = min(sum(padded(of, widths, counts) + PASS_TOKENS for of in way) for way in able)
        found = least_padding(widths, counts, 2000)
        assert found in able and sum(padded(of, widths, counts) + PASS_TOKENS for of in found) == least
    lengths = np.sort(np.clip(r.exponential(400, 512).astype(int), 8, 2000))[::-1].tolist()
    cut = least_padding(lengths, [1] * 512, 16384)
    assert sum(padded(of, lengths, [1] * 512) for of in cut) < 1.1 * sum(lengths)


def padded(of: slice, widths: list[int], counts: list[int]) -> int:
    return widths[of.start] * sum(counts[of])


def test_data_ranks_hold_whole_weights_and_gradients(folder: Path) -> None:
    facts, layout = describe_model(str(folder / "model")), Layout(world_size=4, tensor=2)
    work = RankWork(tokens=64, trains=True)
    found, shared = megatron_memory(facts, layout, work), memory(facts, layout, work)
    assert found["weights"] // shared["weights"] == found["gradient buffer"] // shared["gradients"] == 2
    assert abs(found["optimizer states"] - shared["optimizer states"]) <= 8
    alone = RankWork(tokens=64, trains=True, divides_states=False)
    assert megatron_memory(facts, layout, alone)["optimizer states"] == 2 * found["optimizer states"]
    deep = replace(facts, layers=4 * facts.layers)
    staged = Layout(world_size=2, pipeline=2)
    one, two = (
        megatron_memory(deep, staged, RankWork(tokens=64, trains=True, passes=8, virtual_stages=n)) for n in (1, 2)
    )
    assert one["weights"] == two["weights"] and one["activations"] > two["activations"]
    waiting = [of["activations"] + of["waiting passes"] for of in (one, two)]
    assert 1.2 < waiting[1] / waiting[0] < 1.4, "5 half passes in place of 2 whole ones"
    planned = make_plan(load_config(given(folder, "model", *FOUR, "parallel.tensor=2")).config).cluster
    assert planned is not None
    assert planned.layout == "4 ranks = 2 data x 2 tensor, in 2 copies of the model: a rank holds 1/2 of a model"
    assert planned.pools["main"].memory.items["actor weights"] == found["weights"]
