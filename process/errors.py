"""Errors that an operator reads and can mend.

    ProcessError
    ├── ConfigError      a setting is unknown, missing or wrong
    └── PortBusyError    something else listens on a port that we need

The text of each is the whole message: what is wrong, where, and the way out. Nobody needs a traceback for it.
"""


class ProcessError(Exception):
    """Something stops this process that the person who started it can mend."""


class ConfigError(ProcessError):
    """A setting is unknown, missing or wrong."""


class LostError(ProcessError):
    """The process cannot go on, through nobody's settings: started anew, it may."""


class PortBusyError(ProcessError):
    """A port that this process was told to listen on cannot be had."""
