"""`python -m tests.golden`: write the golden curves of this machine."""

from tests.golden.curves import write

if __name__ == "__main__":
    write()
