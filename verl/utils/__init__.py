"""Where verl has what a user imports: doors onto the rooms of this house, nothing of its own."""
