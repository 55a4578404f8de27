"""`python -m tcore` is `tcore`."""

from tcore.cli import main

if __name__ == "__main__":
    main()
