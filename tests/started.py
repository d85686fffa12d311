"""The command line in processes of its own, forked from one that has made the imports: they cost a new interpreter some
5 s of a processor. tests/e2e/test_docs.py has `verl` and `python -m verl` as users call them, too."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

import verl
from verl.cli import main

IMPORTED = (
    *("verl.driver.launch", "verl.driver.supervised", "verl.model_engine.torch_engine", "verl.rollout.native.engine"),
    *("verl.transfer_queue.memory", "verl.weight_sync.tcp", "transformers.models.qwen3.modeling_qwen3", "numpy.ma"),
    *("verl.serve", "verl.rollout.server.app", "pyarrow.dataset", "pyarrow.compute", "fsspec.implementations.local"),
    "tests.frozen",
)


class Started:
    """A `subprocess.Popen` with the methods that the tests use. Its output is appended to `log`, or stderr's to
    `errors`; both may be devices."""

    def __init__(
        self,
        args: Sequence[str],
        log: Path,
        *,
        env: Mapping[str, str] = {},
        cwd: Path = Path(),
        errors: Path | None = None,
        entry: Callable[..., int] = main,
    ) -> None:
        log.touch()
        said = (
            (str(log), str(errors or log)),
            {**os.environ, **env},
            cwd.resolve(),
            str(Path(verl.__file__)),
            entry,
            list(args),
        )
        self._process: ForkServerProcess = server().Process(target=_run, args=said)
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


class Program(Started):
    """`python -c TEXT ...`, with its output."""

    def __init__(self, text: str, *args: object, log: Path) -> None:
        self.log = log
        super().__init__([text, *map(str, args)], log, entry=program)

    def first_line(self, timeout_s: float) -> str:
        """Wait for it."""
        end = time.monotonic() + timeout_s
        while "\n" not in (said := self.log.read_text()):
            assert time.monotonic() < end and self.poll() is None, f"it has no first line: {said[-2000:]}"
            time.sleep(0.01)
        return said.partition("\n")[0]

    def output(self, timeout_s: float) -> str:
        """All of it, once the program has ended."""
        self.wait(timeout_s)
        return self.log.read_text()


def program(args: Sequence[str]) -> int:
    """`python -c TEXT ...`, for `entry`."""
    sys.path.insert(0, "")
    sys.argv = ["-c", *args[1:]]
    exec(compile(args[0], "<string>", "exec"), vars(sys.modules["__main__"]))
    atexit._run_exitfuncs()  # as at the end of an interpreter; multiprocessing leaves them out
    return 0


def beside_modules(args: Sequence[str]) -> int:
    """`verl` with the working folder in PYTHONPATH, for `entry`; processes that it starts find it in `env`."""
    sys.path.insert(0, os.getcwd())
    return main(list(args))


def script(args: Sequence[str]) -> int:
    """`python FILE ...`, for `entry`."""
    sys.argv, sys.path[:0] = list(args), [str(Path(args[0]).resolve().parent)]
    runpy.run_path(args[0], run_name="__main__")
    return 0


def short_quickstart(args: Sequence[str]) -> int:
    """The quickstart with fewer rows, for `entry`."""
    from verl import quickstart

    quickstart.SFT_ROWS, quickstart.RL_ROWS, quickstart.HELD_OUT_ROWS = 300, 64, 8
    return quickstart.main(list(args))


@cache
def server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    return context


def _run(
    logs: tuple[str, str],
    env: dict[str, str],
    cwd: Path,
    checkout: str,
    entry: Callable[[Sequence[str]], int],
    args: list[str],
) -> None:
    for log, number, stream in zip(logs, (1, 2), (sys.stdout, sys.stderr), strict=True):
        written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(written, number)
        os.close(written)
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    assert set(IMPORTED) <= sys.modules.keys() and verl.__file__ == checkout, (verl.__file__, checkout)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.exit(entry(args))
