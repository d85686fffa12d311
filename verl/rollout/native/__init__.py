"""The native rollout engine: our own models, KV memory and kernels. Importing the room imports no torch."""
