"""The one place where user code runs: killable, memory-limited, self-healing worker processes around any callable."""
