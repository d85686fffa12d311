"""Our keys for the names that users of TRL type: fields of its GRPOConfig and of transformers' TrainingArguments. They
are not aliases, since some of them mean other numbers; such a name on the command line is refused, with our key."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_MICRO = (
    "step.max_tokens_per_microbatch: tokens of a pass; a step has step.prompts_per_step x step.samples_per_prompt rows"
)
_STEPS = "; a step has step.updates_per_step x step.epochs_per_step optimizer steps, which TRL counts"
TRAINER: Mapping[str, str] = MappingProxyType(
    {
        # -- transformers' TrainingArguments
        "learning_rate": "optim.lr",
        "weight_decay": "optim.weight_decay",
        **dict.fromkeys(("adam_beta1", "adam_beta2"), "optim.betas"),
        "adam_epsilon": "optim.eps",
        "max_grad_norm": "optim.clip_grad_norm",
        "lr_scheduler_type": "optim.schedule",
        "lr_scheduler_kwargs": "optim.min_lr_ratio and optim.decay_ratio",
        "warmup_steps": "optim.warmup_steps",
        "warmup_ratio": "optim.warmup_ratio",
        "optim_args": "optim.options",
        "max_steps": f"run.total_steps{_STEPS}",
        "num_train_epochs": "run.total_epochs",
        **dict.fromkeys(
            ("per_device_train_batch_size", "gradient_accumulation_steps", "generation_batch_size"), _MICRO
        ),
        "auto_find_batch_size": _MICRO,
        "per_device_eval_batch_size": "rollout.max_concurrent_sequences",
        "gradient_checkpointing": "model.gradient_checkpointing=full",
        "activation_checkpointing": "model.gradient_checkpointing=full",
        **dict.fromkeys(("bf16", "fp16"), "model.dtype=bfloat16"),
        "torch_compile": "model.engine_options={compile: true}",
        "use_liger_kernel": "fused kernels are used where they are faster (`verl doctor` lists them)",
        "use_cpu": "model.device=cpu",
        "full_determinism": "run.deterministic=true",
        "data_seed": "data.seed",
        "dataloader_num_workers": "data.num_workers",
        "save_steps": f"run.save_every_steps{_STEPS}",
        "save_total_limit": "run.keep_last_checkpoints",
        **dict.fromkeys(("load_best_model_at_end", "metric_for_best_model"), "run.keep_best"),
        "eval_steps": f"run.eval_every_steps{_STEPS}",
        "eval_on_start": "run.eval_before",
        **dict.fromkeys(("logging_steps", "logging_strategy"), "every step is in metrics.jsonl"),
        "report_to": "track.sinks and track.project",
        "run_name": "run.name",
        "output_dir": "run.root_dir and run.name",
        "resume_from_checkpoint": "run.resume",
        **dict.fromkeys(("fsdp", "fsdp_config", "deepspeed"), "cluster.ranks_per_node: weights are sharded over ranks"),
        "model_name_or_path": "model.path",
        "dataset_name": "data.train_files",
        "reward_funcs": "reward.path=FILE.py:FUNCTION",
        # -- TRL's GRPOConfig
        "max_prompt_length": "data.max_prompt_tokens",
        "num_generations_eval": "eval.samples_per_prompt",
        "num_iterations": "step.epochs_per_step",
        "steps_per_generation": "step.updates_per_step: optimizer steps, where TRL counts passes",
        "epsilon": "algorithm.clip_low and algorithm.clip_high: TRL's is both, if epsilon_high is not given",
        "epsilon_high": "algorithm.clip_high",
        "delta": "algorithm.options.ratio_max",
        "loss_type": "algorithm.name (`verl show algorithms`) and algorithm.aggregation",
        "scale_rewards": "algorithm.normalize_by_std; algorithm.options.scale_rewards",
        "importance_sampling_level": "algorithm.name=gspo, or gspo_token",
        "mask_truncated_completions": "algorithm.options.mask_truncated",
        "entropy_coef": "algorithm.entropy_coef",
        "top_entropy_quantile": "algorithm.options.top_entropy_quantile",
        "off_policy_mask_threshold": "algorithm.options.off_policy_delta",
        "use_bias_correction_kl": "algorithm.options.kl_loss_ratio_corrected",
        "reward_weights": "algorithm.options.reward_weights, of algorithm.name=gdpo",
        "multi_objective_aggregation": "algorithm.name=gdpo",
        **dict.fromkeys(
            ("sapo_temperature_neg", "sapo_temperature_pos"), "algorithm.options.tau_negative and its tau_positive"
        ),
        "vllm_importance_sampling_correction": "algorithm.correction",
        **dict.fromkeys(
            ("vllm_importance_sampling_mode", "vllm_importance_sampling_cap"),
            "algorithm.correction and algorithm.options.correction_high",
        ),
        "cast_lm_head_to_fp32": "model.head_dtype=float32",
    }
)
"""A field -> our key, or what is there in its place."""
