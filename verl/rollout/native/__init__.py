"""The native rollout engine: our own models, KV memory and kernels. Importing this package imports no torch."""
