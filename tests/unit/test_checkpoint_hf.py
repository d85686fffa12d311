"""The exported folder is a Hugging Face model: plain from_pretrained loads it, with equal logits."""

from __future__ import annotations

import json
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
)

from verl.checkpoint import safetensors_file
from verl.checkpoint.hf import HfExport
from verl.models.tiny import CHAT_TEMPLATE, character_tokenizer

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 64}


def qwen3(**changes) -> Qwen3ForCausalLM:
    config = SIZES | {"head_dim": 8, "num_key_value_heads": 2, "tie_word_embeddings": True} | changes
    return Qwen3ForCausalLM(Qwen3Config(**config))


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=False))


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=64))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def source(path: Path, model) -> Path:
    """The folder that a run starts from; afterwards the weights move, as in training."""
    model.save_pretrained(path)
    tokenizer = character_tokenizer("abcdefgh ")
    tokenizer.save_pretrained(path)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.02 * torch.randn_like(p))
    return path


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(24).reshape(2, 12)).logits


def loaded(path: Path, kind=AutoModelForCausalLM, **options):
    model, info = kind.from_pretrained(path, output_loading_info=True, **options)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    return model


def export_hf(directory: Path, *, tensors, source_dir: Path, **more) -> list[str]:
    """Names of the files with weights."""
    HfExport(source_dir, **more).write(directory, tensors)
    return sorted(p.name for p in directory.glob("*.safetensors"))


def in_bfloat16(model):
    return ((name, tensor.bfloat16()) for name, tensor in model.state_dict().items())


def stored(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("make", [qwen3, llama, gpt2], ids=["qwen3-tied", "llama-untied", "gpt2"])
def test_plain_transformers_loads_it_with_equal_logits(tmp_path: Path, make) -> None:
    model = make()
    src = source(tmp_path / "src", model)
    before = {p.name: p.read_bytes() for p in src.iterdir()}
    exported = export_hf(tmp_path / "out", tensors=model.state_dict().items(), source_dir=src)
    assert exported == ["model.safetensors"]
    again = loaded(tmp_path / "out")
    assert type(again) is type(model) and again.dtype == torch.float32
    assert logits(again).equal(logits(model))
    assert not logits(again).equal(logits(loaded(src))), "these are the trained weights, not the source's"
    assert {p.name: p.read_bytes() for p in src.iterdir()} == before, "the source is only read"
    tied = model.config.tie_word_embeddings
    assert len(stored(tmp_path / "out")) == len(model.state_dict()) - tied, "tied weights are stored once"


def test_export_in_bfloat16(tmp_path: Path) -> None:
    model = qwen3()
    src = source(tmp_path / "src", model)
    export_hf(tmp_path / "out", tensors=in_bfloat16(model), source_dir=src)
    again = loaded(tmp_path / "out")
    assert (
        again.dtype == torch.bfloat16 and json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"
    )
    model.save_pretrained(tmp_path / "reference")
    assert logits(again).equal(logits(loaded(tmp_path / "reference", dtype=torch.bfloat16)))


def test_dtype_in_nested_and_older_configs(tmp_path: Path) -> None:
    model = llama()
    src = source(tmp_path / "src", model)
    config = json.loads((src / "config.json").read_text())
    config |= {"torch_dtype": "float16", "vision_config": {"torch_dtype": "float16", "x": 1}, "note": "mine"}
    (src / "config.json").write_text(json.dumps(config))
    export_hf(tmp_path / "out", tensors=in_bfloat16(model), source_dir=src)
    found = json.loads((tmp_path / "out/config.json").read_text())
    assert (found["dtype"], found["torch_dtype"], found["note"]) == ("bfloat16", "bfloat16", "mine")
    assert found["vision_config"] == {"torch_dtype": "bfloat16", "x": 1}


def test_shards_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_file, "MAX_SHARD_BYTES", 20_000)
    model = qwen3()
    src = source(tmp_path / "src", model)
    exported = export_hf(tmp_path / "out", tensors=model.state_dict().items(), source_dir=src)
    n = len(exported)
    assert n > 2 and exported[0] == f"model-00001-of-{n:05d}.safetensors"
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(p.numel() * 4 for p in model.parameters())
    assert set(index["weight_map"].values()) == set(exported) and not list((tmp_path / "out").glob("*.part"))
    assert logits(loaded(tmp_path / "out")).equal(logits(model))


def test_weights_of_two_dtypes(tmp_path: Path) -> None:
    """Norms kept in float32 beside bfloat16 matrices: one file for each item size, and the config names the larger
    part."""
    model = qwen3()
    src = source(tmp_path / "src", model)
    weights = {k: v if "norm" in k else v.bfloat16() for k, v in model.state_dict().items()}
    exported = export_hf(tmp_path / "out", tensors=weights.items(), source_dir=src)
    assert len(exported) == 2
    again = loaded(tmp_path / "out", dtype=torch.float32)
    assert all(v.equal(weights[k].float()) for k, v in again.state_dict().items())
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"


def test_memory_holds_a_tensor_or_two_not_the_model(tmp_path: Path) -> None:
    model = qwen3(num_hidden_layers=6, hidden_size=128, intermediate_size=512, head_dim=32, vocab_size=512)
    src = source(tmp_path / "src", model)
    alive_bytes, most_bytes = 0, 0

    def died(size_bytes: int) -> None:
        nonlocal alive_bytes
        alive_bytes -= size_bytes

    def copy(p: torch.Tensor) -> torch.Tensor:
        nonlocal alive_bytes, most_bytes
        array = p.detach().numpy().copy()
        weakref.finalize(array, died, array.nbytes)  # when no tensor looks at it any more
        alive_bytes += array.nbytes
        most_bytes = max(most_bytes, alive_bytes)
        return torch.from_numpy(array)

    stream = ((name, copy(p)) for name, p in model.state_dict().items())
    export_hf(tmp_path / "out", tensors=stream, source_dir=src)
    sizes = [p.nbytes for p in model.parameters()]
    assert most_bytes <= 2 * max(sizes) < sum(sizes) / 8


def test_tokenizer_template_and_generation_config_come_along(tmp_path: Path) -> None:
    model = qwen3()
    src = source(tmp_path / "src", model)
    (src / "generation_config.json").write_text(json.dumps({"temperature": 0.7, "eos_token_id": [3]}))
    (src / "training_args.bin").write_bytes(b"no")
    (src / "pytorch_model.bin").write_bytes(b"old weights")
    (src / "LICENSE").write_text("apache")
    export_hf(tmp_path / "out", tensors=model.state_dict().items(), source_dir=src)
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert {"LICENSE", "tokenizer.json", "generation_config.json"} <= names
    assert not {"training_args.bin", "pytorch_model.bin"} & names
    assert loaded(tmp_path / "out").generation_config.temperature == 0.7
    messages = [{"role": "user", "content": "abc"}]
    a, b = (AutoTokenizer.from_pretrained(p) for p in (src, tmp_path / "out"))
    assert a.apply_chat_template(messages) == b.apply_chat_template(messages)
    assert a("abc")["input_ids"] == b("abc")["input_ids"]


def test_another_tokenizer_and_template(tmp_path: Path) -> None:
    model = qwen3()
    src = source(tmp_path / "src", model)
    character_tokenizer("xyz").save_pretrained(tmp_path / "tok")
    template = CHAT_TEMPLATE.replace("<|user|>", "")
    export_hf(
        tmp_path / "out",
        tensors=model.state_dict().items(),
        source_dir=src,
        tokenizer_dir=tmp_path / "tok",
        chat_template=template,
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert "x" in tokenizer.get_vocab() and "a" not in tokenizer.get_vocab()
    assert tokenizer.chat_template == template


def test_a_hub_cache_with_links_becomes_files(tmp_path: Path) -> None:
    model = qwen3()
    src = source(tmp_path / "blobs", model)
    links = tmp_path / "snapshot"
    links.mkdir()
    for p in src.iterdir():
        (links / p.name).symlink_to(p)
    export_hf(tmp_path / "out", tensors=model.state_dict().items(), source_dir=links)
    assert not any(p.is_symlink() for p in (tmp_path / "out").iterdir())


def test_a_source_without_weights_or_architectures(tmp_path: Path) -> None:
    model = llama()
    src = source(tmp_path / "src", model)
    (src / "model.safetensors").unlink()
    config = json.loads((src / "config.json").read_text())
    del config["architectures"]
    (src / "config.json").write_text(json.dumps(config))
    export_hf(tmp_path / "out", tensors=model.state_dict().items(), source_dir=src)
    assert logits(loaded(tmp_path / "out")).equal(logits(model))


def test_another_head_by_override(tmp_path: Path) -> None:
    src = source(tmp_path / "src", qwen3())
    reward = Qwen3ForSequenceClassification(Qwen3Config.from_pretrained(src, num_labels=1, pad_token_id=0))
    export_hf(
        tmp_path / "out",
        tensors=reward.state_dict().items(),
        source_dir=src,
        config_overrides={"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1, "pad_token_id": 0},
    )
    again = loaded(tmp_path / "out", AutoModelForSequenceClassification)
    assert again.score.weight.equal(reward.score.weight)


# ---- tied weights


def test_a_tie_by_its_alias_alone_is_stored_under_its_owner(tmp_path: Path) -> None:
    model = qwen3()
    src = source(tmp_path / "src", model)
    weights = [(k, v) for k, v in model.state_dict().items() if k != "model.embed_tokens.weight"]
    export_hf(tmp_path / "out", tensors=weights, source_dir=src)
    assert logits(loaded(tmp_path / "out")).equal(logits(model))


def test_a_broken_tie_is_refused_and_can_be_exported_untied(tmp_path: Path) -> None:
    model = qwen3()
    src = source(tmp_path / "src", model)
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    weights["lm_head.weight"] += 1
    with pytest.raises(ValueError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        export_hf(tmp_path / "bad", tensors=weights.items(), source_dir=src)
    export_hf(
        tmp_path / "out", tensors=weights.items(), source_dir=src, config_overrides={"tie_word_embeddings": False}
    )
    assert loaded(tmp_path / "out").lm_head.weight.equal(weights["lm_head.weight"])


def test_a_class_that_transformers_does_not_have(tmp_path: Path) -> None:
    model = qwen3()
    src = source(tmp_path / "src", model)
    config = json.loads((src / "config.json").read_text()) | {"architectures": ["MyOwnForCausalLM"]}
    (src / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="is not a class of transformers and its embeddings are tied"):
        export_hf(tmp_path / "bad", tensors=model.state_dict().items(), source_dir=src)


# ---- what would load as something else


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_experts_are_exported_one_by_one_as_transformers_saves_them(tmp_path: Path, kind: str) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "moe_intermediate_size": 12, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 30, "num_experts": 3, "head_dim": 8}
    tied = {"tie_word_embeddings": True, "num_local_experts": 3, "num_experts_per_tok": 2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **tied))
    model.save_pretrained(tmp_path / "source")
    HfExport(tmp_path / "source").write(tmp_path / "out", model.state_dict().items())
    ours, theirs = (load_file(tmp_path / of / "model.safetensors") for of in ("out", "source"))
    assert ours.keys() == theirs.keys() and any(".experts.2." in name for name in ours)
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def test_missing_foreign_and_doubled_weights_are_refused(tmp_path: Path) -> None:
    model = llama()
    src = source(tmp_path / "src", model)
    weights = list(model.state_dict().items())
    with pytest.raises(ValueError, match=r"2 weights of the model are missing in the export, e.g. \['model.embed"):
        export_hf(
            tmp_path / "a",
            tensors=[w for w in weights if "embed" not in w[0] and w[0] != "model.norm.weight"],
            source_dir=src,
        )
    with pytest.raises(ValueError, match=r"21 tensors are no weights of the model .*module\.lm_head"):
        export_hf(tmp_path / "b", tensors=[(f"module.{k}", v) for k, v in weights], source_dir=src)
    with pytest.raises(ValueError, match=r"lm_head.weight comes twice"):
        export_hf(tmp_path / "c", tensors=[*weights, weights[-1]], source_dir=src)
    with pytest.raises(ValueError, match="no tensors"):
        export_hf(tmp_path / "d", tensors=[], source_dir=src)


def test_names_of_the_files_may_differ_from_those_of_the_modules(tmp_path: Path) -> None:
    """GPT-2 on the hub has no `transformer.` prefix: an engine may use either scheme, but a whole one."""
    model = gpt2()
    src = source(tmp_path / "src", model)
    hub = {k.removeprefix("transformer."): v for k, v in model.state_dict().items() if k != "lm_head.weight"}
    (src / "model.safetensors").unlink()
    export_hf(tmp_path / "tmp", tensors=model.state_dict().items(), source_dir=src)
    from safetensors.torch import save_file

    save_file(hub, src / "model.safetensors", metadata={"format": "pt"})
    export_hf(tmp_path / "out", tensors=hub.items(), source_dir=src)
    assert logits(loaded(tmp_path / "out")).equal(logits(model))


def test_an_export_does_not_mix_with_older_weights(tmp_path: Path) -> None:
    model = llama()
    src = source(tmp_path / "src", model)
    with pytest.raises(ValueError, match="already holds weights"):
        export_hf(src, tensors=model.state_dict().items(), source_dir=src)
    with pytest.raises(ValueError, match=r"has no config\.json"):
        export_hf(tmp_path / "out", tensors=model.state_dict().items(), source_dir=tmp_path)
