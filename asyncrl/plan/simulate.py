"""The simulation of a run, with or without failures of machines."""

from __future__ import annotations

from asyncrl.plan.failing import FailingSimulation
from asyncrl.plan.machines import MachineFailures
from asyncrl.plan.prediction import Prediction
from asyncrl.plan.simulation import Simulation
from asyncrl.plan.workload import Setup, Workload


def simulate(workload: Workload, setup: Setup, *, seed: int = 0, failures: MachineFailures | None = None) -> Prediction:
    """Simulates the run. The same seed draws the same groups in the same order of leases, and the same failures."""
    if failures is None:
        return Simulation(workload, setup, seed).run()
    return FailingSimulation(workload, setup, seed, failures).run()
