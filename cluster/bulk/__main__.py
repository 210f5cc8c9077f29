"""`python -m cluster.bulk`: the same as `tandem bulk`."""

import sys

from cluster.cli.current_folder import remove_current_folder

if __name__ == "__main__":
    remove_current_folder()  # before any import of Tandem's packages

    from cluster.cli.main import main

    sys.exit(main(["bulk", *sys.argv[1:]]))
