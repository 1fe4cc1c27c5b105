"""`python -m aftermap` is the command `aftermap`."""

from aftermap.cli.main import main

if __name__ == "__main__":
    main()
