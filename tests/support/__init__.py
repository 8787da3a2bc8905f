"""Shared code of test modules: configs, small models, reference loops and a device with late copies."""
