"""When to save and what to keep: options that are checked when they are made, and pure functions that decide."""

from __future__ import annotations

from dcp_engine.policies.health import Health, HealthVerdict
from dcp_engine.policies.interval import Interval, choose_interval, daly_interval, waste, young_interval
from dcp_engine.policies.keep import Best, Keep, KeepDecision, KeepPlan, StepFacts, plan_keep
from dcp_engine.policies.pace import Pace
from dcp_engine.policies.room import Room, RoomVerdict, check_room
from dcp_engine.policies.when import Phase, SaveDecision, When, decide_save

__all__ = [
    "Best",
    "Health",
    "HealthVerdict",
    "Interval",
    "Keep",
    "KeepDecision",
    "KeepPlan",
    "Pace",
    "Phase",
    "Room",
    "RoomVerdict",
    "SaveDecision",
    "StepFacts",
    "When",
    "check_room",
    "choose_interval",
    "daly_interval",
    "decide_save",
    "plan_keep",
    "waste",
    "young_interval",
]
