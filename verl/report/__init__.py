"""The report of a run: one self-contained page, or the same page served while the run continues."""
