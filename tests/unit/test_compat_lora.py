"""verl's and PEFT's names of LoRA's settings: each is a setting here, or is refused with its reason."""

import pytest
from each import each
from translating import translate

from verl.config.compat.table import PEFT, unknown_key
from verl.config.load import load_config
from verl.model_engine.lora_spec import trained_by

M = "actor_rollout_ref.model."
BASE = ("model.path=m", "algorithm.name=grpo")
SAVED = {"modules_to_save": ["visual.merger"]}


@each(
    "keys, expected",
    [
        ((f"{M}lora_rank=32",), {"rank": 32}),
        ((f"{M}lora_rank=32", f"{M}lora_alpha=16"), {"rank": 32, "alpha": 16}),
        (("model.lora_rank=8", "model.lora_alpha=8", "model.target_modules=all-linear"), {"rank": 8, "alpha": 8}),
        ((f"{M}lora_rank=8", f"{M}target_modules=[q_proj,v_proj]"), {"rank": 8, "targets": ["q_proj", "v_proj"]}),
        ((f"{M}lora_rank=8", f"{M}exclude_modules='.*visual.*'"), {"rank": 8, "exclude": [".*visual.*"]}),
        ((f"{M}lora_rank=8", f"{M}lora_adapter_path=/"), {"path": "/"}),
        ((f"{M}lora.rank=16", f"{M}lora.alpha=32", f"{M}lora.merge=True"), {"rank": 16, "alpha": 32}),
        (
            (f"{M}lora.rank=16", f"{M}lora.target_modules=[linear_qkv,linear_proj]", f"{M}lora.dropout=0.0"),
            {"rank": 16, "targets": ["q_proj", "k_proj", "v_proj", "o_proj"]},
        ),
        ((f"{M}lora_rank=0", f"{M}lora_alpha=16", f"{M}target_modules=all-linear", f"{M}lora.dropout=0.5"), {}),
        (("critic.model.lora_rank=8", f"{M}lora_rank=8", f"{M}lora_alpha=4"), {"rank": 8, "alpha": 4}),
        ((f"{M}lora_rank=8", f'{M}modules_to_save=["visual.merger"]'), {"rank": 8, **SAVED}),
        (("model.lora_rank=8", "model.modules_to_save=[visual.merger]"), {"rank": 8, **SAVED}),
        ((f"{M}lora_rank=8", f"{M}modules_to_save=null", "critic.model.modules_to_save=[]"), {"rank": 8}),
        ((f"{M}lora_rank=8", f"{M}modules_to_save=[]"), {"rank": 8}),
        ((f"{M}lora_rank=0", f"{M}modules_to_save=[visual.merger]"), {}),
        ((f"{M}lora_adapter_path=/", f"{M}modules_to_save=[x]", f"{M}exclude_modules=[y]"), {"path": "/"}),
        (
            (f"{M}lora_rank=8", f"{M}modules_to_save=[visual.merger]", "critic.model.modules_to_save=[visual.merger]"),
            {"rank": 8, **SAVED},
        ),
    ],
)
def test_keys_of_verl(keys, expected):
    found = trained_by(load_config([*BASE, *keys]).config.model.lora)
    wanted = trained_by(load_config([*BASE, *(f"model.lora.{k}={v}" for k, v in expected.items())]).config.model.lora)
    assert found == wanted and (found is not None) == bool(expected)


def test_the_scale_is_verls_where_the_script_does_not_name_it():
    def alpha(*keys: str) -> float:
        found = trained_by(load_config([*BASE, *keys], verl_defaults="rl").config.model.lora)
        assert found is not None
        return found.alpha

    assert alpha(f"{M}lora_rank=8") == 16 and alpha(f"{M}lora.rank=8") == 32
    assert alpha(f"{M}lora_rank=8", f"{M}lora_alpha=64") == 64
    assert [s.key for s in translate([f"{M}lora_rank=8"]).settings] == ["model.lora.rank"]


@each(
    "keys, text",
    [
        ((f"{M}lora.rank=8", f"{M}lora.dropout=0.1"), "a pass draws no random numbers"),
        ((f"{M}lora.rank=8", f"{M}lora.type=canonical_lora"), "plain LoRA is trained here"),
        ((f"{M}lora.rank=8", f"{M}lora.lora_B_init_method=normal"), "training starts at the base model"),
        ((f"{M}lora.rank=8", f"{M}lora.new_option=1"), "no such option"),
        ((f"{M}lora_rank=8", "critic.model.lora_rank=4", "algorithm.adv_estimator=gae"), "make them agree"),
        (("critic.model.lora_rank=4", "algorithm.adv_estimator=gae"), "make them agree"),
        ((f"{M}lora_rank=many",), "expected a number"),
        (
            (f"{M}lora_rank=8", f"{M}modules_to_save=visual.merger"),
            r"modules_to_save=visual.merger: not a list of names",
        ),
        ((f"{M}lora_rank=8", f"{M}modules_to_save=False"), "modules_to_save=False: not a list of names"),
        (
            (f"{M}lora_rank=8", f"{M}modules_to_save=[1]"),
            "not a list of names; write .*modules_to_save=\\[visual.merger]",
        ),
        ((f"{M}lora_rank=8", "critic.model.modules_to_save=[x]", "algorithm.adv_estimator=gae"), "make them agree"),
    ],
)
def test_what_would_train_something_else_is_refused(keys, text):
    with pytest.raises(ValueError, match=text):
        translate(keys)


def test_fields_of_a_peft_config_name_our_settings():
    for field, here in PEFT.items():
        if "." not in here:
            continue
        key, _, value = here.partition("=")
        assert load_config([*BASE, "model.lora.rank=4", f"{key}={value or PROBE[key]}"])
        assert unknown_key(f"peft_config.{field}").endswith(f"PEFT's name; here: {here}")
    for field in ("lora_dropout", "use_dora", "bias"):
        with pytest.raises(ValueError, match="PEFT's name; here: nothing: .*"):
            load_config([*BASE, f"{field}=x"])
    with pytest.raises(ValueError, match="model.lora.r=8: unknown; .*rank"):
        load_config([*BASE, "model.lora.r=8"])


PROBE = {
    "model.lora.rank": "4",
    "model.lora.alpha": "8",
    "model.lora.rslora": "true",
    "model.lora.targets": "[q_proj]",
    "model.lora.exclude": "[q_proj]",
    "model.lora.modules_to_save": "[lm_head]",
}
