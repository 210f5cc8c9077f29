"""`python -m cluster.bulk`: the same as `tandem bulk`."""

import sys

from tandem import remove_shadowing_folders

if __name__ == "__main__":
    remove_shadowing_folders()  # before any import of Tandem's packages

    from cluster.cli.main import main

    sys.exit(main(["bulk", *sys.argv[1:]]))
