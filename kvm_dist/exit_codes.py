"""How a command ends, as a number and as an exception that carries it."""

from enum import IntEnum


class ExitCode(IntEnum):
    DONE = 0
    CONFIG = 64
    DATA = 65
    CRASH = 70
    HANG = 71
    STORAGE = 74
    PREEMPTED = 75
    NOT_FINITE = 76
    NO_PROGRESS = 93


class RunError(Exception):
    """An end with a documented exit code; the message says what, got, wanted and how to mend it."""

    code = ExitCode.CRASH


class ConfigError(RunError):
    code = ExitCode.CONFIG


class DataError(RunError):
    code = ExitCode.DATA


class CrashError(RunError):
    code = ExitCode.CRASH


class HangError(RunError):
    code = ExitCode.HANG


class StorageError(RunError):
    code = ExitCode.STORAGE


class Preempted(RunError):
    code = ExitCode.PREEMPTED


class NotFinite(RunError):
    code = ExitCode.NOT_FINITE


class NoProgress(RunError):
    code = ExitCode.NO_PROGRESS
