"""Start processes that end with the process that started them; find, measure and kill processes."""
