"""What a command says of bad input."""


class UsageError(Exception):
    """One line: what is wrong, and what to do."""
