"""What several test modules share: configs, small models, reference loops and a device whose copies are late."""
