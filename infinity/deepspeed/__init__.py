"""DeepSpeed's names over the engine."""
