"""`python -m skyrl.tinker.api`: starts the same server as `skyrl serve`."""

import sys

from skyrl.tinker.processes import launcher


def main() -> int:
    """Run the server with the options of the command line. Returns the exit status."""
    return launcher.run(sys.argv[1:], prog="python -m skyrl.tinker.api")


if __name__ == "__main__":
    sys.exit(main())
