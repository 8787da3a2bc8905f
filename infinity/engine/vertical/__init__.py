"""Whole steps of `engine.train_batch`: as a loop over micro-batches, or block by block if the blocks are declared."""
