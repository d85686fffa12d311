"""Translate verl's own keys: each is mapped to ours, ignored with a reason, or refused with the key to use instead."""
