"""TRL's `peft_config` in Python: PEFT's fields become the keys of LoRA, or are refused by name."""

import sys

import pytest
from each import check_each

from verl import GRPOTrainer, Policy, Trainer
from verl.config.compat.peft import lora_keys, lora_spec
from verl.config.load import load_config
from verl.model_engine.lora_spec import LoraSpec

ALL = {"target_modules": "all-linear"}


def test_fields_are_the_keys_of_lora():
    given = {"r": 4, "lora_alpha": 16, "use_rslora": True, "target_modules": ["v_proj", "q_proj"], "bias": "none"}
    assert lora_keys(given | {"exclude_modules": r".*\.0\..*", "lora_dropout": 0.0, "task_type": "CAUSAL_LM"}) == {
        "model.lora.rank": 4,
        "model.lora.alpha": 16,
        "model.lora.rslora": True,
        "model.lora.targets": ["q_proj", "v_proj"],
        "model.lora.exclude": [r".*\.0\..*"],
    }
    defaults = {"model.lora.rank": 8, "model.lora.alpha": 8, "model.lora.targets": ["all-linear"]}
    assert lora_keys(ALL) == defaults, "PEFT's defaults, which are not those of model.lora"
    experts = {"target_modules": [], "target_parameters": ["mlp.experts.down_proj"]}
    assert lora_keys(experts)["model.lora.targets"] == ["mlp.experts.down_proj"]
    assert lora_keys(ALL | {"target_parameters": ["experts.x"]})["model.lora.targets"] == ["all-linear", "experts.x"]
    shared = experts | {"exclude_modules": ["shared_experts.down_proj"]}
    assert lora_keys(shared)["model.lora.exclude"] == ["shared_experts.down_proj"]
    assert lora_spec(ALL | {"r": 4}, 7) == LoraSpec(rank=4, alpha=8, targets=["all-linear"], seed=7)
    assert lora_keys(ALL | {"modules_to_save": ["lm_head"]})["model.lora.modules_to_save"] == ["lm_head"]
    assert lora_spec(None, 7) is None
    assert lora_keys(ALL | {"r": 0, "lora_alpha": 0})["model.lora.alpha"] == 0, "for the bounds of the keys to refuse"


def test_what_would_train_something_else_is_refused_by_name():
    base = "it changes the base model"
    cases = (
        ({"lora_dropout": 0.05}, "peft_config.lora_dropout=0.05: a pass draws no random numbers"),
        ({"use_dora": True}, "peft_config.use_dora=True: magnitudes"),
        ({"bias": "all"}, "peft_config.bias=all"),
        ({"init_lora_weights": "pissa"}, f"peft_config.init_lora_weights=pissa: {base}"),
        ({"init_lora_weights": "pissa_niter_4"}, f"pissa_niter_4: {base}"),
        ({"init_lora_weights": "olora"}, f"peft_config.init_lora_weights=olora: {base}"),
        ({"init_lora_weights": False}, "peft_config.init_lora_weights=False: B would not start at 0"),
        ({"init_lora_weights": "gaussian"}, "peft_config.init_lora_weights=gaussian: A is drawn uniformly"),
        ({"layers_to_transform": [0]}, "peft_config.layers_to_transform=[0]: here: model.lora.targets"),
        ({"rank_pattern": {"q_proj": 2}}, "peft_config.rank_pattern="),
        ({"rnak": 4}, "peft_config.rnak=4: no such setting here"),
        ({"target_parameters": ["down_proj"]}, "peft_config.target_parameters=down_proj: only experts get factors"),
        (
            {"target_parameters": ["mlp.experts.down_proj"], "exclude_modules": r".*\.1\.mlp\.experts.*"},
            r"peft_config.exclude_modules=.*\.1\.mlp\.experts.*: PEFT excludes modules alone",
        ),
        ({"task_type": "SEQ_CLS"}, "peft_config.task_type=SEQ_CLS"),
        ({"peft_type": "ADALORA"}, "peft_config.peft_type=ADALORA: plain LoRA"),
        ({"target_modules": None}, "peft_config.target_modules=None: PEFT chooses layers by the model's family"),
    )

    def refused(case):
        with pytest.raises(ValueError) as found:
            lora_keys(ALL | case[0])
        assert case[1] in str(found.value) and "\n" not in str(found.value), found.value

    check_each(cases, refused)
    with pytest.raises(ValueError, match="peft_config is a list: give a LoraConfig of PEFT, or a dict"):
        lora_keys([])


def test_an_object_of_peft_is_read_as_its_fields(reference):
    peft = reference("peft")
    given = peft.LoraConfig(r=4, target_modules=["v_proj", "q_proj"], task_type="CAUSAL_LM", lora_alpha=2)
    expected = {"model.lora.rank": 4, "model.lora.alpha": 2, "model.lora.targets": ["q_proj", "v_proj"]}
    assert lora_keys(given) == expected
    assert lora_keys(peft.LoraConfig(target_modules="all-linear"))["model.lora.targets"] == ["all-linear"]
    for other in (peft.LoraConfig(lora_dropout=0.1), peft.AdaLoraConfig(total_step=4), peft.IA3Config()):
        with pytest.raises(ValueError, match=r"peft_config\.(lora_dropout|peft_type)="):
            lora_keys(other)


def test_the_trainers_take_it_as_keys_before_the_overrides(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    layers = [r"[a'b]\.\d+", r"model\.layers\.1\..*", "q_proj"]
    lora = {"r": 4, "use_rslora": True, "target_modules": layers}
    trainer = GRPOTrainer("m", train_data="rows.jsonl", peft_config=lora, overrides=["model.lora.alpha=2"])
    config = load_config(trainer.args).config
    assert config.model.lora == {"rank": 4, "alpha": 2, "rslora": True, "targets": layers}
    with pytest.raises(ValueError, match=r"peft_config\.use_dora=True"):
        Trainer({"actor": Policy("m", peft_config=ALL | {"use_dora": True}), "data": "rows.jsonl"}).train()
