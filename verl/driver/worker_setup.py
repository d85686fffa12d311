"""The first actions of a process: threads, seeds, the device. It may have the packages of a worker alone."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import numpy as np
import torch
from transformers.utils import logging as transformers_logging

from verl.config.devices import saves_memory
from verl.config.schema import Config
from verl.driver.driver_host import DriverHost
from verl.errors import Refused
from verl.processes.memory import return_large_blocks
from verl.workers.group import DevicePlace


def set_up_process(config: Config) -> None:
    """Set threads, seeds and how memory is returned. Nothing samples from these generators in a step; user code may."""
    torch.set_num_threads(config.run.threads or os.cpu_count() or 1)
    if saves_memory(config):
        return_large_blocks()
    transformers_logging.disable_progress_bar()
    random.seed(config.run.seed)
    np.random.seed(config.run.seed % 2**32)
    torch.manual_seed(config.run.seed)
    if config.run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the first product runs on a GPU
        torch.use_deterministic_algorithms(True, warn_only=True)
        # otherwise each new tensor is filled, by a launch on a GPU
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def set_up_worker(config: Config, home: DriverHost | None, place: DevicePlace) -> None:
    """Set up a process that works beside others at the same time. Raise ValueError on a node that cannot work with the
    driver of `home`, or that does not have the device."""
    if home is not None:
        home.enter(another_python=place.another_python)
    if place.device != "cpu":
        found = torch.get_device_module(place.device)
        if not found.is_available():
            fix = "install a torch for it there, or give this pool no gpus_per_rank and no resource"
            raise Refused(f"torch sees no {place.device} device on this node, which the cluster says it has; {fix}")
        if place.device != "cuda":  # Ray hides other GPUs from a process; other devices it only counts
            found.set_device(place.number)
    threads = config.run.threads or max(1, (os.cpu_count() or 1) // place.neighbours)
    set_up_process(replace(config, run=replace(config.run, threads=threads)))
