"""The entry point of runs over a transfer queue under verl's name."""
