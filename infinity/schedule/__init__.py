"""Decides the next actions of a step: the trace, the phases of a step, and the policy of fetches and updates.

No module of this room imports torch or does I/O, and none knows another room but `errors`.
"""
