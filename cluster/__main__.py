"""`python -m cluster` is `tandem`."""

import sys

from tandem import remove_shadowing_folders

if __name__ == "__main__":
    remove_shadowing_folders()  # before anything else of ours is imported

    from cluster.cli.main import main

    sys.exit(main())
