"""Imported last by a process that is forked from: a collection in a fork need not walk what was here before it."""

import gc

gc.collect()
gc.freeze()
