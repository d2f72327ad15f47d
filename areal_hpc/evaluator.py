"""The controller of an evaluation: rank 0 of a run without trainers.

Rollout ranks read their weights from the model directory, so there is no version but 0 and no broadcast. This rank
hands out held-out prompts, writes every answer into RUN/answers.jsonl as it comes, and ends with the figures. What is
in that file already is not asked for again: an interrupted evaluation goes on where it was, on any number of ranks.

An answer depends on the model, the settings, its prompt and its sample number, never on ranks, slots or the order of
arrival: its random stream is its own (seeds.py), and on a CPU with one thread a row's logits do not depend on the other
rows (kv_cache.py). It is the answer that an evaluation at the start of a run with the same seed and settings gets.
"""

from __future__ import annotations

import os
import socket
import time
from typing import Any

from areal_hpc import signals
from areal_hpc.answers import Answer, AnswerFile
from areal_hpc.attempts import Begin, write_begin
from areal_hpc.comm import Received, World
from areal_hpc.config import Config
from areal_hpc.controller_state import Credits as Places
from areal_hpc.desk import Desk
from areal_hpc.evaluation import Evaluation, HeldOut
from areal_hpc.examiner import Examiner
from areal_hpc.exits import Exit, RunError
from areal_hpc.figuresview import show_figures
from areal_hpc.messages import (
    Credits,
    GroupFinished,
    GroupRefused,
    Warned,
)
from areal_hpc.preflight import RunClock
from areal_hpc.progress import Progress
from areal_hpc.rundir import RunDir
from areal_hpc.runlog_writer import RunLogWriter

SAY_EVERY_S = 10.0


class Evaluator(Desk):
    """World rank 0 of an evaluation.

    Args:
        record: the answers of earlier attempts; takes those of this one.
    """

    progress: EvaluationProgress

    def __init__(
        self,
        config: Config,
        world: World,
        clock: RunClock,
        log: RunLogWriter,
        heldout: HeldOut,
        progress: EvaluationProgress,
        record: AnswerFile,
    ) -> None:
        super().__init__(config, world, clock, log)
        self.progress = progress
        self.record = record
        self.places = Places()
        self.examiner = Examiner(self, heldout, self.places, self.evaluated, self.received)
        self.is_done = False

    def run(self, run_dir: RunDir) -> str:
        """The whole evaluation; returns why it ended. Raises RunError: any end but the healthy one."""
        begin = Begin(socket.gethostname(), os.environ.get("SLURM_JOB_ID"), len(self.record.answers))
        write_begin(run_dir.attempt_dir, begin)
        if self.record.num_torn:
            self.event("answer_torn", f"the last line of {self.record.path} was not complete and is asked for anew")
        self.wait(
            lambda: not self.not_ready,
            self.config.deadlines.startup_s,
            lambda: f"ranks {sorted(self.not_ready)} to be ready",
        )
        self.expect_heartbeats()
        self.examiner.begin(0, answered=tuple(self.record.answers))
        if (current := self.examiner.current) is not None:
            self.progress.begins(len(current.answers), len(current.wanted))
            if current.answers:
                self.event("evaluation_resumed", f"{len(current.answers)} answers kept, {len(current.missing)} to go")
        self.wait_for_progress(lambda: self.is_done, self.examiner.waiting_for)
        return "all held-out prompts are answered"

    def received(self, answer: Answer) -> None:
        self.record.append(answer)
        self.walltime.answered(answer.finish_s - answer.start_s)
        self.progressed_s = time.monotonic()
        self.progress.received(answer)

    def evaluated(self, evaluation: Evaluation) -> None:
        self.is_done = True
        self.progress.evaluated(evaluation)

    def handle(self, received: Received) -> None:
        source, arrays = received.source, received.arrays
        match received.message:
            case Credits(num_samples):
                self.places.grant(source, num_samples)
                self.examiner.admit()
            case GroupFinished() as header:
                self.examiner.finished(header, arrays)
            case GroupRefused() as header:
                self.event("prompt_refused", header.reason, source)
                self.examiner.refused(header)
            case Warned(name):
                self.asked_to_end(name, source)
            case _:
                super().handle(received)

    def idle(self) -> None:
        if (name := signals.take()) is not None:
            self.asked_to_end(name, self.world.rank)
        was_closed = self.walltime.closed
        if self.time_is_over(part_s=0.0):
            left = f"{self.walltime.left_s:.0f} s left, no warning came"
            reason = f"stopped by walltime ({left}); {self.progress.num_answers} answers are on record"
            raise RunError(Exit.REQUEUE, reason)
        if was_closed and not self.walltime.closed:
            self.examiner.admit()

    def asked_to_end(self, name: str, rank: int) -> None:
        """A signal: every answer is on record already, so there is nothing to save.

        Raises:
            RunError: REQUEUE or INTERRUPTED.
        """
        self.event("signal", f"{name} on rank {rank}", rank)
        reason = f"stopped by {name} on rank {rank}; {self.progress.num_answers} answers are on record"
        raise RunError(Exit.REQUEUE if name == signals.SAVE_AND_REQUEUE.name else Exit.INTERRUPTED, reason)


class EvaluationProgress(Progress):
    """What people see of an evaluation: a line every ten seconds, status.json, and summary.json with the figures."""

    num_answers = 0
    num_wanted = 0
    num_correct = 0
    num_scored = 0
    num_tokens = 0
    said_s = 0.0

    def begins(self, num_answers: int, num_wanted: int) -> None:
        """So many answers are on record, and so many are wanted."""
        self.num_answers, self.num_wanted = num_answers, num_wanted
        self.training_began_s = self.said_s = time.monotonic()
        self.status |= {"step": num_answers, "answers": num_answers, "wanted": num_wanted}
        self.now("evaluating")

    def received(self, answer: Answer) -> None:
        """One more is on record."""
        self.num_answers += 1
        self.num_scored += answer.is_scored
        self.num_correct += answer.outcome == "correct"
        self.num_tokens += answer.num_response
        self.status |= {"step": self.num_answers, "answers": self.num_answers}
        if time.monotonic() - self.said_s < SAY_EVERY_S:
            return
        self.said_s = time.monotonic()
        self.write()
        rate = self.num_tokens / (self.said_s - self.training_began_s)
        share = f"{self.num_correct / self.num_scored:.1%}" if self.num_scored else "none"
        self.say(
            f"answer {self.num_answers}/{self.num_wanted}  {share} of the new ones right so far  {rate:,.0f} tok/s"
        )

    def evaluated(self, evaluation: Evaluation) -> None:
        """All answers are there; the launcher shows the table."""
        self.num_answers = len(evaluation.answers)
        self.evaluations = [card.as_json() for card in evaluation.cards().values()]
        self.last_step_s = time.monotonic()

    def ended(self, state: str, why: str, exit_code: int) -> None:
        """The last word; a job's output gets the table, elsewhere the launcher shows it."""
        super().ended(state, why, exit_code)
        if self.status["job_id"] is not None and exit_code == 0:
            show_figures(self.summary(why))

    def summary(self, why: str) -> dict[str, Any]:
        seconds = self.last_step_s - self.training_began_s if self.num_tokens else 0.0
        return {
            "data": self.evaluations,
            "new_tokens": self.num_tokens,
            "tokens_per_s": round(self.num_tokens / seconds, 1) if seconds > 0 else None,
            "wall_s": round(time.monotonic() - self.began_s, 1),
            "answers": str(self.run_dir.root / "answers.jsonl"),
            "why_ended": why,
        }
