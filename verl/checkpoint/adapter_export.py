"""Export of a LoRA set as the folder of an adapter, which PEFT, serving engines and `model.lora.path` can load."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from torch import Tensor

from verl.checkpoint.safetensors_file import Shard
from verl.checkpoint.score import ADAPTER_SCORE
from verl.checkpoint.score import WEIGHT as SCORE_WEIGHT
from verl.config.adapter import CONFIG, WEIGHTS, peft_config
from verl.parameter_set import ParameterSet


def as_peft(name: str, factor: Tensor) -> Tensor:
    """Return a tensor of an adapter as PEFT's file has it: factors of experts are A [experts x rank, in], one expert
    below the other, and B [out, rank x experts], with the experts' columns interleaved. Others are as they are."""
    if factor.dim() < 3:
        return factor
    if name.endswith(".lora_A.weight"):
        return factor.flatten(0, 1)
    return factor.permute(1, 2, 0).flatten(1).contiguous()


def write_adapter(directory: Path, parameters: ParameterSet, base: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write adapter_config.json and the tensors, one at a time. parameters: the LoRA set · base: the folder of its base
    model · tensors: (PEFT's name, tensor), all of one dtype. Weights that the set replaces, and a reward model's head,
    are written whole."""
    names = [ADAPTER_SCORE, *(name for module in parameters.targets for name in parameters.factors(module))]
    names += map(parameters.whole_name, parameters.replaced)
    with closing(Shard(directory / f"{WEIGHTS}.part", names)) as shard:
        for name, tensor in tensors:
            shard.add(name, as_peft(name, tensor))
        shard.finish()
    shard.path.rename(directory / WEIGHTS)
    config = peft_config(parameters, str(base)) | {"task_type": "CAUSAL_LM"}
    if modules := [*dict.fromkeys(name.rpartition(".")[0] for name in parameters.replaced)]:
        config["modules_to_save"] = modules
    if ADAPTER_SCORE in shard.names:
        config |= {"task_type": "SEQ_CLS", "modules_to_save": [*modules, SCORE_WEIGHT.partition(".")[0]]}
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
