"""What every test file shares: the project's root on the path, and the real files that stand in tests/data."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
for folder in (ROOT, ROOT / "tests", ROOT / "tests" / "servers"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
# Processes that a test starts find the same files.
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
