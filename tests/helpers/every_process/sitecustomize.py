"""Watch every Python process that a test starts: tests/conftest.py puts this folder on PYTHONPATH."""

import written_lines

written_lines.watch()
