"""Entry points under verl's own names, for launch scripts that exist."""

import os


def is_spare_rank() -> bool:
    """Whether torchrun started this process beside the one that trains. One process does all here, with the batch sizes
    of the whole, so that the first rank is the run and the others have nothing to do."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("WORLD_SIZE", "1") == "1":
        return False
    rank, ranks = os.environ.get("RANK", "0"), os.environ["WORLD_SIZE"]
    if rank == "0":
        print(f"torchrun started {ranks} processes: this one trains alone, with the batch sizes of all; the others end")
    return rank != "0"
