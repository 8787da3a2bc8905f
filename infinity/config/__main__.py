"""`python -m infinity.config [FILE]` writes the configuration reference, by default to docs/config.md."""

import sys
from pathlib import Path

from infinity.config.reference import write

path = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/config.md")
print(f"{path}: {'written' if write(path) else 'up to date'}")
