"""Compare the memory and the dtypes of a run with a card, before anything is loaded. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from verl.bounds import size_text
from verl.config.schema import Config
from verl.errors import Refused
from verl.planner.disk import small_memory
from verl.planner.memory import MemoryEstimate
from verl.wire import FP8, FP8_CAPABILITY

BF16_CAPABILITY = (8, 0)
"""The first compute capability with bfloat16 products."""
STATE = ("weights", "gradients", "optimizer states")
"""The items of an update that are known exactly: no smaller batch makes them smaller."""
FOREIGN_SHARE = 0.05
"""The share of a card that is held by other processes from which it is reported."""


@dataclass(frozen=True, slots=True)
class CardFacts:
    """A card, as a run finds it or as a plan supposes it."""

    name: str
    total_bytes: int
    free_bytes: int
    """Free memory, with what this process has allocated or cached."""
    capability: tuple[int, int] | None = None
    """The compute capability of an NVIDIA card; None: unknown."""


def check_card(config: Config, memory: MemoryEstimate, card: CardFacts) -> None:
    """Raise Refused if a run certainly fails on this card: a dtype that it does not compute, or more memory for the
    state of the policy than it has or than other processes have left."""
    needs = {"bfloat16": BF16_CAPABILITY, FP8: FP8_CAPABILITY}
    for key, dtype in {"model.dtype": config.model.dtype, "rollout.dtype": config.rollout.dtype}.items():
        if card.capability is not None and card.capability < needs.get(dtype, card.capability):
            at, least = (".".join(map(str, of)) for of in (card.capability, needs[dtype]))
            lower = "bfloat16" if dtype == FP8 and card.capability >= BF16_CAPABILITY else "float32"
            raise Refused(
                f"{key}={dtype}: {card.name} has compute capability {at}, and {dtype} needs {least}; "
                f"set {key}={lower}, or leave it out"
            )
    state = state_bytes(memory)
    wants = f"weights, gradients and optimizer states want {size_text(state)} during an update"
    if state > card.total_bytes:
        raise Refused(
            f"model.path={config.model.path}: its {wants}, and {card.name} has {size_text(card.total_bytes)} in all; "
            "take a smaller model, or share it among devices (cluster.backend=ray, cluster.ranks_per_node)"
        )
    if state > card.free_bytes:
        held = size_text(card.total_bytes - card.free_bytes)
        raise Refused(
            f"model.path={config.model.path}: its {wants}, and other processes hold {held} of {card.name}, so that "
            f"{size_text(card.free_bytes)} are free; end them (nvidia-smi lists them), or choose another card "
            "(CUDA_VISIBLE_DEVICES)"
        )


def card_lines(memory: MemoryEstimate, card: CardFacts) -> Iterator[str]:
    """Yield warnings: memory that other processes hold, and a peak that exceeds what is free."""
    held = card.total_bytes - card.free_bytes
    if held > FOREIGN_SHARE * card.total_bytes:
        yield f"other processes hold {size_text(held)} of the {size_text(card.total_bytes)} of {card.name}"
    yield from small_memory(memory, card.free_bytes)


def state_bytes(memory: MemoryEstimate) -> int:
    """Return the bytes of the exactly known items in the largest update."""
    updates = [parts for phase, parts in memory.phases.items() if phase.startswith("update")]
    return max((sum(memory.items[i] for i in parts if i.endswith(STATE)) for parts in updates), default=0)


def supposed_card(gib: float) -> CardFacts:
    """Return a card of this size that the run has alone."""
    size = int(gib * 2**30)
    return CardFacts(f"a card of {gib:g} GiB", size, size)
