"""What a run leaves behind and shows while it goes on: events, metrics, samples, health alarms, sinks, the console."""
