"""A run in which one rollout engine fails: the others complete the step, and a new engine joins at a publish."""

from __future__ import annotations

from typing import Any

from small_runs import dispatched, metrics_of, small_run, trained

from verl.rollout.base import ReplicaLost
from verl.rollout.native import engine as native


def test_a_replica_that_fails_costs_no_sample_and_no_restart(tmp_path, tiny_model, arithmetic_data, monkeypatch):
    made: list[Any] = []
    build = native.build

    class Failing:
        """The second engine gives no third answer, and the one that is started for it does not take the publish."""

        def __init__(self, inner: Any) -> None:
            self.inner, self.answers = inner, 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        async def generate(self, *args: Any, **named: Any) -> Any:
            self.answers += 1
            if self is made[1] and self.answers == 3:
                raise ReplicaLost("killed by signal 9")
            return await self.inner.generate(*args, **named)

        async def load_weights(self, source: Any, **named: Any) -> int:
            if len(made) == 3 and self is made[2]:
                raise RuntimeError("no room on the device")
            return await self.inner.load_weights(source, **named)

    def counted(*args: Any, **named: Any) -> Any:
        made.append(Failing(build(*args, **named)))
        return made[-1]

    shape = ("run.total_steps=4", "run.deterministic=true", "rollout.replicas=2")
    small_run(tmp_path / "straight", tiny_model, arithmetic_data[:1], *shape)
    monkeypatch.setattr(native, "build", counted)
    small_run(tmp_path / "hurt", tiny_model, arithmetic_data[:1], *shape)
    assert len(made) == 4, "two at start, and one after each loss"
    straight, hurt = tmp_path / "straight" / "r", tmp_path / "hurt" / "r"
    assert trained(straight) == trained(hurt), "each sample once, the same draws"
    assert {i.partition("/")[0] for ids in trained(hurt).values() for i in ids} <= set(dispatched(hurt))
    for name in ("critic/score/mean", "actor/grad_norm"):
        values = [[m.get(name) for m in metrics_of(path).values()] for path in (straight, hurt)]
        assert values[0] == values[1], name
    assert made[-1].version == 4, "the last one took the publishes that came after it"
