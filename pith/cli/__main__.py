"""`python -m pith.cli`, for launchers that start a module."""

from pith.cli.app import main

if __name__ == "__main__":
    main()
