"""The plan of a run: every derived size, the memory of every process and the disk, before anything starts."""
