"""The update of units: streams their states through the optimizer."""
