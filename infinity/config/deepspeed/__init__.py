"""DeepSpeed's keys: the verdict on each, their translation, and the defaults that differ."""
