"""``python -m pyop3_mlir``: see :mod:`pyop3_mlir.cli`."""

from pyop3_mlir.cli import main

if __name__ == "__main__":
    main()
