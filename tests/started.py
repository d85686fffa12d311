"""The command line in processes of its own, forked from one that has made the imports: they cost a new interpreter some
5 s of a processor. tests/e2e/test_docs.py has `verl` and `python -m verl` as users call them, too."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

import verl
from verl.cli import main

IMPORTED = (
    *("verl.driver.launch", "verl.driver.supervised", "verl.model_engine.torch_engine", "verl.rollout.native.engine"),
    *("verl.transfer_queue.memory", "verl.weight_sync.local", "transformers.models.qwen3.modeling_qwen3", "numpy.ma"),
    *("verl.serve", "verl.rollout.server.app", "pyarrow.dataset", "pyarrow.compute", "fsspec.implementations.local"),
)


class Started:
    """See `subprocess.Popen`: what the tests ask of it. Its output goes behind what `log` holds."""

    def __init__(
        self,
        args: Sequence[str],
        log: Path,
        *,
        env: Mapping[str, str] = {},
        cwd: Path = Path(),
        entry: Callable[..., int] = main,
    ) -> None:
        log.touch()
        said = (str(log), {**os.environ, **env}, cwd.resolve(), str(Path(verl.__file__)), entry, list(args))
        self._process: ForkServerProcess = _server().Process(target=_run, args=said)
        self._process.start()
        atexit.register(self.kill)  # a test that failed leaves it; Python would wait for its end
        self.pid: int = self._process.pid  # type: ignore[assignment]

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout_s: float) -> int:
        self._process.join(timeout_s)
        if (code := self._process.exitcode) is None:
            raise subprocess.TimeoutExpired("verl", timeout_s)
        return code

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


@cache
def _server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    return context


def _run(log: str, env: dict[str, str], cwd: Path, checkout: str, entry: Callable[..., int], args: list[str]) -> None:
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        os.dup2(written, number)
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    assert set(IMPORTED) <= sys.modules.keys() and verl.__file__ == checkout, (verl.__file__, checkout)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.exit(entry(args))
