"""The RL loop, the same for on-policy, one-step-off and fully asynchronous runs."""

from __future__ import annotations

from verl.driver.run import Run
from verl.driver.step import experience_and_update


async def train(run: Run) -> None:
    """Train to the end of the run. Groups are admitted while slots are free; a batch is taken by deadline; staleness 0
    is the synchronous run."""
    async with run.groups as groups:  # rollouts.py: agent loops, rewards streamed, retries; a crash cancels all
        await run.start()
        await run.evaluate_first()
        for step in run.steps():  # continues after the resumed step
            with step.clock("rollout"):
                refs = await groups.take(step.index)  # complete, scored, selected, admissible groups
                if run.placement.colocated:
                    await groups.drain()
            async with run.placement.training():  # colocated: rollout releases its KV cache; split: a no-op
                with step.clock("checkpoint"):  # a copy of the models, where updates outlast the grace of a stop
                    await run.checkpointer.hold(step.index)
                await experience_and_update(run.learner, step, refs)
                await run.publish(step)
            await run.finish(step, refs)  # evaluate, checkpoint, samples, metrics
        await run.settle()
