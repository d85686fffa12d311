"""The entry point of asynchronous runs under verl's name."""
