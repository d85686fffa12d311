"""`python -m verl.model_merger merge --local_dir RUN/checkpoints/step_N --target_dir OUT`: `verl export`."""
