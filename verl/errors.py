"""Errors that the command line distinguishes. Standard library only."""

CRASH_RECORD = "crash record: "  # the note of an error with a crash record, before the path of its file


class Refused(ValueError):
    """A fault in something that the user wrote: a key, a row, a file, a folder, a function's result.

    The text has the value, the reason and the fix. The command line prints it as one line and ends with exit code 2.
    Any other error is a defect of verl or of its environment: it keeps its traceback, and the exit code is 1.
    """


def crash_record_of(error: BaseException) -> str:
    """Return the line with the path of the error's crash record, or "" if it has none."""
    notes: list[str] = getattr(error, "__notes__", [])
    return next((note for note in notes if note.startswith(CRASH_RECORD)), "")
