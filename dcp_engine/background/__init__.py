"""Saving beside training.

``saver`` is what a training loop calls and ``handle`` what it gets; ``thread`` and ``process`` are where a save runs (``process_main`` is
the other side of the latter, ``wire`` the way there), ``jobs`` what they are handed, ``failures`` what a failure becomes, ``priority`` how
little they take. ``steps`` makes the calls of a save, over an ``exchange``; ``supervisor`` ends each save in time, by what ``watch``
hears of other ranks (``pulse`` judges, ``outcome`` is what all agree on) and ``run`` knows of this one. ``unchanged`` is the alarm that
rings where training does not train what is saved.
"""

from __future__ import annotations

from dcp_engine.background.handle import SaveHandle, SaveTimings
from dcp_engine.background.priority import Priority
from dcp_engine.background.saver import BackgroundSaver
from dcp_engine.background.unchanged import UnchangedStateWarning

__all__ = ["BackgroundSaver", "Priority", "SaveHandle", "SaveTimings", "UnchangedStateWarning"]
