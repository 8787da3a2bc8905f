"""The engines for training and inference, and the objects that users hold."""
