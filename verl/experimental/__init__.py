"""Where verl has what is new: doors onto the rooms of this house, nothing of its own."""
