"""The command line: `infinity …`."""
