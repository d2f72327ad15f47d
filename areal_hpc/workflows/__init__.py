"""Episodes of several turns: a workflow writes them, the rollout rank decodes them and keeps the books.

A workflow is an async function of two things, named in the configuration as `workflow.function`:

    async def workflow(prompt, engine):
        turn = await engine.generate(stop=["</tool>"])          # the model goes on
        result = await engine.run(look_up, turn.text)           # in a process that can be killed
        engine.append(f"\\n{result}\\n")                          # not learnt from
        await engine.generate()
        return [0.0, 1.0]                                       # one reward per turn; see `Reward`

It runs between two tokens of the rank, many of them side by side, so what takes time belongs into `engine.run`. New
weights may arrive anywhere: in a turn, between two, while a tool runs. So may the end of the job: the workflow then
runs again from its beginning in the next attempt and is given what it was given before, so it must ask for the same
things again. What it decides by chance it decides with `random.Random(prompt.seed)`.
"""

from areal_hpc.workflows.api import Prompt, Reward, ToolError, ToolTimeout, Turn, Workflow, WorkflowEngine

__all__ = ["Prompt", "Reward", "ToolError", "ToolTimeout", "Turn", "Workflow", "WorkflowEngine"]
