"""Units: the grain in which parameters are laid out, fetched, reduced and updated."""
