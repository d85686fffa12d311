"""The display of a running run: a live panel on a terminal, one line per step in a log file."""

from __future__ import annotations

import io
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import IO, Any, NamedTuple, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from verl.track.metrics import PHASE_COLORS, held_out_word

_SPARKS = "▁▂▃▄▅▆▇█"
_ACCURACY = ("eval/acc/greedy", "eval/acc/sampled")


class _Field(NamedTuple):
    label: str
    metrics: tuple[str, ...]  # the first of them that a step has is shown
    show: Callable[[float], str]
    spark: bool = False

    def of(self, values: Mapping[str, float]) -> float | None:
        return next((values[name] for name in self.metrics if name in values), None)


def compact(value: float) -> str:
    """Format a number with three significant digits and a magnitude letter: 0.413, 1.2e-06, 3.42k, 12.8M."""
    if not math.isfinite(value):
        return str(value)
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{letter}"
    return f"{value:.3g}" if abs(value) >= 1e-3 or value == 0 else f"{value:.1e}"


def duration(seconds: float) -> str:
    """Format seconds as 8.1s, 4m 05s, 3h 12m, 2d 4h."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    whole = int(seconds)
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600}h"


_FIELDS = (
    _Field("reward", ("critic/score/mean", "critic/rewards/mean"), compact, spark=True),
    _Field("loss", ("train/loss",), compact, spark=True),
    _Field("held-out loss", ("val/loss",), compact),
    _Field("entropy", ("actor/entropy",), compact, spark=True),
    _Field("length", ("response_length/mean",), lambda v: f"{v:.0f}", spark=True),
    _Field("mismatch KL", ("mismatch/k3",), compact),
    _Field("grad norm", ("actor/grad_norm", "train/grad_norm"), compact),
    _Field("lr", ("actor/lr", "train/lr"), compact),
    _Field("tok/s", ("perf/throughput",), compact),
)


def sparkline(values: Sequence[float]) -> str:
    """Return one character per value, scaled between the least and the greatest of them."""
    finite = [v for v in values if math.isfinite(v)]
    if len(finite) < 2:
        return ""
    low, span = min(finite), (max(finite) - min(finite)) or 1.0
    return "".join(_SPARKS[int((v - low) / span * 7 + 0.5)] for v in finite)


class _Output(io.TextIOBase):
    """Standard output at the time of each call. If a write fails, output is closed and the run continues."""

    def __init__(self, close_output: Callable[[str], None]) -> None:
        self._on_error = close_output

    def write(self, text: str) -> int:
        return self._try(lambda stream: stream.write(text))

    def flush(self) -> None:
        self._try(lambda stream: stream.flush())

    def isatty(self) -> bool:
        return sys.stdout.isatty()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return sys.stdout.encoding

    def _try(self, act: Callable[[Any], Any]) -> Any:
        try:
            return act(getattr(sys.stdout, "rich_proxied_file", sys.stdout))  # a live panel replaces sys.stdout
        except OSError as e:
            self._on_error(str(e))
            return 0


class LiveProgress:
    """Progress of a run, and the sink `console`: a panel that redraws itself on a terminal, else one line per `log`."""

    def __init__(
        self, console: Console | None = None, clock: Callable[[], float] = time.monotonic, *, silent: bool = False
    ) -> None:
        """silent: print nothing, because another process prints the same."""
        file = io.StringIO() if silent else cast(IO[str], _Output(self.close_output))
        self._console, self._clock = console or Console(file=file, quiet=silent), clock
        self._terminals = [number for number in (1, 2) if os.isatty(number)]
        self.lost = ""  # why the output is closed
        self._lost_reported = False
        self._live: Live | None = None
        self._title, self._total, self._step = "", 0, 0
        self._started = self._last_update = clock()
        self._intervals: deque[float] = deque(maxlen=15)
        self._values: dict[str, float] = {}
        self._shares: dict[str, float] = {}
        self._history: dict[str, deque[float]] = {}
        self._accuracy: list[tuple[int, float]] = []
        self._accuracy_name = ""
        self._held_out = "accuracy"

    def start(self, total_steps: int, title: str) -> None:
        self._title, self._total = title, total_steps
        self._started = self._last_update = self._clock()
        if self._console.is_terminal:
            self._live = Live(get_renderable=self._panel, console=self._console, refresh_per_second=4, transient=False)
            self._live.start()
        else:
            self.message(f"{title} · {total_steps} steps")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = self._clock()
        if step > self._step:
            elapsed = now - self._last_update
            self._intervals.append(elapsed if self._intervals else values.get("perf/time_per_step", elapsed))
            self._step, self._last_update = step, now
        self._values |= values
        self._note_accuracy(step, values)
        for field in _FIELDS:
            if field.spark and (value := field.of(values)) is not None:
                self._history.setdefault(field.label, deque(maxlen=32)).append(value)
        self._shares = _shares(values) or self._shares
        if self._live is not None:
            return self._live.refresh()
        self.message(self._line(step, values))

    def message(self, text: str) -> None:
        """Print a line that remains above the panel."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True, emoji=False)

    def close_output(self, why: str, *, hung_up: bool = False) -> None:
        """Close standard output (a broken pipe, a full disk) or, with hung_up, the terminal: further output is
        discarded."""
        self.lost = self.lost or why
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for number in self._terminals if hung_up else {1, *self._terminals}:
            os.dup2(nowhere, number)
        os.close(nowhere)

    def newly_lost(self) -> str:
        """Return the reason why the output was closed, at the first call after that; else "". A terminal may refuse a
        write before or after it hangs up."""
        why = "" if self._lost_reported else self.lost  # read once: the drawing thread may set it meanwhile
        self._lost_reported = self._lost_reported or bool(why)
        return why

    def close(self) -> None:
        """Print the last state and end the panel. May be called again."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    @property
    def eta_s(self) -> float | None:
        return median(self._intervals) * max(0, self._total - self._step) if self._intervals else None

    def _note_accuracy(self, step: int, values: Mapping[str, float]) -> None:
        per_source = sorted(n for n in values if n.startswith("eval/") and n.endswith("/acc/greedy"))
        name = next((n for n in (self._accuracy_name, *_ACCURACY, *per_source) if n in values), "")
        if self._held_out == "accuracy":
            self._held_out = held_out_word([values])
        if name and (not self._accuracy_name or name == self._accuracy_name):
            self._accuracy_name = name
            self._accuracy.append((step, values[name]))

    def _line(self, step: int, values: Mapping[str, float]) -> str:
        parts = [f"step {step:>{len(str(self._total))}}/{self._total}"]
        if self._accuracy and self._accuracy[-1][0] == step:
            parts.append(f"held-out {self._accuracy[-1][1]:.3f}{self._accuracy_change()}")
        parts += [f"{f.label} {f.show(value)}" for f in _FIELDS if (value := f.of(values)) is not None]
        shares = sorted(_shares(values).items(), key=lambda item: -item[1])[:3]
        if "perf/time_per_step" in values:
            where = " ".join(f"{name} {share:.0%}" for name, share in shares if share >= 0.01)
            parts.append(duration(values["perf/time_per_step"]) + (f" ({where})" if where else ""))
        if self.eta_s:
            parts.append(f"eta {duration(self.eta_s)}")
        return " · ".join(parts)

    def _accuracy_change(self) -> str:
        if len(self._accuracy) < 2:
            return ""
        (first_step, first), (_, previous), (_, last) = self._accuracy[0], self._accuracy[-2], self._accuracy[-1]
        change = f" ({last - previous:+.3f}"
        return change + (f", {last - first:+.3f} since step {first_step})" if len(self._accuracy) > 2 else ")")

    def _panel(self) -> RenderableType:
        rows: list[RenderableType] = [self._progress_row()]
        if self._accuracy:
            step, value = self._accuracy[-1]
            line = Text.assemble(
                (f"held-out {self._held_out}  ", "dim"), (f"{value:.3f}", "bold"), self._accuracy_change()
            )
            line.append(f"  at step {step}  ", "dim").append(sparkline([v for _, v in self._accuracy[-32:]]), "green")
            rows.append(line)
        rows.append(self._metric_grid())
        if self._shares:
            rows.append(self._time_bar(max(20, min(60, self._console.width - 8))))
        return Panel(Group(*rows), title=Text(self._title, "bold"), title_align="left", border_style="dim")

    def _progress_row(self) -> RenderableType:
        grid = Table.grid(padding=(0, 2), expand=True)
        for ratio in (None, 1, None):
            grid.add_column(ratio=ratio)
        since = duration(self._clock() - self._started)
        eta = "" if self.eta_s is None else f" · {duration(self.eta_s)} left"
        bar = ProgressBar(total=self._total, completed=self._step)
        grid.add_row(Text(f"step {self._step}/{self._total}", "bold"), bar, Text(since + eta, "dim"))
        return grid

    def _metric_grid(self) -> RenderableType:
        grid = Table.grid(padding=(0, 3))
        cells = []
        for field in _FIELDS:
            if (value := field.of(self._values)) is not None:
                cell = Text.assemble((f"{field.label} ", "dim"), field.show(value))
                if field.spark and self._console.width >= 90:
                    cell.append("  " + sparkline(list(self._history.get(field.label, ()))[-16:]), "blue")
                cells.append(cell)
        width = 4 if self._console.width >= 110 else 3 if self._console.width >= 70 else 2
        for i in range(0, len(cells), width):
            grid.add_row(*cells[i : i + width])
        return grid

    def _time_bar(self, width: int) -> RenderableType:
        bar, legend = Text(), Text()
        ends, done = 0, 0.0
        for name, share in self._shares.items():
            done += share
            start, ends = ends, round(done * width)
            color = PHASE_COLORS.get(name, PHASE_COLORS["other"])
            bar.append("█" * (ends - start), color)
            if share >= 0.02:
                legend.append("■ ", color).append(f"{name} {share:.0%}  ", "dim")
        return Group(bar, legend)


def _shares(values: Mapping[str, float]) -> dict[str, float]:
    """Return the share of each phase in the time of the step."""
    seconds = {n.removeprefix("timing_s/"): s for n, s in values.items() if n.startswith("timing_s/")}
    total = sum(seconds.values())
    return {name: s / total for name, s in seconds.items()} if total > 0 else {}
