"""Trainings under random faults: what is drawn, what runs in a process, and how it is judged (bench/campaign.py)."""
