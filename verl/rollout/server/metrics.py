"""Counters of a server in Prometheus' text format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


@dataclass(slots=True)
class Metrics:
    """The counters of a server, which /metrics returns."""

    requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    """The number of HTTP requests by (path, status)."""
    prompt_tokens: int = 0
    generated_tokens: int = 0
    seconds: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    """The number of generation requests in each bucket of durations (`BUCKETS_S`, and longer ones)."""
    total_s: float = 0.0
    """The sum of the durations of generation requests."""

    def took(self, seconds: float) -> None:
        """Count a generation request of this duration."""
        self.seconds[sum(seconds > limit for limit in BUCKETS_S)] += 1
        self.total_s += seconds

    def render(self, *, running: int, weight_version: int, can_speak: bool) -> str:
        """Return all counters in Prometheus' text format."""
        lines = [
            *_family("requests_total", "counter", "HTTP requests", self._by_path()),
            *_family("prompt_tokens_total", "counter", "tokens of prompts", [("", self.prompt_tokens)]),
            *_family("generated_tokens_total", "counter", "tokens that were drawn", [("", self.generated_tokens)]),
            *_family("sequences_running", "gauge", "answers in the making", [("", running)]),
            *_family("weight_version", "gauge", "version of the live weights", [("", weight_version)]),
            *_family("ready", "gauge", "1: answers are given", [("", int(can_speak))]),
            *_family("request_seconds", "histogram", "time of a generation request", self._histogram()),
        ]
        return "\n".join(lines) + "\n"

    def _by_path(self) -> Iterator[tuple[str, float]]:
        for (path, status), count in sorted(self.requests.items()):
            yield f'{{path="{path}",status="{status}"}}', count

    def _histogram(self) -> Iterator[tuple[str, float]]:
        below = 0
        for limit, count in zip((*map(str, BUCKETS_S), "+Inf"), self.seconds, strict=True):
            below += count
            yield f'_bucket{{le="{limit}"}}', below
        yield "_sum", self.total_s
        yield "_count", below


def _family(name: str, kind: str, text: str, samples: Iterable[tuple[str, float]]) -> list[str]:
    head = [f"# HELP verl_{name} {text}", f"# TYPE verl_{name} {kind}"]
    return [*head, *(f"verl_{name}{labels} {value}" for labels, value in samples)]
