"""`python -m cluster.bulk`: the same as `tandem bulk`."""

import sys

from cluster.cli import main

if __name__ == "__main__":
    sys.exit(main(["bulk", *sys.argv[1:]]))
