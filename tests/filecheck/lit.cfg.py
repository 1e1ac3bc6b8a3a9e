# How lit runs the tests of this directory: `lit -v tests/filecheck`, or pytest, which calls it.
import sys
import tempfile
from pathlib import Path

import lit.formats

config.name = "pyop3_mlir"  # noqa: F821 (lit defines it)
config.test_format = lit.formats.ShTest(execute_external=False)  # noqa: F821
config.suffixes = [".mlir"]  # noqa: F821
config.test_source_root = str(Path(__file__).parent)  # noqa: F821
# pytest gives a directory that it removes later on
config.test_exec_root = lit_config.params.get("exec_root") or tempfile.mkdtemp()  # noqa: F821

python = sys.executable
config.substitutions += [  # noqa: F821
    # `%opt -p PASSES`: this package's own opt tool, with its passes and dialects
    ("%opt", f"{python} -m pyop3_mlir.lowering.opt"),
    # IREE's MLIR, to see that what xDSL prints is valid upstream
    ("%iree-opt", str(Path(python).parent / "iree-opt")),
    ("%filecheck", str(Path(python).parent / "filecheck")),
]
