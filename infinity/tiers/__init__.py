"""Tiers that hold states (device, host, nvme), and transfers between them."""
