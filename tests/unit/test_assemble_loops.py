"""The loops that play the tasks of a run, and their process."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from verl.config.schema import Config
from verl.config.tree import changed
from verl.driver import assemble_loops


def test_no_resume_and_no_restart_repeats_what_a_tool_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("unchecked_tokenizer", "load_loops", "stop_ids", "find_model_folder"):
        monkeypatch.setattr(assemble_loops, name, lambda *given: None)
    config = Config()
    config = changed(config, {"run.threads": torch.get_num_threads()})

    def drawn(seed: int, attempt: int, start: int) -> tuple[float, float]:
        assemble_loops.loops_there((changed(config, {"run.seed": seed}), attempt), start)
        return random.random(), float(np.random.random())

    which = [(seed, attempt, start) for seed in (1, 2) for attempt in (0, 1) for start in (0, 1)]
    found = [drawn(*one) for one in which]
    assert len(set(found)) == len({one for _, one in found}) == 8 and found == [drawn(*one) for one in which]
