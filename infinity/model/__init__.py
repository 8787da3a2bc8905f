"""An unmodified module that computes with units: its hooks, its code's scope, and the tensors that autograd saves."""
