"""The commands of ``blend-eval``, one module each.

A module here is a command of its name. It has ``SETTINGS`` (its settings class), ``HELP`` (one line), ``EXAMPLES``
(lines for the end of its help) and ``run(settings, console) -> int`` (the exit code).
"""
