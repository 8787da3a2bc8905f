"""Optimizers: the native CPU update, the streamed update of units, gradients and learning rates."""
