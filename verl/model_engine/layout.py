"""The arrangement of the ranks that hold one model. Numbers only, no torch."""

from __future__ import annotations

from dataclasses import dataclass

from verl.errors import Refused


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The coordinates of a rank in a layout: `data` is the index of its rows; `sequence`, `tensor` and `pipeline` are
    the index of its part in each of those dimensions."""

    data: int
    sequence: int
    tensor: int
    pipeline: int

    @property
    def primary(self) -> bool:
        """True for one of the ranks that compute the same rows: it writes and reports the results."""
        return self.sequence == self.tensor == self.pipeline == 0


def use(number: int) -> str:
    """Return advice for a value that must divide `number`."""
    return f"use one of {', '.join([str(d) for d in range(1, number + 1) if number % d == 0][:8])}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The dimensions of a layout: world_size = pipeline x data x tokens x tensor; tensor varies fastest, since its
    neighbours communicate most."""

    world_size: int = 1
    replicate: int = 1
    """Copies of the sharded model (HSDP); parameters are sharded over the data and sequence ranks of one copy."""
    sequence: int = 1
    """Ranks that share the tokens of a row, and during attention its heads (Ulysses)."""
    context: int = 1
    """Ranks that share the tokens of a row, each with the keys and values of all (context parallelism)."""
    tensor: int = 1
    """Ranks that share every matrix."""
    pipeline: int = 1
    """Ranks that share the layers."""
    expert: int = 1
    """Ranks of a stage that share the experts: data and sequence ranks, with Megatron-Core tensor ranks too."""

    def __post_init__(self) -> None:
        if self.sequence > 1 < self.context:
            raise Refused(
                f"parallel.context={self.context} and parallel.sequence={self.sequence} are two ways to share the "
                f"tokens of a row: use parallel.context={self.context * self.sequence} alone"
            )
        within = self.tokens * self.tensor * self.pipeline
        if self.world_size % within:
            raise Refused(
                f"{self.world_size} ranks cannot be divided into parallel.tensor={self.tensor} x "
                f"parallel.{self.tokens_key}={self.tokens} x parallel.pipeline={self.pipeline} = {within}: use a "
                f"multiple of {within}"
            )
        over = self.data * self.tokens
        sharers = (
            ("replicate", self.replicate, over, "that shard the model"),
            ("expert", self.expert, over * self.tensor, "of a stage"),
        )
        for name, size, number, which in sharers:
            if number % size:
                raise Refused(f"parallel.{name}={size} does not divide the {number} ranks {which}: {use(number)}")

    @property
    def tokens(self) -> int:
        """The number of ranks that share the tokens of a row, by `sequence` or by `context`."""
        return self.sequence * self.context

    @property
    def tokens_key(self) -> str:
        """The setting by which they share the tokens: sequence or context."""
        return "context" if self.context > 1 else "sequence"

    @property
    def data(self) -> int:
        """Ranks with rows of their own."""
        return self.world_size // (self.tokens * self.tensor * self.pipeline)

    @property
    def shard(self) -> int:
        """Ranks over which one copy's parameters are spread (besides tensor and pipeline)."""
        return self.data * self.tokens // self.replicate

    def place(self, rank: int) -> RankPlace:
        """Return the coordinates of a rank."""
        rest, tensor = divmod(rank, self.tensor)
        rest, sequence = divmod(rest, self.tokens)
        pipeline, data = divmod(rest, self.data)
        return RankPlace(data, sequence, tensor, pipeline)

    @property
    def primaries(self) -> tuple[int, ...]:
        """The ranks that return results, in the order of their rows."""
        return tuple(rank for rank in range(self.world_size) if self.place(rank).primary)


def layers_of_stages(layers: int, stages: int) -> list[range]:
    """Return the layers of each pipeline stage. The embeddings count as one more layer of the first stage, the head as
    one more of the last; the numbers of two stages differ by at most one. Raise ValueError if there are fewer layers
    than stages."""
    if layers < stages:
        raise Refused(f"parallel.pipeline={stages}: {layers} layers cannot be {stages} stages; use at most {layers}")
    ends = [int(s == 0) + int(s == stages - 1) for s in range(stages)]
    counts = [1] * stages
    for _ in range(layers - stages):
        counts[min(range(stages), key=lambda s: counts[s] + ends[s])] += 1
    return [range(sum(counts[:s]), sum(counts[: s + 1])) for s in range(stages)]
