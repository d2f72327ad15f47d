"""Holds evaluations on the rollout ranks: asks for answers to held-out prompts, keeps what comes back, logs it.

Alone (before the first step, after the last one, without trainers) an evaluation takes every place there is. Beside
training (`evaluation.every`) it takes the next free places before training does, but on no rollout rank more than the
share `evaluation.share` of its slots, so that training goes on: a rank grants one group of places more than it has
slots, hence one training group fits beside the held-out answers in any case.

What version an answer is of. An evaluation begins with the newest version that was announced; its answers begin with
this version or a newer one (`first_version`), and with `rollout.interrupt` may live through further updates
(`last_version`). Without interruption every answer is of one version, and an update waits on each rank for the answers
that are running there. So beside training a row's `version` is exact only for answers that say so in both columns;
figures of exactly one version are those at the start, at the end, and of `areal-hpc evaluate`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from numpy.typing import NDArray

from areal_hpc.answers import Answer
from areal_hpc.controller_state import Credits
from areal_hpc.desk import Desk
from areal_hpc.evaluation import Evaluation, HeldOut
from areal_hpc.messages import AdmitGroup, GroupFinished, GroupRefused


class Examiner:
    """At most one evaluation at a time.

    Args:
        desk: of the controller, or of the evaluator.
        heldout: data sets by name; without any there is never an evaluation.
        credits: free places on the rollout ranks.
        evaluated: called with every complete evaluation, once its rows are in the log.
        received: called with every answer.
    """

    def __init__(
        self,
        desk: Desk,
        heldout: HeldOut,
        credits: Credits,
        evaluated: Callable[[Evaluation], None],
        received: Callable[[Answer], None] = lambda answer: None,
    ) -> None:
        self.desk = desk
        self.config = desk.config
        self.heldout = heldout
        self.credits = credits
        self.evaluated = evaluated
        self.received = received
        self.current: Evaluation | None = None
        self.most_per_rank: int | None = None
        self.next_id = -1
        self.late: list[int] = []

    # ------------------------------------------------------------------------------------------------ beginning
    def begin(self, version: int, *, beside_training: bool = False, answered: tuple[Answer, ...] = ()) -> None:
        """Ask for all answers with this version that are not among `answered`."""
        evaluation = Evaluation(self.heldout, self.config.evaluation.samples, version, self.next_id, answered)
        self.next_id = evaluation.next_id
        rollout = self.config.rollout
        self.most_per_rank = max(1, int(self.config.evaluation.share * rollout.slots)) if beside_training else None
        self.current = evaluation
        self._conclude_or_admit()

    def new_version(self, version: int) -> None:
        """During training: begin if an evaluation is due, or note that it has to wait for the one under way.

        The evaluation at the end takes the place of one that would be due with the last version.
        """
        settings = self.config.evaluation
        if not self.heldout or settings.every is None or version % settings.every:
            return
        if settings.at_end and version >= self.config.steps:
            return
        if self.current is None:
            self.begin(version, beside_training=True)
        else:
            self.late.append(version)

    def catch_up(self, version: int | None) -> None:
        """During training: begin what became due during the evaluation before, with the newest version.

        Several that became due are one. None: training is over, and what is late is left out.
        """
        if not self.late or self.current is not None:
            return
        due = f"due with version {', '.join(map(str, self.late))} while another evaluation was under way"
        self.late = []
        if version is None:
            self.desk.event("evaluation_left_out", f"{due}; the last step came first")
            return
        self.desk.event("evaluation_late", f"{due}; begins with version {version}")
        self.begin(version, beside_training=True)

    def admit(self) -> None:
        """Ask for as many answers as there is room for, if there is time for them."""
        while self.current is not None and not self.desk.walltime.closed:
            found = self.current.admit(self.credits, self.most_per_rank)
            if found is None:
                return
            group_id, rank = found
            _, prompt, sample = self.current.wanted[group_id]
            message = AdmitGroup(
                group_id,
                prompt.prompt_id,
                prompt.text,
                prompt.metadata,
                1,
                self.current.version,
                "evaluate",
                sample,
            )
            self.desk.world.post(rank, message)

    # ---------------------------------------------------------------------------------------------- coming back
    def finished(self, header: GroupFinished, arrays: Mapping[str, NDArray]) -> None:
        answer = None if self.current is None else self.current.finished(header, arrays)
        if answer is not None:
            self.received(answer)
            self._conclude_or_admit()

    def refused(self, header: GroupRefused) -> None:
        if self.current is not None:
            self.current.refused(header.group_id)
            self._conclude_or_admit()

    def lost(self, rank: int) -> None:
        """A rollout rank is gone, and its places with it: the others are asked for what it had not answered."""
        if self.current is not None and (count := self.current.lost(rank)):
            self.desk.event("evaluation_asked_anew", f"{count} held-out answers that rank {rank} had not given", rank)
            self.admit()

    def _conclude_or_admit(self) -> None:
        assert self.current is not None
        if not self.current.is_complete:
            self.admit()
            return
        evaluation, self.current = self.current, None
        self.desk.log.evaluations(evaluation.rows())
        self.desk.flush()
        self.evaluated(evaluation)

    def waiting_for(self) -> str:
        return self.current.waiting_for() if self.current is not None else "an evaluation"

    # --------------------------------------------------------------------------------------------- checkpoints
    def snapshot(self) -> dict[str, Any]:
        """The evaluation under way, if any: its answers so far. Those that are out are asked for anew after a resume.

        Empty where nothing is under way.
        """
        return self.current.snapshot() if self.current is not None else {}

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Go on with an evaluation beside training that `snapshot` described; `{}` for none."""
        if not saved or not self.heldout:
            return
        kept = tuple(Answer.from_json(line) for line in saved["answers"])
        self.begin(saved["version"], beside_training=True, answered=kept)
        if self.current is not None:
            text = f"version {self.current.version}: {len(self.current.answers)} held-out answers kept, "
            self.desk.event("evaluation_resumed", f"{text}{len(self.current.missing)} asked for anew")
