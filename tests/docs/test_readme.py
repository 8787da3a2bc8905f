"""README's first script trains under the limit that the page names, in which a plain loop does not."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "README.md").read_text(encoding="utf-8")
PLAIN = """
model = torch.nn.Sequential(*(block() for _ in range(48)))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
batch = torch.randn(16, 1024)
for step in range(2):
    (model(batch) - batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def under_the_limit(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `code` in `folder` under the page's `ulimit -d`, on two cores: the stacks of threads count, too."""
    (kilobytes,) = re.findall(r"`ulimit -d (\d+)`", PAGE)

    def limit() -> None:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
        resource.setrlimit(resource.RLIMIT_DATA, (int(kilobytes) << 10, int(kilobytes) << 10))

    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, preexec_fn=limit)


def test_the_first_script_trains_where_a_plain_loop_does_not(tmp_path: Path) -> None:
    """The script logs the bytes that the page shows."""
    (code,) = re.findall(r"^```python\n(import torch\nimport infinity\n.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    (shown,) = re.findall(r"^this rank holds .*\na plain PyTorch loop holds .*$", PAGE, re.MULTILINE)
    ours = under_the_limit(code, tmp_path)
    assert ours.returncode == 0 and shown in ours.stderr, ours.stderr
    head, _, rest = code.partition("nvme = ")  # imports, and the block
    assert "(block() for _ in range(48))" in rest
    plain = under_the_limit(head + PLAIN, tmp_path)
    assert plain.returncode == 1 and "can't allocate memory" in plain.stderr
    assert list(tmp_path.iterdir()) == []
