"""Start processes that end with the one that started them, and find, measure and kill processes."""
