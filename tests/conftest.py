"""Lets the tests import the helper modules that lie beside them (``from reference import ...``)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
