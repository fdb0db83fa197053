"""`python -m penstock`: the command line, for launchers such as torchrun that start modules."""

from penstock.cli import main

if __name__ == "__main__":
    main()
