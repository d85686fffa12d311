"""What the fields of TRL's GKDConfig and DistillationConfig are here: no alias, a line for who types one of them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

DISTILLATION: Mapping[str, str] = MappingProxyType(
    {
        "teacher_model_name_or_path": "teacher.path=FOLDER",
        "teacher_model_server_url": "teacher.path=URL",
        "use_teacher_server": "a URL as teacher.path says it",
        "teacher_model_revision": "teacher.path=FOLDER, of the revision that was downloaded",
        "teacher_model_init_kwargs": "a teacher is computed as the policy is (model.dtype, model.engine_options)",
        "beta": "algorithm.options.beta, of algorithm.name=gkd or gkd_topk: 0 forward, 1 reverse KL, as there",
        "lmbda": "algorithm.options.on_policy_share, with algorithm.options.stored_key=COLUMN for the other prompts",
        "seq_kd": "`verl generate` with the teacher, then `verl sft` on its answers",
        "temperature": "rollout.temperature, of both sides; teacher.temperature is the teacher's alone",
        "loss_top_k": "teacher.top_k, of the teacher's likeliest, of algorithm.name=gkd_topk; all: gkd",
        "loss_add_tail": "all other tokens are always one more outcome",
        "reverse_kl_top_1_mode": "of the drawn tokens alone is algorithm.name=opd",
        "use_fused_linear_loss": "logits are never made for more than a chunk of tokens",
        "max_new_tokens": "rollout.max_response_tokens",
        "max_completion_length": "rollout.max_response_tokens",
        "num_generations": "step.samples_per_prompt",
        "disable_dropout": "dropout is off",
    }
)
