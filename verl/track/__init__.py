"""What a run leaves behind, and its readers: events, metrics, samples, health, sinks, the console and the report."""
