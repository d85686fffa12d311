"""The entry point of runs that are one step ahead under verl's name."""
