"""The experts of a layer as transformers keeps them, in two tensors, from the headers of a model's files. No torch."""

from __future__ import annotations

import re
from pathlib import Path

from verl.config.model_files import FURTHER, describe_model, read_weight_headers
from verl.model_engine.options import EXPERT_FACTORS
from verl.parameter_set import DOWN, GATE_UP

Sides = tuple[int, int, int]
"""The shape of a tensor of experts: [experts, outputs, inputs]."""
_ONE = re.compile(r"(.*\.experts)\.(\d+)\.(?:(gate_proj|w1)|(down_proj|w2))\.weight")
_ALL = re.compile(rf".*\.experts\.(?:{GATE_UP}|{DOWN})")


def fused_experts(folder: Path) -> dict[str, Sides]:
    """Return the tensors of experts of a causal LM, by their names in the model: gate_up_proj [experts, 2 ffn, hidden]
    and down_proj [experts, hidden, ffn] of each layer that has them. The folder has the experts one by one, or so. A
    model of a family that is not in `EXPERT_FACTORS` has none."""
    found = dict[str, Sides]()
    if describe_model(str(folder)).model_type not in EXPERT_FACTORS:
        return found
    for name, header in read_weight_headers(folder).items():
        if name.startswith(FURTHER):
            continue
        name = name.replace(".block_sparse_moe.", ".mlp.")  # of Mixtral
        if _ALL.fullmatch(name):
            experts, out, into = header.shape
            found[name] = (experts, out, into)
        elif one := _ONE.fullmatch(name):
            module, number, gate, _ = one.groups()
            out, into = header.shape
            key, count = f"{module}.{GATE_UP if gate else DOWN}", int(number) + 1
            found[key] = max(found.get(key, (0, 0, 0)), (count, 2 * out if gate else out, into))
    return found
