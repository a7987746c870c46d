"""Injected faults: how tests see that a rank's death ends the job well."""

import os
import signal
import time

from pith.run.job import InjectedFault

DELAY_S = 7.0  # longer than a launcher waits for ranks once one has failed


class FaultSite:
    """Watches for the place where an ordered fault strikes. Without an order it does nothing."""

    def __init__(self, order: str | None, *, rank: int) -> None:
        fault = InjectedFault.parse(order) if order else None
        self._fault = fault if fault and fault.rank == rank else None

    def reach(self, site: str, step: int) -> None:
        """Called at each site of each step."""
        fault = self._fault
        if fault is None or (fault.site, fault.step) != (site, step):
            return
        match fault.action:
            case "raise":
                raise InjectedError(f"ordered at {site} of step {step}")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                time.sleep(3600)
            case "delay":
                time.sleep(DELAY_S)


class InjectedError(Exception):
    """What an ordered `raise` raises."""
