"""Where states live, and how bytes move between those places."""
