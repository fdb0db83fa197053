"""The command line. A command is a file of this folder; what a command needs to run lies in a folder of its name.

Everything here uses the public API of the package only.
"""

from penstock.cli.app import main

__all__ = ["main"]
