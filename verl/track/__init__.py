"""Records and display of a run: events, metrics, samples, health alarms, sinks, the console."""
