"""These tests need Triton's interpreter, which must be asked for before Triton is imported: see
`test_interpreter.py`, which runs each file here in a process of its own."""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
