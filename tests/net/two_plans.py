"""`python -m tests.net.two_plans`, on the first of two nodes: one batch of the bundled model under
two plans; prints the logits of each."""

import asyncio
import json
import sys
from pathlib import Path

from benchmarks.cases.planned_overlap import batch_runner, spread_fleet
from cluster.fleet.fleet import Fleet
from contracts.plan import Order, Plan

BUNDLED = Path(__file__).parents[2] / "models" / "bundled"
ROWS = [[(7 * row + 3 * index) % 500 + 1 for index in range(64)] for row in range(4)]
PLANS = (Plan(r1=2, order=Order.PPPIPE), Plan(r1=4, r2=2, sequence_chunks=(0.5, 1.0)))


async def both(fleet: Fleet) -> list[list[list[float]]]:
    client, runner = await batch_runner(fleet)
    logits = [(await runner.run(plan, ROWS)).logits for plan in PLANS]
    await client.close()
    return logits


if __name__ == "__main__":
    with spread_fleet(BUNDLED, "float32") as running:
        sys.stdout.write(json.dumps(asyncio.run(both(running))) + "\n")
