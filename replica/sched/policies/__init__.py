"""The orders of service, by name. Each is one file.

Among equals the longest cached prefix goes first, everywhere: as an order of its own it would
starve whoever shares nothing.
"""

from __future__ import annotations

from configs.schema import ServiceOrder
from replica.sched.order import Policy
from replica.sched.policies.deadline import Deadline
from replica.sched.policies.fcfs import FirstCome
from replica.sched.policies.priority import Priority

POLICIES: dict[ServiceOrder, type[Policy]] = {
    "fcfs": FirstCome,
    "priority": Priority,
    "deadline": Deadline,
}
