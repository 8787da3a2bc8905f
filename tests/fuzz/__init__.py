"""A generator of models, loops and placements whose training by the engine must equal the plain PyTorch loop."""
