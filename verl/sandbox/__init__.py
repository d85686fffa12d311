"""Run user code in worker processes that can be killed, have limited memory and are replaced; run a model's code
isolated."""
