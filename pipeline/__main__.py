"""`python -m pipeline <verb> [overrides]`."""

from pipeline.cli import main

if __name__ == "__main__":
    main()
