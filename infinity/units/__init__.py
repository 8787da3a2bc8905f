"""Units: groups of parameters that are laid out, fetched, reduced and updated together."""
