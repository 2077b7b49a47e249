"""``python -m stagekit``: the command line of this interpreter, wherever its programs lie."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
