"""Tensors that autograd saved outside of units, kept in host memory or on nvme between forward and backward."""
