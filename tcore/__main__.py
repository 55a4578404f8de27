"""`python -m tcore` is `tcore`."""

from tcore.cli.main import main

if __name__ == "__main__":
    main()
