"""Trainings under random faults for bench/campaign.py: cases, the training process, and verdicts."""
