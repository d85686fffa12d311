"""verl's own keys, accepted everywhere: mapped to ours, ignored with a reason, or refused with what to do instead."""
