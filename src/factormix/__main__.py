"""Run the command line as ``python -m factormix``."""

from factormix.cli import main

if __name__ == "__main__":
    main()
